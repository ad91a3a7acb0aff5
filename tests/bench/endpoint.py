"""A server that says what a test tells it to, byte by byte: OpenAI's interface with every fault there is."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

#: What is done with a request: the number of the request, its body, and how to send bytes.
Behaviour = Callable[[int, dict[str, Any], Callable[[bytes], Awaitable[None]]], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nconnection: close\r\n\r\n"
USAGE = {"prompt_tokens": 7, "completion_tokens": 4}


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def piece(text: str) -> bytes:
    return event({"choices": [{"index": 0, "text": text}]})


def usage(**counts: int) -> bytes:
    return event({"choices": [], "usage": USAGE | counts})


DONE = event(b"[DONE]")


def status(code: int, body: Any, *headers: str) -> bytes:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {code} X", "content-type: application/json", f"content-length: {len(text)}", *headers]
    return "\r\n".join([*lines, "connection: close", "", ""]).encode() + text


class Endpoint:
    """bodies: of the requests that came, in order. at_once: the most that were open at a time."""

    def __init__(self, behave: Behaviour) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.open = self.at_once = 0
        self.url = ""
        self._behave = behave

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def send(data: bytes) -> None:
            writer.write(data)
            await writer.drain()

        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            sizes = [line for line in head.lower().split("\r\n") if line.startswith("content-length")]
            length = int(sizes[0].split(":")[1]) if sizes else 0
            body = json.loads(await reader.readexactly(length) or b"{}")
            if head.startswith("GET"):
                await send(status(200, {"data": [{"id": "fake"}]}))
                return
            self.heads.append(head)
            self.bodies.append(body)
            self.open += 1
            self.at_once = max(self.at_once, self.open)
            try:
                await self._behave(len(self.bodies) - 1, body, send)
            finally:
                self.open -= 1
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@contextmanager
def endpoint(behave: Behaviour) -> Iterator[Endpoint]:
    """A running one, in a thread of its own."""
    made = Endpoint(behave)
    started, ended = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def run() -> None:
        server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
        made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        started.set()
        await ended.wait()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.01)  # transports close in the loop's next round

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    started.wait(10)
    try:
        yield made
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(10)
        loop.close()


async def talk(send: Callable[[bytes], Awaitable[None]], *pauses: float, **counts: int) -> None:
    """An answer with a piece after each pause, and the counts of `USAGE` but for `counts`."""
    await send(HEAD)
    for i, pause in enumerate(pauses):
        await asyncio.sleep(pause)
        await send(piece(f" {i}"))
    await send(usage(**{"completion_tokens": len(pauses)} | counts) + DONE)
