"""An answer as a row of blocks, for interfaces that open and close them: thoughts, texts, calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from hadron.server.answers import Row
from hadron.server.chat_completions import call_id
from hadron.tokenizer.answer import Part, Reasoning
from hadron.tokenizer.tool_calls import CallArguments, CallBegin, Content


class Kind(StrEnum):
    """What a block holds."""

    THOUGHT = "thought"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True, eq=False)
class Block:
    """The index-th block. text: of a call, the JSON of its arguments. cut: it ended before its end. rows: of a text,
    log-probabilities of the tokens until it closed that no earlier text has: its own, thoughts and markup."""

    kind: Kind
    index: int
    name: str = ""
    text: str = ""
    closed: bool = False
    cut: bool = False
    rows: list[Row] = field(default_factory=list)
    call_id: str = field(default_factory=call_id)


@dataclass(frozen=True, slots=True)
class Change:
    """A block was opened (added is None and it is open), got text, or was closed. rows: what it got with the text."""

    block: Block
    added: str | None = None
    rows: Sequence[Row] = ()


class Blocks:
    """The blocks of one answer so far."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._rows: list[Row] = []  # that no text has yet

    def push(self, parts: Sequence[Part], rows: Sequence[Row] = ()) -> Iterator[Change]:
        """What the parts change. rows: log-probabilities that came with them."""
        self._rows += rows
        for part in parts:
            match part:
                case Reasoning(text):
                    yield from self._add(Kind.THOUGHT, text)
                case Content(text):
                    yield from self._add(Kind.TEXT, text)
                case CallBegin(_, name):
                    yield from self._open(Kind.CALL, name)
                case CallArguments(_, text):
                    yield from self._add(Kind.CALL, text)

    def finish(self, reason: str | None = None) -> Iterator[Change]:
        """Close the last block. reason: why the answer ends, where it does."""
        if self.all and not self.all[-1].closed:
            block = self.all[-1]
            self._take(block)
            block.closed = True
            block.cut = reason == "length" or (reason == "stop" and block.kind is Kind.CALL)
            yield Change(block)

    def _take(self, block: Block) -> Sequence[Row]:
        if block.kind is not Kind.TEXT:
            return ()
        rows, self._rows = self._rows, []
        block.rows += rows
        return rows

    def _add(self, kind: Kind, text: str) -> Iterator[Change]:
        if not self.all or self.all[-1].closed or self.all[-1].kind is not kind:
            yield from self._open(kind)
        self.all[-1].text += text
        yield Change(self.all[-1], text, self._take(self.all[-1]))

    def _open(self, kind: Kind, name: str = "") -> Iterator[Change]:
        yield from self.finish()
        self.all.append(Block(kind, len(self.all), name))
        yield Change(self.all[-1])
