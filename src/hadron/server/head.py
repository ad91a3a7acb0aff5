"""A limit on how slowly a request's head may come: uvicorn waits for ever for one that begins and does not end."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from hadron.server.errors import ApiError


def protocol(seconds: int) -> type[H11Protocol]:
    """uvicorn's HTTP/1.1, which hangs up on heads that take longer. A kept connection may stay silent between requests
    as long as `timeout_keep_alive` allows: the time runs from a head's first byte, for the first from the start."""

    class Protocol(H11Protocol):
        _too_slow: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._expect_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._have_head()
            elif self._too_slow is None:
                self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._have_head()
            super().connection_lost(exc)

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
