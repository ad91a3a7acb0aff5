"""One request to an OpenAI-compatible server, streamed, and when its pieces came.

A failure is a value: its kind is counted, and the run goes on. What a server said before it failed is not measured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from hadron.bench.serve.events import EventParser
from hadron.bench.serve.load import CHAT, Prompt

#: Where a piece of a chat can have what the model wrote.
_DELTAS = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")
_SHOWN = 200


@dataclass(slots=True)
class Outcome:
    """One request, in seconds since the run began. due: when it was to be sent. pieces: when something that the model
    wrote came. prompt_tokens, completion_tokens: as the server counted, else None. failure: its kind, and detail."""

    due: float
    sent: float
    ended: float = 0.0
    pieces: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    failure: str | None = None
    detail: str = ""


class FailedError(Exception):
    """A request that was not answered as it should have been."""

    def __init__(self, kind: str, detail: str) -> None:
        self.kind = kind
        self.detail = " ".join(detail.split())[:_SHOWN]
        super().__init__(f"{kind}: {self.detail}")


@dataclass(frozen=True, slots=True)
class Client:
    """Sends prompts. clock: seconds since the run began. extra: fields of every body. timeout: seconds of a request."""

    http: httpx.AsyncClient
    base_url: str
    endpoint: str
    model: str
    extra: dict[str, Any]
    timeout: float
    clock: Callable[[], float]

    async def ask(self, prompt: Prompt, due: float | None = None) -> Outcome:
        """Send one, and read its answer to the end."""
        sent = self.clock()
        outcome = Outcome(sent if due is None else due, sent)
        try:
            async with asyncio.timeout(self.timeout):
                await self._stream(prompt, outcome)
        except FailedError as error:
            outcome.failure, outcome.detail = error.kind, error.detail
        except TimeoutError:
            outcome.failure, outcome.detail = "timeout", f"no end within {self.timeout:g} s (--timeout)"
        except (httpx.ConnectError, httpx.UnsupportedProtocol, httpx.ProxyError) as error:
            outcome.failure, outcome.detail = "no connection", str(error) or type(error).__name__
        except httpx.HTTPError as error:
            outcome.failure, outcome.detail = "disconnected", str(error) or type(error).__name__
        outcome.ended = outcome.ended or self.clock()
        return outcome

    async def _stream(self, prompt: Prompt, outcome: Outcome) -> None:
        path = "chat/completions" if self.endpoint == CHAT else "completions"
        body = {
            "model": self.model, "stream": True, "stream_options": {"include_usage": True},
            **prompt.fields(self.endpoint), **self.extra,
        }  # fmt: skip
        async with self.http.stream("POST", f"{self.base_url}/{path}", json=body) as answer:
            if answer.status_code != 200:
                raise FailedError(f"HTTP {answer.status_code}", said(await answer.aread()))
            kind = answer.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                raise FailedError("no stream", f"content-type {kind!r} instead of text/event-stream")
            parser = EventParser()
            async for piece in answer.aiter_bytes():
                now = self.clock()
                try:
                    events = list(parser.feed(piece))
                except UnicodeDecodeError as error:
                    raise FailedError("broken stream", f"no UTF-8: {error}") from error
                for data in events:
                    self._take(outcome, data, now)
        if not outcome.ended:
            raise FailedError("cut off", "the stream ended without [DONE]")
        if not outcome.pieces:
            if not outcome.completion_tokens:
                raise FailedError("no tokens", "the answer was empty")
            outcome.pieces.append(outcome.ended)  # tokens without text, such as a lone end token

    def _take(self, outcome: Outcome, data: str, now: float) -> None:
        if data == "[DONE]":
            outcome.ended = now
            return
        try:
            value = msgspec.json.decode(data.encode())
        except msgspec.DecodeError as error:
            raise FailedError("broken stream", f"no JSON: {error}: {data}") from error
        if not isinstance(value, dict):
            raise FailedError("broken stream", f"no object: {data}")
        if value.get("error"):
            raise FailedError("error in the stream", said(data.encode()))
        if isinstance(usage := value.get("usage"), dict):
            outcome.prompt_tokens = _count(usage.get("prompt_tokens"))
            outcome.completion_tokens = _count(usage.get("completion_tokens"))
        choices = value.get("choices") or []
        if not isinstance(choices, list):
            raise FailedError("broken stream", f"choices that are no list: {data}")
        if any(map(_written, choices)):
            outcome.pieces.append(now)


def _written(choice: Any) -> bool:
    """Whether a choice of a piece has something that the model wrote. A completion without text is a token too, such
    as a part of a character, but for one that only says why it ends."""
    if not isinstance(choice, dict):
        raise FailedError("broken stream", f"a choice that is no object: {choice!r}")
    if "text" in choice:
        return bool(choice["text"]) or choice.get("finish_reason") is None
    delta = choice.get("delta")
    return isinstance(delta, dict) and any(delta.get(name) for name in _DELTAS)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def said(body: bytes) -> str:
    """The message of an error's body, or its beginning."""
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body[:_SHOWN].decode(errors="replace")
    error = value.get("error") if isinstance(value, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or body[:_SHOWN].decode(errors="replace"))
