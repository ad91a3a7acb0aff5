"""Where the family's markup lies in a text that is being generated: markers are tokens, never spelt-out characters.

A model that writes `</think>` letter by letter, in a piece of code for example, writes text. Text arrives later
than its tokens where a stop string or a character is open, so markers are placed by counting characters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import StrEnum

from hadron.tokenizer.detokenizer import Detokenizer
from hadron.tokenizer.tokenizer import Tokenizer


class Mark(StrEnum):
    """Markers of thoughts and tool calls, as GLM's templates write them."""

    THINK = "<think>"
    THINK_END = "</think>"
    CALL = "<tool_call>"
    CALL_END = "</tool_call>"
    KEY = "<arg_key>"
    KEY_END = "</arg_key>"
    VALUE = "<arg_value>"
    VALUE_END = "</arg_value>"


#: Some text, or a marker. A `Mark` is a `str` too: ask for it first.
Piece = str | Mark

#: Markup that opens a turn of a conversation.
TURNS = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")


class Markup:
    """Which ids of a tokenizer are markers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        known = {mark: tokenizer.token_id(mark) for mark in Mark}
        self.ids: dict[Mark, int] = {mark: token for mark, token in known.items() if token is not None}
        self.marks = {token: mark for mark, token in self.ids.items()}
        self._turns = frozenset(tokenizer.token_id(word) for word in TURNS) - {None}

    @property
    def has_thoughts(self) -> bool:
        """Whether thoughts can be told from the answer."""
        return {Mark.THINK, Mark.THINK_END} <= set(self.ids)

    @property
    def has_calls(self) -> bool:
        """Whether tool calls can be told from text."""
        return set(Mark) - {Mark.THINK, Mark.THINK_END} <= set(self.ids)

    def open_thought(self, prompt: Sequence[int]) -> bool:
        """Whether the last turn of a prompt leaves a thought open: that is where the answer begins."""
        if not self.has_thoughts:
            return False
        begin, end = self.ids[Mark.THINK], self.ids[Mark.THINK_END]
        last = next((token for token in reversed(prompt) if token in (begin, end) or token in self._turns), None)
        return last == begin

    def ends_with_mark(self, prompt: Sequence[int]) -> bool:
        """Whether a marker is the last token of a prompt."""
        return bool(prompt) and prompt[-1] in self.marks


class MarkedText:
    """Generated tokens, and text as it becomes certain, to pieces."""

    def __init__(self, tokenizer: Tokenizer, markup: Markup, *, skip_special_tokens: bool = True) -> None:
        self._marks = markup.marks
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._decoded = 0
        self._given = 0
        self._ahead: deque[tuple[int, Mark]] = deque()
        self._text = ""

    def push(self, token: int | None, text: str) -> list[Piece]:
        """token: the next one, None for text without one. text: what became certain of all tokens' text."""
        if token is not None:
            added = self._detokenizer.push(token)
            self._decoded += len(added)
            mark = self._marks.get(token)
            if mark is not None and added.endswith(mark):
                self._ahead.append((self._decoded - len(mark), mark))
        self._text += text
        pieces: list[Piece] = []
        while self._ahead and self._ahead[0][0] + len(self._ahead[0][1]) <= self._given + len(self._text):
            start, mark = self._ahead.popleft()
            self._take(start - self._given, pieces)
            self._take(len(mark), None)
            pieces.append(mark)
        whole = len(self._text) if not self._ahead else min(len(self._text), self._ahead[0][0] - self._given)
        self._take(whole, pieces)
        return pieces

    def finish(self) -> list[Piece]:
        """What was held back: the beginning of a marker that a stop string cut."""
        pieces: list[Piece] = []
        self._take(len(self._text), pieces)
        return pieces

    def _take(self, length: int, into: list[Piece] | None) -> None:
        if length and into is not None:
            into.append(self._text[:length])
        self._text = self._text[length:]
        self._given += length
