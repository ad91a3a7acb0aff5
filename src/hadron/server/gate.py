"""What every request passes before and after it is answered: key, size and pace of its body, id, a line in the log."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hadron.server.config import ServerConfig
from hadron.server.errors import ApiError
from hadron.server.streaming import ClientLeftError, answer

log = logging.getLogger("hadron.server.requests")

#: Paths that need no key, so that machines can ask how the server is.
OPEN = frozenset({"/health", "/ready", "/metrics", "/version"})
#: How a client that left is logged.
LEFT = 499
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


@dataclass(slots=True)
class Record:
    """What the log says of a request. Empty fields are left out."""

    request_id: str
    method: str
    path: str
    status: int = 0
    seconds: float = 0.0
    first_token: float | None = None
    model: str | None = None
    stream: bool | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    finish: str | None = None
    error: str | None = None
    ignored: str | None = None
    prompt: str | None = None

    def line(self, style: str) -> str:
        """For people, or as JSON."""
        values = {key: value for key, value in asdict(self).items() if value is not None}
        values = {key: round(value, 4) if isinstance(value, float) else value for key, value in values.items()}
        if style == "json":
            return msgspec.json.encode({"time": round(time.time(), 3), **values}).decode()
        head = f"{self.method} {self.path} {self.status} {self.seconds:.3f}s {self.request_id}"
        shown = ("method", "path", "status", "seconds", "request_id")
        rest = [f"{key}={_value(value)}" for key, value in values.items() if key not in shown]
        return " ".join((head, *rest))


def _value(value: Any) -> str:
    """Quoted where it is text, so that a line stays one."""
    return str(value) if isinstance(value, int | float) else msgspec.json.encode(value).decode()


@dataclass(slots=True)
class Gate:
    """ASGI middleware. on_answer: called with path template and status of each answer."""

    app: ASGIApp
    config: ServerConfig
    on_answer: Callable[[str, int], None]
    _keys: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self._keys = [key.encode() for key in self.config.api_key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        record = Record(request_id, scope["method"], scope["path"][:200])
        scope.setdefault("state", {})["record"] = record
        began = time.monotonic()

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                for name in ("x-request-id", "request-id"):  # Anthropic's clients read the second
                    MutableHeaders(scope=message)[name] = request_id
            await send(message)

        try:
            try:
                self._check(scope, headers)
            except ApiError as error:
                record.error = error.message
                refusal = answer(error.body(scope["path"], request_id), status=error.status, headers=error.headers)
                await refusal(scope, receive, watched)
                return
            await self.app(scope, self._bounded(receive), watched)
        except (ClientLeftError, asyncio.CancelledError):  # cancelled: the server stops, and nobody may wait longer
            record.status = LEFT
        except BaseException:
            record.status = record.status if record.status >= 400 else 500
            raise
        finally:
            record.seconds = time.monotonic() - began
            route = scope.get("route")
            self.on_answer(getattr(route, "path", "other"), record.status)
            if scope["path"] not in OPEN or record.status >= 400:
                log.info("%s", record.line(self.config.log_format))

    def _check(self, scope: Scope, headers: Headers) -> None:
        if self._keys and scope["path"] not in OPEN and scope["method"] != "OPTIONS":
            kind, _, key = headers.get("authorization", "").partition(" ")
            given = [key.strip()] if kind.lower() == "bearer" else []
            given += [headers["x-api-key"]] if "x-api-key" in headers else []
            presented = [key.encode("latin-1") for key in given]  # the bytes that came
            # all are compared, so that the time says nothing of which was nearly right
            if sum(secrets.compare_digest(one, known) for one in presented for known in self._keys) == 0:
                raise ApiError(
                    401, "the API key is missing or wrong; accepted: `Authorization: Bearer KEY` or `x-api-key: KEY`",
                    code="invalid_api_key",
                )  # fmt: skip
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self.config.max_request_bytes:
            raise self._too_large(length)

    def _bounded(self, receive: Receive) -> Receive:
        """Of a body, no more bytes than allowed, and none of them too late: who sends one at a time holds nothing."""
        seen, coming = 0, True
        end = asyncio.get_running_loop().time() + self.config.body_timeout

        async def bounded() -> Message:
            nonlocal seen, coming
            if not coming:  # what follows is that the client leaves, and it may take its time
                return await receive()
            try:
                async with asyncio.timeout_at(end):
                    message = await receive()
            except TimeoutError:
                raise self._too_slow(seen) from None
            coming = bool(message.get("more_body"))
            seen += len(message.get("body", b""))
            if seen > self.config.max_request_bytes:
                raise self._too_large(f"more than {self.config.max_request_bytes}")
            return message

        return bounded

    def _too_large(self, found: str) -> ApiError:
        return ApiError(
            413, f"the body is too large: found {found[:20]} bytes; accepted: at most {self.config.max_request_bytes} "
            "(--max-request-bytes)", code="request_too_large", hang_up=True,
        )  # fmt: skip

    def _too_slow(self, seen: int) -> ApiError:
        return ApiError(
            408, f"the body came too slowly: found {seen} bytes and no end; accepted: all of it within "
            f"{self.config.body_timeout} s (--body-timeout)", code="request_timeout", hang_up=True,
        )  # fmt: skip


def record_of(scope: Any) -> Record:
    """The record of a request that passed the gate."""
    record: Record = scope["state"]["record"]
    return record
