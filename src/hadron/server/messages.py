"""`/v1/messages`: answers in Anthropic's shape, at once or as events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from hadron.server.answers import Answers
from hadron.server.blocks import Block, Blocks, Change, Kind
from hadron.server.chat import Prepared
from hadron.server.errors import ApiError
from hadron.server.streaming import event


@dataclass(frozen=True, slots=True)
class MessageAnswer:
    """One request being answered."""

    prepared: Prepared
    answers: Answers
    answer_id: str

    def _message(self, content: list[Any], reason: str | None, stop: Any) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self.prepared.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        counts = self.answers.counts
        return {
            "input_tokens": counts.prompt - counts.cached,
            "cache_read_input_tokens": counts.cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": counts.completion,
            "output_tokens_details": {"thinking_tokens": counts.reasoning},
        }

    async def whole(self) -> dict[str, Any]:
        """The answer at once."""
        blocks = Blocks()
        reason: str | None = None
        stop: Any = None
        async for pieces in self.answers:
            for piece in pieces:
                for _ in blocks.push(piece.parts):
                    pass
                reason, stop = piece.finish_reason, piece.stop_reason
        return self._message([_block(block, whole=True) for block in blocks.all], *_reasons(reason, stop))

    async def events(self) -> AsyncIterator[bytes]:
        """The answer piece by piece."""
        blocks = Blocks()
        yield _event("message_start", message=self._message([], None, None))
        try:
            async for pieces in self.answers:
                for piece in pieces:
                    for change in blocks.push(piece.parts):
                        yield _changed(change)
                    if piece.finish_reason is None:
                        continue
                    for change in blocks.finish():
                        yield _changed(change)
                    reason, stop = _reasons(piece.finish_reason, piece.stop_reason)
                    delta = {"stop_reason": reason, "stop_sequence": stop}
                    yield _event("message_delta", delta=delta, usage=self._usage())
            yield _event("message_stop")
        except ApiError as error:
            yield event(error.body("/v1/messages"), "error")


def _event(kind: str, **values: Any) -> bytes:
    return event({"type": kind, **values}, kind)


def _reasons(finish: str | None, stop: Any) -> tuple[str, str | None]:
    if isinstance(stop, str):
        return "stop_sequence", stop
    return {"length": "max_tokens", "tool_calls": "tool_use"}.get(finish or "", "end_turn"), None


def _block(block: Block, *, whole: bool) -> dict[str, Any]:
    """A block, or its empty beginning. Of arguments that were cut off, those that are whole are given."""
    text = block.text if whole else ""
    if block.kind is Kind.THOUGHT:
        return {"type": "thinking", "thinking": text, "signature": ""}
    if block.kind is Kind.TEXT:
        return {"type": "text", "text": text, "citations": None}
    values = from_json(text or "{}", allow_partial=True)
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": values}


def _changed(change: Change) -> bytes:
    block = change.block
    if change.added is not None:
        name, kind = {
            Kind.THOUGHT: ("thinking", "thinking_delta"),
            Kind.TEXT: ("text", "text_delta"),
            Kind.CALL: ("partial_json", "input_json_delta"),
        }[block.kind]
        return _event("content_block_delta", index=block.index, delta={"type": kind, name: change.added})
    if block.closed:
        return _event("content_block_stop", index=block.index)
    return _event("content_block_start", index=block.index, content_block=_block(block, whole=False))
