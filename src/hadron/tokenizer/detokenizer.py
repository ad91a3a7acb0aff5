"""Token ids to text as they arrive: what was emitted, joined, is what decoding all of them gives.

Bytes of an unfinished character wait for the rest (at most three); `finish` gives them up as U+FFFD.
`StopStrings` stands behind it and holds back what may be the beginning of a stop string. Neither
result depends on how the text was cut into tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from hadron.tokenizer.tokenizer import Tokenizer

#: Where a tokenizer is not byte-level: the most tokens that wait for a character to end. One settled
#: group of them is decoded again as context for the next.
WAITING = 4


class Detokenizer:
    """Streams the text of one sequence of generated ids."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._open = False  # whether it waits for the rest of a character
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """Text that is certain once `token` has arrived; may be empty."""
        if token in self._skipped:
            return ""
        if self._tokenizer.is_byte_level:
            data = self._tokenizer.token_bytes(token)
            if not self._open and data.isascii():  # four times as fast
                return data.decode("ascii")
            text = self._utf8.decode(data)
            self._open = bool(self._utf8.getstate()[0])
            return text
        self._pending.append(token)
        text = self._pending_text()
        return "" if text.endswith("\ufffd") and len(self._pending) < WAITING else self._settle(text)

    def finish(self) -> str:
        """What was held back; the sequence ends here."""
        if self._tokenizer.is_byte_level:
            return self._utf8.decode(b"", final=True)
        return self._settle(self._pending_text())

    def _pending_text(self) -> str:
        decode = self._tokenizer.decode
        before = decode(self._context, skip_special_tokens=False)
        return decode([*self._context, *self._pending], skip_special_tokens=False)[len(before) :]

    def _settle(self, text: str) -> str:
        self._context, self._pending = self._pending or self._context, []
        return text


class StopStrings:
    """Cuts a stream of text before the first stop string in it.

    First is the one that is complete first; of several complete at the same character, the longest.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(sorted(set(stop), key=len, reverse=True))
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text that cannot belong to a stop string any more. Sets `matched` when one is complete."""
        if not self._stop or self.matched is not None:
            return "" if self.matched is not None else text
        seen = self._held + text
        ends = [(at + len(stop), at, stop) for stop in self._stop if (at := seen.find(stop)) >= 0]
        if ends:
            _, start, self.matched = min(ends)
            self._held = ""
            return seen[:start]
        keep = max(self._overlap(seen, stop) for stop in self._stop)
        self._held = seen[len(seen) - keep :]
        return seen[: len(seen) - keep]

    def finish(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that `stop` begins with."""
        return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
