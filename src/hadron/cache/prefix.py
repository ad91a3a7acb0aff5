"""Snapshots of recurrent state for later requests: by the hash of the page that ends them, oldest out first.

A snapshot is a slot with its token count. It stands beside pages that are found by the same hash and is
of no use without them, so it goes when its page goes. What merely moves along with a decoding request is
*passing*: its successor may take its place, until another request makes use of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class PrefixState:
    """A state in `slot` that has seen `tokens` tokens."""

    slot: int
    tokens: int
    passing: bool


class PrefixStates:
    """At most `limit` snapshots. free: takes back the slot of one that goes."""

    def __init__(self, limit: int, free: Callable[[int], None]) -> None:
        self.limit = limit
        self.evictions = 0
        self._free = free
        self._by_hash: OrderedDict[bytes, PrefixState] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_hash)

    def __contains__(self, content: bytes) -> bool:
        return content in self._by_hash

    @property
    def slots(self) -> list[int]:
        """The slots that snapshots occupy."""
        return [state.slot for state in self._by_hash.values()]

    def slot(self, content: bytes) -> int:
        """The slot of the snapshot of that hash."""
        return self._by_hash[content].slot

    def use(self, content: bytes) -> PrefixState | None:
        """The snapshot of that hash, now the most recently used, and to stay."""
        state = self._by_hash.get(content)
        if state is not None:
            state.passing = False
            self._by_hash.move_to_end(content)
        return state

    def touch(self, content: bytes, *, passing: bool) -> bool:
        """Whether there is a snapshot of that hash, now the most recently used."""
        state = self._by_hash.get(content)
        if state is None:
            return False
        state.passing = state.passing and passing
        self._by_hash.move_to_end(content)
        return True

    def add(self, content: bytes, state: PrefixState) -> None:
        """Keep a snapshot for which `make_room` was called."""
        assert content not in self._by_hash and len(self._by_hash) < self.limit
        self._by_hash[content] = state

    def make_room(self) -> None:
        """Let the least recently used go where another would be one too many."""
        while len(self._by_hash) >= self.limit > 0:
            self.drop(next(iter(self._by_hash)))
            self.evictions += 1

    def drop(self, content: bytes) -> None:
        """Forget a snapshot, if there is one of that hash."""
        state = self._by_hash.pop(content, None)
        if state is not None:
            self._free(state.slot)

    def drop_passing(self, content: bytes) -> None:
        """Forget a snapshot that only moved along and that nobody used."""
        state = self._by_hash.get(content)
        if state is not None and state.passing:
            self.drop(content)
