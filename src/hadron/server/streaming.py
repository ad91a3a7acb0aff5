"""Answers as server-sent events, and clients that leave.

A client that goes away is noticed at once, not when the next piece is written: its request ends within a step.
While nothing comes, a comment is sent now and then, because a long prompt takes minutes and proxies lose patience.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

#: Seconds of silence after which a comment is sent.
PATIENCE = 10.0

_encode = msgspec.json.Encoder().encode


class ClientLeftError(Exception):
    """Nobody reads the answer any more."""


def json_bytes(value: Any) -> bytes:
    """A value as JSON."""
    return _encode(value)


def event(value: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + (value if isinstance(value, bytes) else _encode(value)) + b"\n\n"


DONE = event(b"[DONE]")


def answer(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(_encode(value), status, dict(headers or {}), "application/json")


class EventStream(Response):
    """Events from an iterator that is closed when the client leaves. on_end: called once, at the end in any case."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the events, or the client, end."""
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended = sending.done()
            self._on_end()
            for task in (sending, leaving):
                task.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await sending
        if not ended:
            raise ClientLeftError

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        events = aiter(self._events)
        following: asyncio.Future[bytes] | None = None
        try:
            while True:
                following = following or asyncio.ensure_future(anext(events))
                done, _ = await asyncio.wait({following}, timeout=PATIENCE)
                body = b": still here\n\n"
                if done:
                    try:
                        body = following.result()
                    except StopAsyncIteration:
                        break
                    following = None
                await send({"type": "http.response.body", "body": body, "more_body": True})
        finally:
            if following is not None:
                following.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """What `work` gives; it is cancelled, and `ClientLeftError` raised, when the client leaves first."""
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request.receive))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise ClientLeftError
    finally:
        doing.cancel()
        leaving.cancel()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
