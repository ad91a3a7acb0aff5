"""`/v1/chat/completions`: answers in OpenAI's shape, at once or as events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from hadron.server.answers import Answers, Piece, Whole, chat_logprobs, gather
from hadron.server.chat import Prepared
from hadron.server.errors import ApiError
from hadron.server.model import Model
from hadron.server.protocol import ChatRequest
from hadron.server.streaming import DONE, event
from hadron.tokenizer.answer import Reasoning
from hadron.tokenizer.tool_calls import CallArguments, CallBegin, Content


def call_id() -> str:
    """A fresh id of a tool call."""
    return f"call_{uuid4().hex[:24]}"


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """One request being answered."""

    model: Model
    request: ChatRequest
    prepared: Prepared
    answers: Answers
    answer_id: str

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.answer_id, "object": kind, "created": int(time.time()), "model": self.prepared.model}

    def _logprobs(self, rows: list[Any]) -> dict[str, Any] | None:
        if self.prepared.params.logprobs is None:
            return None
        return chat_logprobs(rows, self.model.text_tokenizer(), self.prepared.params.logprobs)

    async def whole(self) -> dict[str, Any]:
        """The answer at once."""
        wholes = await gather(self.answers, self.prepared.params.n)
        choices = [
            {
                "index": index,
                "message": _message(whole),
                "logprobs": self._logprobs(whole.rows),
                "finish_reason": whole.finish_reason,
                "stop_reason": whole.stop_reason,
            }
            for index, whole in enumerate(wholes)
        ]
        body = {**self._head("chat.completion"), "choices": choices, "usage": self.answers.counts.usage()}
        if self.request.prompt_logprobs is not None:
            body["prompt_logprobs"] = self.answers.prompt_logprobs
        return body

    async def events(self) -> AsyncIterator[bytes]:
        """The answer piece by piece."""
        head = self._head("chat.completion.chunk")
        options = self.request.stream_options
        usage = options is not None and bool(options.include_usage)
        always = options is not None and bool(options.continuous_usage_stats)
        untold = self.request.prompt_logprobs is not None

        def chunk(index: int, delta: dict[str, Any], **more: Any) -> bytes:
            nonlocal untold
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
            counts = {"usage": self.answers.counts.usage() if always else None} if usage else {}
            prompt = {"prompt_logprobs": self.answers.prompt_logprobs} if untold else {}
            if prompt.get("prompt_logprobs") is None:  # they come with the first token
                return event({**head, "choices": [choice], **counts})
            untold = False
            return event({**head, "choices": [choice], **counts, **prompt})

        for index in range(self.prepared.params.n):
            yield chunk(index, {"role": "assistant", "content": ""})
        try:
            async for pieces in self.answers:
                for piece in pieces:
                    deltas: list[dict[str, Any]] = _deltas(piece)
                    if piece.rows and not deltas and piece.finish_reason is None:
                        deltas = [{}]  # tokens without text yet have log-probabilities too
                    for number, delta in enumerate(deltas):
                        rows = piece.rows if number == 0 else []
                        yield chunk(piece.index, delta, logprobs=self._logprobs(rows) if rows else None)
                    if piece.finish_reason is not None:
                        rows = [] if deltas else piece.rows
                        yield chunk(
                            piece.index, {}, logprobs=self._logprobs(rows) if rows else None,
                            finish_reason=piece.finish_reason, stop_reason=piece.stop_reason,
                        )  # fmt: skip
        except ApiError as error:
            yield event(error.body())
        else:
            if usage:
                yield event({**head, "choices": [], "usage": self.answers.counts.usage()})
        yield DONE


def _message(whole: Whole) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": whole.content, "refusal": None}
    if whole.reasoning:
        message["reasoning_content"] = whole.reasoning
    if whole.calls:
        message["content"] = whole.content or None
        message["tool_calls"] = [
            {"id": call_id(), "type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in whole.calls
        ]
    return message


def _deltas(piece: Piece) -> list[dict[str, Any]]:
    deltas: list[dict[str, Any]] = []
    for part in piece.parts:
        match part:
            case Reasoning(text):
                deltas.append({"reasoning_content": text})
            case Content(text):
                deltas.append({"content": text})
            case CallBegin(index, name):
                function = {"name": name, "arguments": ""}
                deltas.append(
                    {"tool_calls": [{"index": index, "id": call_id(), "type": "function", "function": function}]}
                )
            case CallArguments(index, text):
                deltas.append({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
    return deltas
