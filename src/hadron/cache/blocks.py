"""Block pool: which page belongs to whom. Allocate, share by counting references, find by prefix, free.

A block is the number of a page in every layer at once. Blocks whose content is known by hash stay
findable after they are freed, until their page is needed: least recently freed goes first. Hashes are
chained (SHA-256), so one hash stands for all tokens up to the end of its page.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from hadron.errors import CapacityError


def page_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of a full page that follows the page (or b"" for none) of hash `parent`."""
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


def extend_hashes(hashes: list[bytes], token_ids: Sequence[int], page_size: int) -> list[bytes]:
    """Append the hashes of the whole pages of `token_ids` that `hashes` does not have yet; returns it."""
    for start in range(len(hashes) * page_size, len(token_ids) - page_size + 1, page_size):
        hashes.append(page_hash(hashes[-1] if hashes else b"", token_ids[start : start + page_size]))
    return hashes


class BlockPool:
    """Blocks 0 .. count-1 of `page_size` tokens. on_forget: called with a hash that is no longer found."""

    def __init__(self, count: int, page_size: int, on_forget: Callable[[bytes], None] | None = None) -> None:
        self.count = count
        self.page_size = page_size
        self.on_forget = on_forget
        self._references = [0] * count
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    def references(self, block: int) -> int:
        """How many sequences hold `block`."""
        return self._references[self._checked(block)]

    def allocate(self, count: int) -> list[int]:
        """`count` blocks of one reference each, or `CapacityError` and no change."""
        if count > len(self._free):
            raise CapacityError(
                "The cache has no pages left", where="cache", found=f"{count} pages asked for, {len(self._free)} free",
                accepted=f"at most {self.count} pages of {self.page_size} tokens in all",
                hint="use a shorter prompt or fewer tokens, or give the cache more memory",
            )  # fmt: skip
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
            self.forget(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each of `blocks`, which are in use or findable by hash."""
        blocks = [self._checked(b) for b in blocks]
        if any(self._references[b] == 0 and b not in self._hash_of for b in blocks):
            raise ValueError("a free block of unknown content cannot be shared")
        for block in blocks:
            self._free.pop(block, None)
            self._references[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """One reference less to each of `blocks`; without any left, a block can be allocated again."""
        blocks = [self._checked(b) for b in blocks]
        counts: dict[int, int] = {}
        for block in blocks:
            counts[block] = counts.get(block, 0) + 1
        if any(self._references[block] < count for block, count in counts.items()):
            raise ValueError("a block was freed more often than it was held")
        # The end of a sequence is reused first: its beginning is likelier to be asked for again.
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if block not in self._hash_of:
                    self._free.move_to_end(block, last=False)

    def register(self, block: int, content: bytes) -> None:
        """Make the full page `block` findable by its hash; the first page of equal content stays."""
        if self._references[self._checked(block)] and block not in self._hash_of and content not in self._block_of:
            self._hash_of[block] = content
            self._block_of[content] = block

    def forget(self, block: int) -> None:
        """Its content is about to change: do not find `block` by hash any more."""
        known = self._hash_of.pop(self._checked(block), None)
        if known is not None:
            del self._block_of[known]
            if self.on_forget is not None:
                self.on_forget(known)

    def find(self, content: bytes) -> int | None:
        """The block of that hash, in use or freed but not yet reused; the caller must `share` it."""
        return self._block_of.get(content)

    def _checked(self, block: int) -> int:
        if not 0 <= block < self.count:
            raise IndexError(f"block {block} is not one of {self.count}")
        return block
