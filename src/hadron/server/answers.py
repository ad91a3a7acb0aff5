"""What has come of a request, for all interfaces: parts of its answers, log-probabilities, counts of tokens.

An interface gets the same `Piece`s whether it streams or gathers, so that the two cannot differ.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hadron.engine.request import Logprob
from hadron.server.chat import Prepared
from hadron.server.model import Model
from hadron.server.worker import Generation
from hadron.tokenizer.answer import Part, Reasoning
from hadron.tokenizer.markup import Mark
from hadron.tokenizer.tokenizer import Tokenizer
from hadron.tokenizer.tool_calls import CallArguments, CallBegin, Content

Row = tuple[int, dict[int, Logprob]]


@dataclass(frozen=True, slots=True)
class Piece:
    """More of the index-th answer. rows: log-probabilities of its tokens. finish_reason: with the last one."""

    index: int
    parts: list[Part]
    rows: list[Row]
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class Counts:
    """Tokens of a request, all its continuations together."""

    prompt: int
    cached: int = 0
    completion: int = 0
    reasoning: int = 0

    def usage(self, *, details: bool = True) -> dict[str, Any]:
        """In OpenAI's words."""
        counts: dict[str, Any] = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
        if details:
            counts["completion_tokens_details"] = {"reasoning_tokens": self.reasoning}
        return counts


class Answers:
    """A chat's answers as they come: iterate over the pieces. counts: right at every moment."""

    def __init__(self, model: Model, prepared: Prepared, generation: Generation) -> None:
        self._generation = generation
        self._apart = prepared.params.logprobs is not None
        self._splitters = prepared.splitters(model)
        self._call_end = None if model.markup is None else model.markup.ids.get(Mark.CALL_END)
        self.counts = Counts(len(prepared.ids))

    @property
    def prompt_logprobs(self) -> list[dict[str, Any] | None] | None:
        """Those of the prompt, as `prompt_logprobs` gives them; None before the first piece, or not asked for."""
        rows = self._generation.prompt_logprobs
        return None if rows is None else prompt_logprobs(rows)

    async def __aiter__(self) -> AsyncIterator[list[Piece]]:
        """Pieces in order, each time all that there are: one for each answer, or for each token where it has
        log-probabilities, so that these are with the same parts however tokens come."""
        async for outputs in self._generation:
            self.counts.cached = self._generation.cached_tokens
            found: dict[tuple[int, int], Piece] = {}
            for number, output in enumerate(outputs):
                splitter = self._splitters[output.index]
                self.counts.completion += output.token_id is not None
                parts = splitter.push(output.token_id, output.text)
                rows = (
                    [] if output.logprobs is None or output.token_id is None else [(output.token_id, output.logprobs)]
                )
                reason = output.finish_reason
                if reason is not None:
                    # a stop string or id cuts what is open, but for the end of a call
                    whole = reason == "stop" and output.stop_reason in (None, self._call_end)
                    parts += splitter.finish(complete=whole)
                    if reason == "stop" and splitter.has_calls:
                        reason = "tool_calls"
                key = (output.index, number if self._apart else 0)
                before = found.get(key, Piece(output.index, [], []))
                found[key] = Piece(output.index, before.parts + parts, before.rows + rows, reason, output.stop_reason)
            self.counts.reasoning = sum(splitter.reasoning_tokens for splitter in self._splitters)
            yield list(found.values())


@dataclass(slots=True)
class Whole:
    """An answer that has come to its end."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def take(self, piece: Piece) -> None:
        """Add a piece."""
        for part in piece.parts:
            match part:
                case Reasoning(text):
                    self.reasoning += text
                case Content(text):
                    self.content += text
                case CallBegin(_, name):
                    self.calls.append((name, ""))
                case CallArguments(index, text):
                    self.calls[index] = (self.calls[index][0], self.calls[index][1] + text)
        self.rows += piece.rows
        if piece.finish_reason is not None:
            self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason


async def gather(answers: Answers, count: int) -> list[Whole]:
    """All answers, whole."""
    wholes = [Whole() for _ in range(count)]
    async for pieces in answers:
        for piece in pieces:
            wholes[piece.index].take(piece)
    return wholes


def prompt_logprobs(rows: Sequence[dict[int, Logprob] | None]) -> list[dict[str, Any] | None]:
    """Log-probabilities of a prompt as both interfaces have them: for each token, by ids; none for the first."""
    return [
        None if row is None else {
            str(i): {"logprob": e.logprob, "rank": e.rank, "decoded_token": e.decoded_token} for i, e in row.items()
        }
        for row in rows
    ]  # fmt: skip


def chat_logprobs(rows: Sequence[Row], tokenizer: Tokenizer, most: int) -> dict[str, Any]:
    """Log-probabilities as chat completions have them: of every token of the answer, thoughts and markup included."""
    content = []
    for token, row in rows:
        likeliest = sorted(row.items(), key=lambda item: item[1].rank)[:most]
        content.append(
            {
                **_entry(token, row[token], tokenizer),
                "top_logprobs": [_entry(other, entry, tokenizer) for other, entry in likeliest],
            }
        )
    return {"content": content, "refusal": None}


def _entry(token: int, entry: Logprob, tokenizer: Tokenizer) -> dict[str, Any]:
    text = tokenizer.token_text(token)
    spelt = tokenizer.token_bytes(token) if tokenizer.is_byte_level else text.encode()
    return {"token": text, "logprob": entry.logprob, "bytes": list(spelt)}
