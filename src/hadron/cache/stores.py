"""What the manager asks of those who own the tensors, and of a place outside memory. No tensors here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class StateStore(Protocol):
    """Owner of the state slots (`states.States`)."""

    @property
    def slots(self) -> int:
        """How many slots there are."""

    def stamp(self, slot: int) -> int:
        """Tokens the state in `slot` has seen."""

    def stamps(self, slots: Sequence[int]) -> tuple[int, ...]:
        """`stamp` of each."""

    def reset(self, slot: int, tokens: int) -> None:
        """Zero the state in `slot` and stamp it."""

    def copy(self, source: int, target: int) -> None:
        """Copy state and stamp."""


class PageStore(Protocol):
    """Owner of the pages (`pages.Pages`)."""

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page in all layers."""


class PrefixStore(Protocol):
    """Pages and states outside memory, by hash (`engine.prefix_store.DiskPrefixes`)."""

    def has_page(self, content: bytes) -> bool:
        """Whether it claims to have that page."""

    def has_state(self, content: bytes) -> bool:
        """Whether it claims to have the state at the end of that page."""

    def save_page(self, content: bytes, block: int) -> None:
        """Keep a page, unless it has it."""

    def save_state(self, content: bytes, slot: int, tokens: int) -> None:
        """Keep a state, unless it has it."""

    def load_page(self, content: bytes, block: int) -> bool:
        """Fill `block`; False, and it no longer claims to have it, where that failed."""

    def load_state(self, content: bytes, slot: int, tokens: int) -> bool:
        """Fill and stamp `slot`; False, and it no longer claims to have it, where that failed."""
