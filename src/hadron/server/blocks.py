"""An answer as a row of blocks, for interfaces that open and close them: thoughts, texts, calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

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
    """The index-th block. text: of a call, the JSON of its arguments."""

    kind: Kind
    index: int
    name: str = ""
    text: str = ""
    closed: bool = False
    call_id: str = field(default_factory=call_id)


@dataclass(frozen=True, slots=True)
class Change:
    """A block was opened (added is None and it is open), got text, or was closed."""

    block: Block
    added: str | None = None


class Blocks:
    """The blocks of one answer so far."""

    def __init__(self) -> None:
        self.all: list[Block] = []

    def push(self, parts: Sequence[Part]) -> Iterator[Change]:
        """What the parts change."""
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

    def finish(self) -> Iterator[Change]:
        """Close the last block."""
        if self.all and not self.all[-1].closed:
            self.all[-1].closed = True
            yield Change(self.all[-1])

    def _add(self, kind: Kind, text: str) -> Iterator[Change]:
        if not self.all or self.all[-1].closed or self.all[-1].kind is not kind:
            yield from self._open(kind)
        self.all[-1].text += text
        yield Change(self.all[-1], text)

    def _open(self, kind: Kind, name: str = "") -> Iterator[Change]:
        yield from self.finish()
        self.all.append(Block(kind, len(self.all), name))
        yield Change(self.all[-1])
