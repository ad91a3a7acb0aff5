"""Thoughts apart from the answer, as a stream splitter.

Where it begins is read from the rendered prompt, never from what the request asked for: templates differ in
what they open, close or ignore.
"""

from __future__ import annotations

from hadron.tokenizer.markup import Mark, Piece


class ReasoningSplitter:
    """Pieces to thoughts and the rest. is_open: whether the prompt leaves a thought open.

    calls: whether a tool call ends a thought that was not closed; else its marker is a part of the thought.
    """

    def __init__(self, *, is_open: bool, calls: bool = False) -> None:
        self.is_open = is_open
        self._calls = calls

    def push(self, piece: Piece) -> tuple[str, Piece]:
        """(thought, rest); one of them is empty, both where the piece is a marker of thoughts."""
        if isinstance(piece, Mark):
            if piece in (Mark.THINK, Mark.THINK_END):
                self.is_open = piece is Mark.THINK
                return "", ""
            if self.is_open and self._calls and piece is Mark.CALL:
                self.is_open = False
        return (str(piece), "") if self.is_open else ("", piece)
