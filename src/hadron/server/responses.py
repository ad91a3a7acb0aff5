"""`/v1/responses`: answers as OpenAI's newer interface has them, at once or as events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from hadron.server.answers import Answers, Piece, Row, chat_logprobs
from hadron.server.blocks import Block, Blocks, Change, Kind
from hadron.server.chat import Prepared
from hadron.server.errors import ApiError
from hadron.server.model import Model
from hadron.server.responses_protocol import ResponsesRequest
from hadron.server.streaming import event

#: kind of a block -> (prefix of its item's id, its part's type, its event's name)
_NAMES = {
    Kind.THOUGHT: ("rs", "reasoning_text", "response.reasoning_text"),
    Kind.TEXT: ("msg", "output_text", "response.output_text"),
    Kind.CALL: ("fc", "", "response.function_call_arguments"),
}


@dataclass(slots=True)
class ResponseAnswer:
    """One request being answered."""

    model: Model
    request: ResponsesRequest
    prepared: Prepared
    answers: Answers
    answer_id: str
    _created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self) -> dict[str, Any]:
        """The answer at once."""
        blocks = Blocks()
        reason: str | None = None
        async for pieces in self.answers:
            for piece in pieces:
                for _ in _changes(blocks, piece):
                    pass
                reason = piece.finish_reason
        return self._response(blocks, reason)

    async def events(self) -> AsyncIterator[bytes]:
        """The answer piece by piece."""
        numbers = count()
        blocks = Blocks()

        def numbered(kind: str, **values: Any) -> bytes:
            return event({"type": kind, "sequence_number": next(numbers), **values}, kind)

        for kind in ("response.created", "response.in_progress"):
            yield numbered(kind, response=self._response(blocks, None, status="in_progress"))
        try:
            async for pieces in self.answers:
                for piece in pieces:
                    for change in _changes(blocks, piece):
                        for kind, values in self._changed(change):
                            yield numbered(kind, **values)
                    if piece.finish_reason is not None:
                        response = self._response(blocks, piece.finish_reason)
                        yield numbered(f"response.{response['status']}", response=response)
        except ApiError as error:
            failed = self._response(blocks, None, status="failed")
            failed["error"] = {"code": "server_error", "message": error.message}
            yield numbered("response.failed", response=failed)

    def _changed(self, change: Change) -> Iterator[tuple[str, dict[str, Any]]]:
        block = change.block
        _, part, name = _NAMES[block.kind]
        place: dict[str, Any] = {"item_id": self._item_id(block), "output_index": block.index}
        inner = place if block.kind is Kind.CALL else {**place, "content_index": 0}
        rows = change.rows if change.added is not None else block.rows
        more: dict[str, Any] = {"logprobs": self._logprobs(rows)} if block.kind is Kind.TEXT else {}
        if change.added is not None:
            yield f"{name}.delta", {**inner, "delta": change.added, **more}
        elif block.closed:
            if block.kind is Kind.CALL:
                yield f"{name}.done", {**inner, "name": block.name, "arguments": block.text}
            else:
                yield f"{name}.done", {**inner, "text": block.text, **more}
                yield "response.content_part.done", {**inner, "part": _part(part, block.text, **more)}
            yield "response.output_item.done", {"output_index": block.index, "item": self._item(block)}
        else:
            yield "response.output_item.added", {"output_index": block.index, "item": self._item(block, begun=True)}
            if part:
                yield "response.content_part.added", {**inner, "part": _part(part, "", **more)}

    def _logprobs(self, rows: Sequence[Row]) -> list[Any]:
        most = self.prepared.params.logprobs
        return [] if most is None else list(chat_logprobs(rows, self.model.text_tokenizer(), most)["content"])

    def _item_id(self, block: Block) -> str:
        return f"{_NAMES[block.kind][0]}_{self.answer_id.removeprefix('resp_')}_{block.index}"

    def _item(self, block: Block, *, begun: bool = False) -> dict[str, Any]:
        ended = "completed" if block.closed and not block.cut else "incomplete"
        item: dict[str, Any] = {"id": self._item_id(block), "status": "in_progress" if begun else ended}
        part = _NAMES[block.kind][1]
        if block.kind is Kind.CALL:
            call = {"call_id": block.call_id, "name": block.name, "arguments": "" if begun else block.text}
            return {**item, "type": "function_call", **call}
        content = [] if begun else [_part(part, block.text, self._logprobs(block.rows))]
        if block.kind is Kind.THOUGHT:
            return {**item, "type": "reasoning", "summary": [], "content": content}
        return {**item, "type": "message", "role": "assistant", "content": content}

    def _response(self, blocks: Blocks, reason: str | None, *, status: str | None = None) -> dict[str, Any]:
        request, params = self.request, self.prepared.params
        cut = reason == "length"
        counts = self.answers.counts
        given = request.model_dump(exclude_none=True, by_alias=True)
        return {
            "id": self.answer_id,
            "object": "response",
            "created_at": self._created,
            "status": status or ("incomplete" if cut else "completed"),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": self.prepared.model,
            "output": [self._item(block) for block in blocks.all],
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": given.get("reasoning", {"effort": None, "summary": None}),
            "store": False,
            "temperature": params.temperature,
            "text": given.get("text", {"format": {"type": "text"}}),
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools", []),
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None if status == "in_progress" else {
                "input_tokens": counts.prompt,
                "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
                "output_tokens": counts.completion,
                "output_tokens_details": {"reasoning_tokens": counts.reasoning},
                "total_tokens": counts.prompt + counts.completion,
            },
        }  # fmt: skip


def _changes(blocks: Blocks, piece: Piece) -> Iterator[Change]:
    yield from blocks.push(piece.parts, piece.rows)
    if piece.finish_reason is not None:
        yield from blocks.finish(piece.finish_reason)


def _part(kind: str, text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    if kind == "output_text":
        return {"type": kind, "text": text, "annotations": [], "logprobs": logprobs}
    return {"type": kind, "text": text}
