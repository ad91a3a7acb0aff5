"""Two things that uvicorn leaves out: it waits for ever for a head that begins and does not end, and it hangs up so
that the client may never read why."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from hadron.server.errors import ApiError

#: Seconds for which a client that was still sending when we hung up may read the answer.
LINGER = 2.0


class _Transport:
    """A transport whose close(), while the client is still sending, ends only what we send and drops what comes until
    the client ends too or LINGER is over. Bytes that reach a closed socket are answered with a reset, and on a reset
    the client's system throws away an answer that its program has not read yet (RFC 9112, section 9.6)."""

    def __init__(self, transport: asyncio.Transport, sending: Callable[[], bool], loop: asyncio.AbstractEventLoop):
        self._transport, self._sending, self._loop = transport, sending, loop
        self.lingers = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self.lingers or self._transport.is_closing()

    def close(self) -> None:
        if self.is_closing():
            return
        if not self._sending():
            self._transport.close()
            return
        self.lingers = True
        self._transport.write_eof()
        self._transport.resume_reading()
        self._loop.call_later(LINGER, self._transport.close)


def protocol(seconds: int) -> type[H11Protocol]:
    """uvicorn's HTTP/1.1, which hangs up on heads that take longer. A kept connection may stay silent between requests
    as long as `timeout_keep_alive` allows: the time runs from a head's first byte, for the first from the start."""

    class Protocol(H11Protocol):
        _too_slow: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            self._outer = _Transport(transport, self._client_sends, self.loop)
            super().connection_made(self._outer)  # type: ignore[arg-type]
            self._expect_head()

        def data_received(self, data: bytes) -> None:
            if self._outer.lingers:
                return
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._have_head()
            elif self._too_slow is None:
                self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._have_head()
            super().connection_lost(exc)

        def _client_sends(self) -> bool:
            begun, _ = self.conn.trailing_data
            return bool(begun) or self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

        def _expect_head(self) -> None:
            self._too_slow = self.loop.call_later(seconds, self._hang_up)

        def _have_head(self) -> None:
            if self._too_slow is not None:
                self._too_slow.cancel()
                self._too_slow = None

        def _hang_up(self) -> None:
            begun, _ = self.conn.trailing_data
            if begun and self.conn.our_state is h11.IDLE:
                error = ApiError(
                    408, f"the request's head came too slowly: found {len(begun)} bytes and no end; accepted: all of "
                    f"it within {seconds} s (--header-timeout)", code="request_timeout", hang_up=True,
                )  # fmt: skip
                body = msgspec.json.encode(error.body())
                headers: list[Any] = [*error.headers.items(), ("content-type", "application/json")]
                headers.append(("content-length", str(len(body))))
                for event in (h11.Response(status_code=408, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                    self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

    return Protocol
