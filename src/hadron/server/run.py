"""A server from its first to its last moment: listen, load, serve, drain, stop.

It listens before it loads, so that `/health` answers meanwhile. The first SIGTERM or SIGINT lets requests that
have begun end and takes no more; the second stops at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from hadron.errors import UsageError
from hadron.server.app import create_app
from hadron.server.config import ServerConfig
from hadron.server.head import protocol
from hadron.server.service import Service
from hadron.server.worker import Worker

if TYPE_CHECKING:
    from hadron.engine.assemble import Assembled

log = logging.getLogger("hadron.server")

#: Seconds that a step which is being computed gets to end, when the server stops.
LAST_STEP = 5.0
#: Seconds that an idle connection stays open: longer than clients keep theirs, or one closes what the other uses.
KEEP_ALIVE = 75
#: Seconds in which answers that are cut off may say so.
GOODBYE = 1.0


class _Uvicorn(uvicorn.Server):
    """uvicorn's, but it goes on listening while requests end, so that whoever asks is told; any second signal stops
    it, what it cuts off is told so, and it leaves by returning."""

    def __init__(self, config: uvicorn.Config, worker: Worker, drain_timeout: int) -> None:
        super().__init__(config)
        self._worker = worker
        self._drain_timeout = drain_timeout
        self._drain_until: float | None = None

    async def on_tick(self, counter: int) -> bool:
        """Whether to leave: asked ten times a second."""
        if self._worker.draining:
            now = asyncio.get_running_loop().time()
            self._drain_until = self._drain_until or now + (self._drain_timeout or float("inf"))
            self.force_exit = self.force_exit or now >= self._drain_until
            self.should_exit = self.should_exit or self.force_exit or not self._worker.active
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for what is left of requests, until `force_exit`."""
        loop = asyncio.get_running_loop()
        if self._drain_until is not None and self._drain_until != float("inf"):
            loop.call_at(self._drain_until, self._force)
        await super().shutdown(sockets)
        if self.force_exit:
            self._worker.abandon()
            end = loop.time() + GOODBYE
            while self.server_state.tasks and loop.time() < end:
                await asyncio.sleep(0.01)
            await self.lifespan.shutdown()

    def _force(self) -> None:
        self.force_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second stops."""
        del frame
        if self._worker.draining:
            self.force_exit = True
        self._worker.drain()
        log.info("signal %d: %s", sig, "stopping" if self.force_exit else "draining; once more to stop at once")


def listen(config: ServerConfig) -> socket.socket:
    """The socket; `UsageError` where the address cannot be had."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise UsageError(
            "the address cannot be listened on", where="--host, --port", found=f"{config.host}:{config.port}: {error}",
            accepted="an address of this machine, and a port that is free", hint="try another --port",
        ) from error  # fmt: skip


class Server:
    """A server that listens; `run` serves until `stop`, or a signal where it runs in the main thread.

    load: builds the engine. model: its name, where the configuration gives none. most: requests that may run or wait.
    """

    def __init__(self, load: Callable[[], Assembled], config: ServerConfig, *, model: str, most: int) -> None:
        self._socket = listen(config)
        self.url = address(self._socket)
        self.worker = Worker(load, most=most)
        self.service = Service(config, self.worker, config.served_model_name or (model,))
        self._failed: list[BaseException] = []
        self.app = create_app(self.service)
        self.app.router.lifespan_context = self._lifespan
        self._server = _Uvicorn(
            uvicorn.Config(
                self.app, log_config=None, access_log=False, server_header=False, lifespan="on", loop="asyncio",
                http=protocol(config.header_timeout), timeout_keep_alive=KEEP_ALIVE,
            ),
            self.worker,
            config.drain_timeout,
        )  # fmt: skip

    def run(self) -> None:
        """Serve; raises what loading raised."""
        log.info("listening on %s", self.url)
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()
            self.worker.stop()
        if not self.worker.join(LAST_STEP):
            log.warning("a step was still being computed")
        if self._failed:
            raise self._failed[0]
        log.info("stopped")

    def stop(self, *, at_once: bool = False) -> None:
        """What a signal does, from any thread; at_once: the second one."""
        self.worker.drain()
        self._server.force_exit = self._server.force_exit or at_once

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.ensure_future(self._load())
        yield
        loading.cancel()
        self.worker.stop()

    async def _load(self) -> None:
        try:
            await self.service.load()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._failed.append(error)
            self._server.should_exit = True
        else:
            model = self.service.model
            log.info("ready: %s, %d tokens of context", ", ".join(model.names), model.capacity)


def address(sock: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
