"""An answer in its parts: thoughts, text, tool calls. One splitter for answers that stream and that do not.

White space next to a marker belongs to the markup and is dropped; all other text is passed on verbatim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hadron.tokenizer.markup import Mark, MarkedText, Markup, Piece
from hadron.tokenizer.reasoning import ReasoningSplitter
from hadron.tokenizer.tokenizer import Tokenizer
from hadron.tokenizer.tool_calls import CallArguments, CallBegin, CallPart, Content, Parameters, ToolCallSplitter


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Some text of the thoughts."""

    text: str


Part = Reasoning | CallPart


class _Edges:
    """One channel of text, without the white space next to markers."""

    def __init__(self, *, after_mark: bool) -> None:
        self._drop = after_mark
        self._held = ""

    def push(self, text: str) -> str:
        """What is certain not to be followed by a marker."""
        if self._drop:
            text = text.lstrip()
        if not text:
            return ""
        self._drop = False
        text = self._held + text
        certain = text.rstrip()
        self._held = text[len(certain) :]
        return certain

    def mark(self) -> None:
        """A marker is next to the text."""
        self._held, self._drop = "", True

    def finish(self) -> str:
        """White space that no marker followed."""
        held, self._held = self._held, ""
        return held


class PieceSplitter:
    """Pieces to parts. is_open: whether the prompt leaves a thought open; after_mark: whether it ends with a marker.

    tools: what may be called; None leaves the markup of calls in the text.
    """

    def __init__(self, *, is_open: bool, after_mark: bool, tools: Mapping[str, Parameters] | None) -> None:
        self._reasoning = ReasoningSplitter(is_open=is_open, calls=tools is not None)
        self._calls = None if tools is None else ToolCallSplitter(tools)
        self._thoughts = _Edges(after_mark=is_open and after_mark)
        self._text = _Edges(after_mark=is_open or after_mark)
        self._thought = ""
        self._unfinished = is_open

    @property
    def has_calls(self) -> bool:
        """Whether calls have come, and none is open."""
        return self._calls is not None and self._calls.count > 0 and not self._calls.inside

    def push(self, pieces: Sequence[Piece]) -> list[Part]:
        """What the pieces add."""
        return _joined([part for piece in pieces for part in self._push(piece)])

    def finish(self, *, complete: bool) -> list[Part]:
        """The text ends here. complete: by the model's wish; else it was cut.

        A model that ends without closing its thought has said its answer there: the thought is repeated as text.
        """
        parts: list[Part] = []
        if self._reasoning.is_open:
            parts += self._think(self._thoughts.finish())
            if complete and self._unfinished and self._thought:
                parts.append(Content(self._thought))
        elif self._calls is not None and self._calls.inside:
            parts += self._calls.finish(complete=complete)
        else:
            held = self._text.finish()
            parts += [Content(held)] if held else []
        return _joined(parts)

    def _push(self, piece: Piece) -> list[Part]:
        if self._calls is not None and self._calls.inside:
            return self._call(piece)
        was_open = self._reasoning.is_open
        thought, rest = self._reasoning.push(piece)
        if was_open is not self._reasoning.is_open:
            self._thoughts.mark()
            self._text.mark()
            self._unfinished = self._reasoning.is_open
        if thought:
            return self._think(self._thoughts.push(thought))
        if not rest:
            return []
        if self._calls is not None and isinstance(rest, Mark):
            return self._call(rest)
        return self._say(str(rest))

    def _call(self, piece: Piece) -> list[Part]:
        assert self._calls is not None
        parts: list[Part] = []
        for part in self._calls.push(piece):
            if isinstance(part, CallBegin):
                self._text.mark()
            parts += self._say(part.text) if isinstance(part, Content) else [part]
        return parts

    def _say(self, text: str) -> list[Part]:
        text = self._text.push(text)
        return [Content(text)] if text else []

    def _think(self, text: str) -> list[Part]:
        self._thought += text
        return [Reasoning(text)] if text else []


def _joined(parts: list[Part]) -> list[Part]:
    """Neighbours of one kind become one."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + part.text)
        elif isinstance(part, CallArguments) and isinstance(last, CallArguments) and part.index == last.index:
            joined[-1] = CallArguments(part.index, last.text + part.text)
        else:
            joined.append(part)
    return joined


class AnswerSplitter:
    """Tokens of one answer to its parts. prompt: the ids before it, which say where it begins."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        markup: Markup,
        prompt: Sequence[int],
        *,
        tools: Mapping[str, Parameters] | None = None,
        skip_special_tokens: bool = True,
    ) -> None:
        is_open = markup.open_thought(prompt)
        self._text = MarkedText(tokenizer, markup, skip_special_tokens=skip_special_tokens)
        self._pieces = PieceSplitter(is_open=is_open, after_mark=markup.ends_with_mark(prompt), tools=tools)
        self._thinking = is_open
        self._marks = markup.marks
        self._ends = {Mark.THINK_END} if tools is None else {Mark.THINK_END, Mark.CALL}
        self.reasoning_tokens = 0

    @property
    def has_calls(self) -> bool:
        """See `PieceSplitter.has_calls`."""
        return self._pieces.has_calls

    def push(self, token: int | None, text: str) -> list[Part]:
        """token: the next one, if any. text: what became certain with it."""
        mark = None if token is None else self._marks.get(token)
        self._thinking = self._thinking and mark not in self._ends
        self.reasoning_tokens += self._thinking and token is not None
        self._thinking = self._thinking or mark is Mark.THINK
        return self._pieces.push(self._text.push(token, text))

    def finish(self, *, complete: bool) -> list[Part]:
        """See `PieceSplitter.finish`."""
        return _joined([*self._pieces.push(self._text.finish()), *self._pieces.finish(complete=complete)])
