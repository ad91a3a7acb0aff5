"""A request's pages and state slot as one object, stamped with its token count.

Every operation acts on pages and state together or on neither. The stamp of the state is kept by the
tensors' owner (`states.States`) and moved by the forward pass; commit, snapshot and restore compare
it with the stamp kept here, so that a state that is a step ahead or behind cannot be used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hadron.cache.blocks import BlockPool, page_hash
from hadron.cache.spec import CacheSpec
from hadron.errors import CapacityError


class StateStore(Protocol):
    """Owner of the state slots (`states.States`)."""

    @property
    def slots(self) -> int:
        """How many slots there are."""

    def stamp(self, slot: int) -> int:
        """Tokens the state in `slot` has seen."""

    def reset(self, slot: int, tokens: int) -> None:
        """Zero the state in `slot` and stamp it."""

    def copy(self, source: int, target: int) -> None:
        """Copy state and stamp."""


class PageStore(Protocol):
    """Owner of the pages (`pages.Pages`)."""

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page in all layers."""


@dataclass(slots=True, eq=False)
class SequenceCache:
    """What one request holds. tokens: how many are committed; pages may reach further (`grow`)."""

    block_table: list[int]
    state_slot: int
    tokens: int
    hashes: list[bytes] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)  # committed ids of the page that is not full yet
    alive: bool = True


@dataclass(slots=True, eq=False)
class Snapshot:
    """A copy of a sequence's state at `tokens`. Its pages are the sequence's own: pages only append."""

    owner: SequenceCache
    state_slot: int
    tokens: int
    pages: int
    pending: tuple[int, ...]
    alive: bool = True


class CacheManager:
    """Hands out pages and state slots; a snapshot takes a slot of its own."""

    def __init__(self, spec: CacheSpec, blocks: BlockPool, pages: PageStore, states: StateStore) -> None:
        assert spec.page_size == blocks.page_size
        self.spec = spec
        self.blocks = blocks
        self._pages = pages
        self._states = states
        self._free_slots = list(reversed(range(states.slots)))

    @property
    def free_slots(self) -> int:
        """State slots that can be taken now."""
        return len(self._free_slots)

    def admit(self, token_ids: Sequence[int] = ()) -> SequenceCache:
        """A new sequence; `CapacityError` when no state slot is left.

        Whole pages of `token_ids` that are still cached are taken over (`.tokens` says how many), but
        never all of them, and none where a sequence keeps state that pages cannot hold.
        """
        slot = self._take_slot()
        sequence = SequenceCache([], slot, 0)
        size = self.spec.page_size
        if not self.spec.has_state:
            parent = b""
            for start in range(0, len(token_ids) - size, size):
                parent = page_hash(parent, token_ids[start : start + size])
                block = self.blocks.find(parent)
                if block is None:
                    break
                self.blocks.share([block])
                sequence.block_table.append(block)
                sequence.hashes.append(parent)
            sequence.tokens = len(sequence.block_table) * size
        self._states.reset(slot, sequence.tokens)
        return sequence

    def grow(self, sequence: SequenceCache, tokens: int) -> None:
        """Make room for `tokens` more than are committed, or `CapacityError` and no change."""
        assert sequence.alive and tokens >= 0
        needed = -(-(sequence.tokens + tokens) // self.spec.page_size) - len(sequence.block_table)
        if needed > 0:
            sequence.block_table += self.blocks.allocate(needed)

    def commit(self, sequence: SequenceCache, token_ids: Sequence[int]) -> None:
        """Stamp the tokens that a forward pass has written; the state must have moved as far."""
        assert sequence.alive
        tokens = sequence.tokens + len(token_ids)
        assert tokens <= len(sequence.block_table) * self.spec.page_size, "committed beyond the pages"
        self._agree(sequence.state_slot, tokens)
        sequence.tokens = tokens
        sequence.pending += token_ids
        size = self.spec.page_size
        while len(sequence.pending) >= size:
            content = page_hash(sequence.hashes[-1] if sequence.hashes else b"", sequence.pending[:size])
            self.blocks.register(sequence.block_table[len(sequence.hashes)], content)
            sequence.hashes.append(content)
            del sequence.pending[:size]

    def snapshot(self, sequence: SequenceCache) -> Snapshot:
        """Keep the state as it is now; `CapacityError` when no slot is left."""
        assert sequence.alive
        self._agree(sequence.state_slot, sequence.tokens)
        slot = self._take_slot()
        self._states.copy(sequence.state_slot, slot)
        return Snapshot(sequence, slot, sequence.tokens, len(sequence.hashes), tuple(sequence.pending))

    def restore(self, sequence: SequenceCache, snapshot: Snapshot) -> None:
        """Rewind to a snapshot of this sequence: pages beyond it are freed, the state copied back."""
        assert sequence.alive and snapshot.alive and snapshot.owner is sequence
        assert sequence.tokens >= snapshot.tokens, "a snapshot lies in the past"
        self._agree(snapshot.state_slot, snapshot.tokens)
        kept = -(-snapshot.tokens // self.spec.page_size)
        if snapshot.pages < min(kept, len(sequence.hashes)):
            self._reopen(sequence, snapshot.pages)
        self.blocks.free(sequence.block_table[kept:])
        del sequence.block_table[kept:]
        del sequence.hashes[snapshot.pages :]
        sequence.pending = list(snapshot.pending)
        sequence.tokens = snapshot.tokens
        self._states.copy(snapshot.state_slot, sequence.state_slot)

    def fork(self, sequence: SequenceCache) -> SequenceCache:
        """A second sequence of the same tokens: full pages are shared, the open one and the state copied."""
        assert sequence.alive
        self._agree(sequence.state_slot, sequence.tokens)
        full = sequence.tokens // self.spec.page_size
        slot = self._take_slot()
        try:
            tail = self.blocks.allocate(1 if sequence.tokens % self.spec.page_size else 0)
        except CapacityError:
            self._free_slots.append(slot)
            raise
        for block in tail:
            self._pages.copy_page(sequence.block_table[full], block)
        self.blocks.share(sequence.block_table[:full])
        self._states.copy(sequence.state_slot, slot)
        table = sequence.block_table[:full] + tail
        return SequenceCache(table, slot, sequence.tokens, list(sequence.hashes), list(sequence.pending))

    def release(self, sequence: SequenceCache) -> None:
        """Give back everything the sequence holds; its snapshots are discarded apart."""
        assert sequence.alive
        sequence.alive = False
        self.blocks.free(sequence.block_table)
        sequence.block_table = []
        self._free_slots.append(sequence.state_slot)

    def discard(self, snapshot: Snapshot) -> None:
        """Give back a snapshot's slot."""
        assert snapshot.alive
        snapshot.alive = False
        self._free_slots.append(snapshot.state_slot)

    def _reopen(self, sequence: SequenceCache, page: int) -> None:
        """A page that is full now was open then and will be overwritten: nobody else may have it."""
        old = sequence.block_table[page]
        if self.blocks.references(old) == 1:
            self.blocks.forget(old)
            return
        new = self.blocks.allocate(1)[0]
        self._pages.copy_page(old, new)
        self.blocks.free([old])
        sequence.block_table[page] = new

    def _agree(self, slot: int, tokens: int) -> None:
        stamp = self._states.stamp(slot)
        assert stamp == tokens, f"the state has seen {stamp} tokens, the pages hold {tokens}"

    def _take_slot(self) -> int:
        if not self._free_slots:
            raise CapacityError(
                "The cache has no state slot left", where="cache", found="one more sequence or snapshot",
                accepted=f"at most {self._states.slots}", hint="run fewer requests at a time",
            )  # fmt: skip
        return self._free_slots.pop()
