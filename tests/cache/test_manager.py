"""Pages and state as one object: every operation on both or on neither, stamps that must agree."""

from __future__ import annotations

import pytest
import torch

from hadron.cache.blocks import BlockPool
from hadron.cache.manager import CacheManager, SequenceCache
from hadron.cache.pages import Pages
from hadron.cache.spec import CacheSpec, LayerCache
from hadron.cache.states import States
from hadron.errors import CapacityError

STATEFUL = (LayerCache(latent_width=1, index_width=1, tail_rows=1), LayerCache(kda=(1, 1), conv=(2, 1)))


class Cache:
    """A manager over real tensors; `run` does what a forward pass does to stamps and state."""

    def __init__(self, blocks: int = 4, slots: int = 3, layers: tuple[LayerCache, ...] = STATEFUL) -> None:
        spec = CacheSpec(layers, 2 if layers is STATEFUL else 1, "float32", 4, "float32")
        self.pages, self.states = Pages(spec, blocks), States(spec, slots)
        self.blocks = BlockPool(blocks, 4)
        self.manager = CacheManager(spec, self.blocks, self.pages, self.states)

    def run(self, sequence: SequenceCache, ids: list[int]) -> None:
        self.manager.grow(sequence, len(ids))
        for tensor in (*self.states.kda, *self.states.conv, *self.states.tails):
            if tensor is not None:
                tensor[sequence.state_slot] += float(sum(ids))
        self.states.advance([sequence.state_slot], [sequence.tokens + len(ids)])
        self.manager.commit([sequence], [ids])

    def state(self, sequence: SequenceCache) -> list[float]:
        tensors = (*self.states.kda, *self.states.conv, *self.states.tails)
        return [float(t[sequence.state_slot].flatten()[0]) for t in tensors if t is not None]


def test_a_sequence_grows_page_by_page() -> None:
    cache = Cache()
    sequence = cache.manager.admit()
    for length, pages in ((1, 1), (3, 1), (1, 2), (7, 3)):
        cache.run(sequence, [1] * length)
        assert len(sequence.block_table) == pages
    assert sequence.tokens == 12
    assert cache.states.stamp(sequence.state_slot) == 12


def test_growing_too_far_changes_nothing() -> None:
    cache = Cache()
    sequence = cache.manager.admit()
    cache.run(sequence, [1] * 6)
    with pytest.raises(CapacityError):
        cache.manager.grow(sequence, 11)
    assert len(sequence.block_table) == 2
    assert cache.blocks.free_blocks == 2
    cache.manager.grow(sequence, 10)


def test_a_new_sequence_starts_from_zero() -> None:
    cache = Cache(slots=1)
    sequence = cache.manager.admit()
    cache.run(sequence, [5])
    cache.manager.release(sequence)
    again = cache.manager.admit()
    assert cache.state(again) == [0, 0, 0]
    assert cache.states.stamp(again.state_slot) == 0


def test_slots_run_out_in_words() -> None:
    cache = Cache(slots=1)
    sequence = cache.manager.admit()
    for act in (cache.manager.admit, lambda: cache.manager.fork(sequence), lambda: cache.manager.snapshot(sequence)):
        with pytest.raises(CapacityError) as error:
            act()
        assert error.value.accepted == "at most 1"
    assert cache.manager.free_slots == 0
    cache.manager.release(sequence)
    assert cache.manager.free_slots == 1


def test_release_gives_everything_back() -> None:
    cache = Cache()
    sequence = cache.manager.admit()
    cache.run(sequence, [1] * 9)
    fork = cache.manager.fork(sequence)
    snapshot = cache.manager.snapshot(sequence)
    cache.manager.release(sequence)
    cache.manager.discard(snapshot)
    assert cache.blocks.free_blocks == 1  # the fork holds two full pages and a copy of the third
    cache.manager.release(fork)
    assert cache.blocks.free_blocks == 4
    assert cache.manager.free_slots == 3
    with pytest.raises(AssertionError):
        cache.manager.release(fork)


def test_a_rewind_takes_pages_and_state_back_together() -> None:
    cache = Cache()
    sequence = cache.manager.admit()
    cache.run(sequence, [1, 2, 3, 4, 5])
    snapshot = cache.manager.snapshot(sequence)
    cache.run(sequence, [10] * 8)
    assert cache.state(sequence) == [95] * 3
    cache.manager.restore(sequence, snapshot)
    assert (sequence.tokens, len(sequence.block_table)) == (5, 2)
    assert cache.state(sequence) == [15] * 3
    assert cache.states.stamp(sequence.state_slot) == 5
    assert sequence.pending == [5]


def test_a_page_reopened_by_a_rewind_is_not_found_any_more() -> None:
    cache = Cache(slots=5, layers=(LayerCache(latent_width=1),))
    sequence = cache.manager.admit()
    cache.run(sequence, [1, 2])
    snapshot = cache.manager.snapshot(sequence)
    cache.run(sequence, [3, 4, 5])
    found = cache.manager.admit([1, 2, 3, 4, 9])
    assert found.tokens == 4
    shared = found.block_table[0]
    cache.manager.restore(sequence, snapshot)  # the page now belongs to `found`: take a copy
    assert list(sequence.block_table) != [shared]
    cache.run(sequence, [8, 8, 8])
    assert cache.manager.admit([1, 2, 3, 4, 9]).block_table[0] == shared


def test_a_page_reopened_alone_keeps_its_place() -> None:
    cache = Cache(slots=5, layers=(LayerCache(latent_width=1),))
    sequence = cache.manager.admit()
    cache.run(sequence, [1, 2])
    snapshot = cache.manager.snapshot(sequence)
    cache.run(sequence, [3, 4, 5])
    table = sequence.block_table[:]
    cache.manager.restore(sequence, snapshot)
    assert sequence.block_table == table[:1]
    cache.run(sequence, [8, 8, 8])
    assert cache.manager.admit([1, 2, 3, 4, 9]).tokens == 0
    assert cache.manager.admit([1, 2, 8, 8, 9]).tokens == 4


def test_a_fork_shares_full_pages_and_copies_the_open_one() -> None:
    cache = Cache()
    sequence = cache.manager.admit()
    cache.run(sequence, [1] * 6)
    cache.pages.write_latents(0, torch.tensor([sequence.block_table[1] * 4]), torch.tensor([[7.0]]))
    fork = cache.manager.fork(sequence)
    assert fork.block_table[0] == sequence.block_table[0]
    assert fork.block_table[1] != sequence.block_table[1]
    assert float(cache.pages.latent_rows(0)[fork.block_table[1] * 4]) == 7
    assert cache.state(fork) == [6] * 3
    cache.run(fork, [100])
    assert cache.state(sequence) == [6] * 3


def test_a_fork_that_finds_no_page_changes_nothing() -> None:
    cache = Cache(blocks=2)
    sequence = cache.manager.admit()
    cache.run(sequence, [1] * 6)
    with pytest.raises(CapacityError):
        cache.manager.fork(sequence)
    assert cache.manager.free_slots == 2
    assert cache.blocks.references(sequence.block_table[0]) == 1


def test_stamps_that_disagree_are_caught() -> None:
    cache = Cache()
    sequence = cache.manager.admit()
    cache.run(sequence, [1, 2])
    snapshot = cache.manager.snapshot(sequence)
    cache.states.advance([sequence.state_slot], [3])  # a step that was never committed
    for act in (cache.manager.snapshot, cache.manager.fork, lambda s: cache.manager.commit([s], [[]])):
        with pytest.raises(AssertionError, match="has seen 3 tokens, the pages hold 2"):
            act(sequence)
    cache.states.advance([snapshot.state_slot], [1])
    with pytest.raises(AssertionError, match="has seen 1 tokens, the pages hold 2"):
        cache.manager.restore(sequence, snapshot)


def test_a_snapshot_serves_its_own_sequence_only() -> None:
    cache = Cache()
    a, b = cache.manager.admit(), cache.manager.admit()
    snapshot = cache.manager.snapshot(a)
    with pytest.raises(AssertionError):
        cache.manager.restore(b, snapshot)


def test_prefixes_are_found_only_where_pages_hold_everything() -> None:
    ids = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    for layers, tokens in (((LayerCache(latent_width=1),), 8), (STATEFUL, 0)):
        cache = Cache(blocks=6, layers=layers)
        first = cache.manager.admit()
        cache.run(first, ids)
        cache.manager.release(first)
        assert cache.manager.admit(ids).tokens == tokens
    assert Cache(layers=(LayerCache(latent_width=1),)).manager.admit(ids[:4]).tokens == 0


def test_a_whole_prompt_is_never_taken_from_the_cache() -> None:
    """At least one token must run, or there would be no logits."""
    cache = Cache(layers=(LayerCache(latent_width=1),))
    first = cache.manager.admit()
    cache.run(first, [1] * 8)
    assert cache.manager.admit([1] * 8).tokens == 4


def test_states_outside_raise() -> None:
    states = Cache().states
    for slot in (-1, 3):
        for act in (
            states.stamp,
            lambda s: states.reset(s, 0),
            lambda s: states.copy(0, s),
            lambda s: states.advance([s], [1]),
        ):
            with pytest.raises(IndexError, match="is not one of 3"):
                act(slot)
