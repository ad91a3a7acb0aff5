"""A request's pages and state slot as one object, stamped with its token count.

Every operation acts on pages and state together or on neither. The stamp of the state is kept by the
tensors' owner (`states.States`) and moved by the forward pass; commit, snapshot and restore compare
it with the stamp kept here, so that a state that is a step ahead or behind cannot be used.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hadron.cache.blocks import BlockPool, extend_hashes, page_hash
from hadron.cache.prefix import PrefixState, PrefixStates
from hadron.cache.spec import CacheSpec
from hadron.cache.stores import PageStore, PrefixStore, StateStore
from hadron.errors import CapacityError


@dataclass(slots=True, eq=False)
class SequenceCache:
    """What one request holds. tokens: how many are committed; pages may reach further (`grow`).

    block_table: of int64, which a step's table is copied from.
    findable: whether later requests may find its pages and snapshots by their hashes.
    """

    block_table: array[int]
    state_slot: int
    tokens: int
    hashes: list[bytes] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)  # committed ids of the page that is not full yet
    alive: bool = True
    findable: bool = True


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The beginning of a text that is in the cache: whole pages, and the state at their end where one is needed."""

    blocks: tuple[int, ...] = ()
    hashes: tuple[bytes, ...] = ()


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
    """Hands out pages and state slots; a snapshot takes a slot of its own.

    prefix_snapshots: how many slots may hold states for later requests of the same beginning. store: where
    prefixes are kept beyond the life of the process.
    """

    def __init__(
        self,
        spec: CacheSpec,
        blocks: BlockPool,
        pages: PageStore,
        states: StateStore,
        *,
        prefix_snapshots: int = 0,
        store: PrefixStore | None = None,
    ) -> None:
        assert spec.page_size == blocks.page_size
        self.spec = spec
        self.blocks = blocks
        self._pages = pages
        self._states = states
        self.store = store
        self._free_slots = list(reversed(range(states.slots)))
        self.prefixes = PrefixStates(prefix_snapshots, self._free_slots.append)
        blocks.on_forget = self.prefixes.drop

    @property
    def free_slots(self) -> int:
        """State slots that can be taken now."""
        return len(self._free_slots)

    def match(self, hashes: Sequence[bytes], tokens: int) -> PrefixMatch:
        """What is cached of a text of `tokens` tokens whose whole pages have these hashes; takes nothing.

        Never all of its tokens: one must run, or there would be no logits. Where sequences keep state, as
        far as the deepest snapshot.
        """
        blocks: list[int] = []
        depth = 0
        for content in hashes[: max(0, tokens - 1) // self.spec.page_size]:
            block = self.blocks.find(content)
            if block is None:
                break
            blocks.append(block)
            if not self.spec.has_state or content in self.prefixes:
                depth = len(blocks)
        return PrefixMatch(tuple(blocks[:depth]), tuple(hashes[:depth]))

    def claimed(self, match: PrefixMatch, tokens: int) -> int:
        """How many of the free blocks a sequence of `tokens` tokens that begins with `match` takes."""
        unheld = sum(self.blocks.references(block) == 0 for block in match.blocks)
        return -(-tokens // self.spec.page_size) - len(match.blocks) + unheld

    def admit(
        self, token_ids: Sequence[int] = (), *, match: PrefixMatch | None = None, findable: bool = True
    ) -> SequenceCache:
        """A new sequence; `CapacityError` when no state slot is left.

        It begins with `match`, by default what is cached of `token_ids` (`.tokens` says how much).
        """
        if match is None:
            match = self.match(extend_hashes([], token_ids, self.spec.page_size), len(token_ids))
        slot = self._take_slot()
        tokens = len(match.blocks) * self.spec.page_size
        sequence = SequenceCache(array("q", match.blocks), slot, tokens, list(match.hashes), findable=findable)
        self.blocks.share(match.blocks)
        if not match.blocks or not self.spec.has_state:
            self._states.reset(slot, tokens)
            return sequence
        state = self.prefixes.use(match.hashes[-1])
        assert state is not None and state.tokens == tokens, "a snapshot and its pages disagree"
        self._states.copy(state.slot, slot)
        self._agree(slot, tokens)
        return sequence

    def recall(self, hashes: Sequence[bytes], tokens: int) -> None:
        """Bring into memory what the store has of a text beyond what is there; `match` then finds it.

        Pages become findable when all of them are in place, and only what is free is used.
        """
        if self.store is None:
            return
        # The store forgets what it could not read, so this ends.
        while (depth := self._stored_depth(hashes, tokens)) and not self._load(self.store, hashes[:depth]):
            pass

    def _load(self, store: PrefixStore, hashes: Sequence[bytes]) -> bool:
        """Pages and state of a prefix; False where something could not be read."""
        found = {content: block for content in hashes if (block := self.blocks.find(content)) is not None}
        self.blocks.share(found.values())
        missing = [content for content in hashes if content not in found]
        loaded: dict[bytes, int] = {}
        readable, room = True, len(missing) <= self.blocks.free_blocks
        try:
            for content in missing if room else ():
                (loaded[content],) = self.blocks.allocate(1)
                readable = store.load_page(content, loaded[content]) and readable
            if room and readable:
                for content, block in loaded.items():
                    self.blocks.register(block, content)
                readable = self._load_state(store, hashes[-1], len(hashes) * self.spec.page_size)
        finally:  # reading takes long, and may be interrupted
            held = found | loaded
            self.blocks.free([held[content] for content in hashes if content in held])
        return readable

    def _stored_depth(self, hashes: Sequence[bytes], tokens: int) -> int:
        """How many whole pages the store can add up to; 0 where it adds nothing to what is in memory."""
        assert self.store is not None
        if self.spec.has_state and not self.prefixes.limit:
            return 0
        depth = 0
        limit = max(0, tokens - 1) // self.spec.page_size
        for count, content in enumerate(hashes[:limit], 1):
            if self.blocks.find(content) is None and not self.store.has_page(content):
                break
            if not self.spec.has_state or content in self.prefixes or self.store.has_state(content):
                depth = count
        return depth if depth > len(self.match(hashes, tokens).blocks) else 0

    def _load_state(self, store: PrefixStore, content: bytes, tokens: int) -> bool:
        if not self.spec.has_state or content in self.prefixes:
            return True
        self.prefixes.make_room()
        slot, readable = self._take_slot(), False
        try:
            readable = store.load_state(content, slot, tokens)
        finally:
            if not readable:
                self._free_slots.append(slot)
        if not readable:
            return False
        self._agree(slot, tokens)
        self.prefixes.add(content, PrefixState(slot, tokens, passing=False))
        return True

    def persist(self, sequence: SequenceCache) -> None:
        """Give the store what a later process can use of this sequence: whole pages, and the states among them."""
        if self.store is None or not sequence.findable:
            return
        depth = len(sequence.hashes)
        if self.spec.has_state:
            kept = [i for i, content in enumerate(sequence.hashes, 1) if content in self.prefixes]
            depth = max(kept, default=0)
            for count in kept:
                content = sequence.hashes[count - 1]
                self.store.save_state(content, self.prefixes.slot(content), count * self.spec.page_size)
        for content, block in zip(sequence.hashes[:depth], sequence.block_table, strict=False):
            self.store.save_page(content, block)

    def keep(self, sequence: SequenceCache, *, passing: bool = False) -> bytes | None:
        """Keep the state at the end of the sequence's last whole page for later requests; returns its hash.

        None, and nothing is kept, where no tokens or a part of a page is open, or there is no room at all.
        """
        assert sequence.alive
        size = self.spec.page_size
        if not sequence.tokens or sequence.tokens % size or not sequence.findable or not self.spec.has_state:
            return None
        content = sequence.hashes[-1]
        if not self.prefixes.limit or self.blocks.find(content) is None:
            return None
        if not self.prefixes.touch(content, passing=passing):
            self._agree(sequence.state_slot, sequence.tokens)
            self.prefixes.make_room()
            slot = self._take_slot()
            self._states.copy(sequence.state_slot, slot)
            self.prefixes.add(content, PrefixState(slot, sequence.tokens, passing))
        return content

    def try_grow(self, sequence: SequenceCache, tokens: int) -> bool:
        """Make room for `tokens` more than are committed; False, and no change, where there are no blocks for that."""
        if sequence.tokens + tokens > len(sequence.block_table) * self.spec.page_size:
            if self._lacking(sequence, tokens) > self.blocks.free_blocks:
                return False
            self.grow(sequence, tokens)
        return True

    def grow(self, sequence: SequenceCache, tokens: int) -> None:
        """Make room for `tokens` more than are committed, or `CapacityError` and no change."""
        assert sequence.alive and tokens >= 0
        needed = self._lacking(sequence, tokens)
        if needed > 0:
            sequence.block_table.extend(self.blocks.allocate(needed))

    def trim(self, sequence: SequenceCache) -> None:
        """Give back pages beyond the committed tokens: what guesses took that were wrong."""
        assert sequence.alive
        kept = -(-sequence.tokens // self.spec.page_size)
        self.blocks.free(sequence.block_table[kept:])
        del sequence.block_table[kept:]

    def commit(self, sequences: Sequence[SequenceCache], token_ids: Iterable[Sequence[int]]) -> None:
        """Stamp the tokens of each sequence that a forward pass has written; the states must have moved as far."""
        size = self.spec.page_size
        stamps = self._states.stamps([sequence.state_slot for sequence in sequences])
        for sequence, ids, stamp in zip(sequences, token_ids, stamps, strict=True):
            tokens = sequence.tokens + len(ids)
            assert sequence.alive and tokens <= len(sequence.block_table) * size, "committed beyond the pages"
            assert stamp == tokens, f"the state has seen {stamp} tokens, the pages hold {tokens}"
            sequence.tokens = tokens
            sequence.pending += ids
            if len(sequence.pending) >= size:
                self._close_pages(sequence)

    def _close_pages(self, sequence: SequenceCache) -> None:
        size = self.spec.page_size
        while len(sequence.pending) >= size:
            content = page_hash(sequence.hashes[-1] if sequence.hashes else b"", sequence.pending[:size])
            if sequence.findable:
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
        table = sequence.block_table[:full] + array("q", tail)
        return SequenceCache(
            table, slot, sequence.tokens, list(sequence.hashes), list(sequence.pending), findable=sequence.findable
        )

    def release(self, sequence: SequenceCache) -> None:
        """Give back everything the sequence holds; its snapshots are discarded apart."""
        assert sequence.alive
        sequence.alive = False
        self.blocks.free(sequence.block_table)
        sequence.block_table = array("q")
        self._free_slots.append(sequence.state_slot)

    def forget(self, sequence: SequenceCache) -> None:
        """Let nobody find what only this sequence holds: its content is not to be trusted."""
        sequence.findable = False
        for block in sequence.block_table:
            if self.blocks.references(block) == 1:
                self.blocks.forget(block)

    def discard(self, snapshot: Snapshot) -> None:
        """Give back a snapshot's slot."""
        assert snapshot.alive
        snapshot.alive = False
        self._free_slots.append(snapshot.state_slot)

    def _lacking(self, sequence: SequenceCache, tokens: int) -> int:
        return -(-(sequence.tokens + tokens) // self.spec.page_size) - len(sequence.block_table)

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
