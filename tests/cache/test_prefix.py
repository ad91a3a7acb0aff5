"""States kept for later requests: what they take, who goes first, and that no half of one is ever found."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hadron.cache.blocks import extend_hashes
from hadron.cache.manager import CacheManager, SequenceCache
from tests.engine.mock_cache import PAGE, MockEngine

TEXT = list(range(40))


def manager(pages: int = 12, snapshots: int = 3, seqs: int = 3) -> MockEngine:
    return MockEngine(pages=pages, seqs=seqs, snapshots=snapshots)


def computed(e: MockEngine, ids: Sequence[int]) -> SequenceCache:
    """A sequence that has seen these tokens; its state is their sum."""
    sequence = e.manager.admit()
    e.manager.grow(sequence, len(ids))
    for position, token in enumerate(ids):
        e.pages.rows[sequence.block_table[position // PAGE]][position % PAGE] = token
    e.states.values[sequence.state_slot] = (len(ids), sum(ids))
    e.manager.commit([sequence], [ids])
    return sequence


def found(m: CacheManager, ids: Sequence[int]) -> int:
    return len(m.match(extend_hashes([], ids, PAGE), len(ids)).blocks) * PAGE


def test_br80_a_snapshot_takes_one_slot_and_no_page() -> None:
    e = manager()
    sequence = computed(e, TEXT[:8])
    blocks, slots = e.blocks.free_blocks, e.manager.free_slots
    assert e.manager.keep(sequence) == sequence.hashes[-1]
    assert (e.blocks.free_blocks, e.manager.free_slots) == (blocks, slots - 1)
    e.manager.keep(sequence)
    assert e.manager.free_slots == slots - 1, "once is enough"


def test_only_whole_pages_are_kept() -> None:
    e = manager()
    for count in (0, 3, 5):
        assert e.manager.keep(computed(e, TEXT[:count])) is None
    assert len(e.manager.prefixes) == 0


def test_the_least_recently_used_goes_first() -> None:
    e = manager(snapshots=2)
    for start in (0, 8):
        sequence = computed(e, TEXT[start : start + 4])
        e.manager.keep(sequence)
        e.manager.release(sequence)
    first = e.manager.admit([*TEXT[:4], 99])
    assert first.tokens == 4
    sequence = computed(e, TEXT[16:20])
    e.manager.keep(sequence)
    assert [found(e.manager, [*TEXT[s : s + 4], 99]) for s in (0, 8, 16)] == [4, 0, 4]
    assert e.manager.prefixes.evictions == 1


def test_what_moves_along_is_replaced_unless_somebody_used_it() -> None:
    e = manager()
    sequence = computed(e, TEXT[:4])
    kept = e.manager.keep(sequence, passing=True)
    assert kept is not None
    e.manager.prefixes.drop_passing(kept)
    assert found(e.manager, TEXT[:5]) == 0
    e.manager.keep(sequence, passing=True)
    e.manager.admit(TEXT[:5])
    e.manager.prefixes.drop_passing(kept)
    assert found(e.manager, TEXT[:5]) == 4
    e.manager.keep(sequence, passing=True)
    e.manager.prefixes.drop_passing(kept)
    assert found(e.manager, TEXT[:5]) == 4, "kept for good, whatever moves along later"


def test_br74_a_state_of_another_depth_is_never_restored() -> None:
    e = manager()
    sequence = computed(e, TEXT[:8])
    e.states.values[sequence.state_slot] = (9, 0)
    with pytest.raises(AssertionError, match="has seen 9 tokens, the pages hold 8"):
        e.manager.keep(sequence)
    e.states.values[sequence.state_slot] = (8, 28)
    e.manager.keep(sequence)
    (slot,) = e.manager.prefixes.slots
    e.states.values[slot] = (7, 0)
    with pytest.raises(AssertionError, match="has seen 7 tokens, the pages hold 8"):
        e.manager.admit(TEXT[:9])


def test_distrusted_pages_take_their_snapshots_along() -> None:
    e = manager()
    sequence = computed(e, TEXT[:8])
    e.manager.keep(sequence)
    e.manager.forget(sequence)
    e.manager.release(sequence)
    assert len(e.manager.prefixes) == 0 and found(e.manager, TEXT[:9]) == 0
    assert e.manager.free_slots == e.states.slots


class Store:
    """Pages and states by hash; what is in `broken` cannot be read, and is forgotten then."""

    def __init__(self, e: MockEngine) -> None:
        self.e = e
        self.pages: dict[bytes, list[int | None]] = {}
        self.states: dict[bytes, tuple[int, int]] = {}
        self.broken: set[bytes] = set()

    def has_page(self, content: bytes) -> bool:
        return content in self.pages

    def has_state(self, content: bytes) -> bool:
        return content in self.states

    def save_page(self, content: bytes, block: int) -> None:
        self.pages[content] = list(self.e.pages.rows[block])

    def save_state(self, content: bytes, slot: int, tokens: int) -> None:
        assert self.e.states.stamp(slot) == tokens
        self.states[content] = self.e.states.values[slot]

    def load_page(self, content: bytes, block: int) -> bool:
        self.e.pages.rows[block] = [-1] * PAGE  # half of it, if it fails
        if content in self.broken:
            del self.pages[content]
            return False
        self.e.pages.rows[block] = list(self.pages[content])
        return True

    def load_state(self, content: bytes, slot: int, tokens: int) -> bool:
        if content in self.broken:
            del self.states[content]
            return False
        self.e.states.values[slot] = self.states[content]
        return True


def stored(ids: Sequence[int], kept: Sequence[int]) -> tuple[MockEngine, Store]:
    """A store with these tokens and states at `kept`, and an engine that has neither in memory."""
    e = manager(pages=12, snapshots=4)
    store = e.manager.store = Store(e)
    for count in kept:
        sequence = computed(e, ids[:count])
        e.manager.keep(sequence)
        e.manager.persist(sequence)
        e.manager.release(sequence)
    fresh = manager(pages=12, snapshots=4)
    fresh.manager.store, store.e = store, fresh
    return fresh, store


def test_a_stored_prefix_is_brought_back_whole() -> None:
    e, store = stored(TEXT[:20], [8, 20])
    assert len(store.pages) == 5 and len(store.states) == 2
    hashes = extend_hashes([], TEXT, PAGE)
    e.manager.recall(hashes, 40)
    assert found(e.manager, TEXT) == 20
    sequence = e.manager.admit(TEXT)
    assert [e.pages.rows[block] for block in sequence.block_table] == [TEXT[i : i + 4] for i in range(0, 20, 4)]
    assert e.states.values[sequence.state_slot] == (20, sum(TEXT[:20]))
    e.manager.release(sequence)
    assert e.blocks.free_blocks == 12 and e.manager.free_slots == e.states.slots - 1


@pytest.mark.parametrize(("page", "expected"), [(0, 0), (1, 0), (2, 8), (4, 8)])
def test_br75_a_page_that_cannot_be_read_is_never_found(page: int, expected: int) -> None:
    e, store = stored(TEXT[:20], [8, 20])
    hashes = extend_hashes([], TEXT, PAGE)
    store.broken.add(hashes[page])
    e.manager.recall(hashes, 40)
    assert found(e.manager, TEXT) == expected
    assert e.blocks.find(hashes[page]) is None
    assert all(-1 not in e.pages.rows[block] for h in hashes if (block := e.blocks.find(h)) is not None)
    assert e.blocks.free_blocks == 12


def test_br75_a_state_that_cannot_be_read_leaves_the_one_before() -> None:
    e, store = stored(TEXT[:20], [8, 20])
    hashes = extend_hashes([], TEXT, PAGE)
    store.broken.add(hashes[4])
    e.manager.recall(hashes, 40)
    assert found(e.manager, TEXT) == 8
    store.broken.add(hashes[1])
    fresh = manager()
    fresh.manager.store, store.e = store, fresh
    fresh.manager.recall(hashes, 40)
    assert found(fresh.manager, TEXT) == 0 and fresh.manager.free_slots == fresh.states.slots


def test_without_room_nothing_is_brought_back_and_nothing_lost() -> None:
    e, _ = stored(TEXT[:20], [20])
    held = computed(e, [7] * 36)
    e.manager.recall(extend_hashes([], TEXT, PAGE), 40)
    assert found(e.manager, TEXT) == 0 and e.blocks.free_blocks == 3
    e.manager.release(held)
    e.manager.recall(extend_hashes([], TEXT, PAGE), 40)
    assert found(e.manager, TEXT) == 20


def test_what_is_in_memory_is_not_read_again() -> None:
    e, store = stored(TEXT[:20], [20])
    sequence = computed(e, TEXT[:20])
    store.pages = {content: [-1] * PAGE for content in store.pages}
    e.manager.recall(extend_hashes([], TEXT, PAGE), 40)
    assert found(e.manager, TEXT) == 20
    assert e.pages.rows[sequence.block_table[0]] == TEXT[:4]
