"""The engine's thread. It alone touches the engine; asyncio sends it commands and gets outputs back.

Between any two steps the thread looks at its commands, so that a request begins, and ends where its client left,
within a step. Outputs of a step cross to the event loop in one call; each request has a queue of its own there,
so that one who reads slowly holds up nobody.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from hadron.engine.request import Logprob, Request
from hadron.engine.stats import Load, Stats
from hadron.server.errors import ApiError, from_error

if TYPE_CHECKING:
    from hadron.engine.assemble import Assembled
    from hadron.engine.engine import Engine
    from hadron.engine.events import TokenEvent
    from hadron.sampling_params import SamplingParams

log = logging.getLogger("hadron.server")

#: Bounds of what a client is told to wait, in seconds.
_LEAST_WAIT, _MOST_WAIT = 1, 120


@dataclass(frozen=True, slots=True)
class Output:
    """A token of the index-th continuation, or its end. logprobs: of the token, where they were asked for."""

    index: int
    token_id: int | None
    text: str
    logprobs: dict[int, Logprob] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class Generation:
    """A request's side in the event loop; iterate to get what has come since the last time.

    cached_tokens, prompt_logprobs: known with the first output.
    """

    request_id: str
    prompt_tokens: int
    open: int
    began: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    last_token: float | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    requests: list[Request] = field(default_factory=list)  # of the engine's thread, as the next
    rows: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    _queue: asyncio.Queue[list[Output]] = field(default_factory=asyncio.Queue)

    async def __aiter__(self) -> AsyncIterator[list[Output]]:
        """Outputs in order, as many as there are, until every continuation has ended; `ApiError` where one fails."""
        left = self.open
        while left:
            outputs = await self._queue.get()
            while not self._queue.empty():
                outputs = outputs + self._queue.get_nowait()
            for output in outputs:
                if output.error is not None:
                    raise from_error(output.error)
            left -= sum(output.finish_reason is not None for output in outputs)
            yield outputs

    def put(self, outputs: list[Output], now: float) -> None:
        """Called in the event loop."""
        if any(output.token_id is not None for output in outputs):
            if self.first_token is None:
                self.first_token = now
            self.last_token = now
        self._queue.put_nowait(outputs)


class Worker:
    """load: builds the engine, in its thread. most: requests that may run or wait at a time."""

    def __init__(self, load: Callable[[], Assembled], *, most: int) -> None:
        self._load = load
        self._most = most
        self._commands: SimpleQueue[Callable[[Engine], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hadron-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loaded: asyncio.Future[Assembled] | None = None
        self._live: dict[str, Generation] = {}
        self._preparing = 0  # requests whose text is tokenized
        self._owners: dict[str, Generation] = {}  # by the engine's ids; of its thread
        self._ids = count()
        self._seconds = 0.0
        self.draining = False
        self.dead = False  # the engine's thread ended by an error
        self._ended = False
        self.load = Load(0, 0, 0, 0, 0)
        self.stats = Stats()
        self.on_token: Callable[[Generation, float, int], None] = lambda generation, now, tokens: None

    def start(self) -> asyncio.Future[Assembled]:
        """Begin to load; what comes of it."""
        self._loop = asyncio.get_running_loop()
        self._loaded = self._loop.create_future()
        self._thread.start()
        return self._loaded

    def drain(self) -> None:
        """Take no more requests."""
        self.draining = True

    def abandon(self) -> None:
        """Tell everybody who waits that nothing more will come."""
        self._ended = True
        self._fail_all(ApiError(503, "the server was stopped before the answer was complete", code="shutting_down"))

    def _fail_all(self, error: ApiError) -> None:
        for generation in self._live.values():
            generation.put([_failure(0, error)], time.monotonic())

    def stop(self) -> None:
        """End every request and the thread."""
        self.draining = self._ended = True
        self._commands.put(None)

    def join(self, timeout: float) -> bool:
        """Wait for the thread; whether it has ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def active(self) -> int:
        """Continuations that run or wait."""
        return sum(generation.open for generation in self._live.values())

    def admit(self, continuations: int, *, begun: bool = False) -> None:
        """`ApiError` 429 where so many more would be too many, 503 while the server ends, 500 once the engine has
        died; begun: the request came before the end."""
        if self.dead:
            raise self._no_engine()
        if self._ended or (self.draining and not begun):
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=self._wait)
        busy = self.active + self._preparing
        if busy and busy + continuations > self._most:
            raise ApiError(
                429,
                f"too many requests: {busy} run or wait, {continuations} more were asked for; at most "
                f"{self._most} may (--max-num-seqs and --max-queue)",
                code="queue_full",
                retry_after=self._wait,
            )

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place in the queue while a request is prepared; `ApiError` as of `admit`."""
        self.admit(1)
        self._preparing += 1
        try:
            yield
        finally:
            self._preparing -= 1

    def generate(
        self,
        ids: tuple[int, ...],
        params: SamplingParams,
        prompt: str | None = None,
        *,
        priority: int = 0,
        answer: bool = False,
        calls: bool = False,
        admitted: bool = False,
    ) -> Generation:
        """Queue a request that has begun, with checked prompt and parameters. admitted: `admit` has been asked."""
        if not admitted:
            self.admit(params.n, begun=True)
        request_id = str(next(self._ids))
        generation = Generation(request_id, len(ids), params.n)
        self._live[request_id] = generation

        def add(engine: Engine) -> None:
            try:
                generation.requests = engine.add_all(
                    request_id, ids, params, prompt, priority=priority, answer=answer, calls=calls
                )  # fmt: skip
            except Exception as error:
                for name in (request_id, *(f"{request_id}-{i}" for i in range(1, params.n))):
                    engine.abort(name)
                self._send([(generation, [_failure(i, error) for i in range(params.n)])])
                return
            for request in generation.requests:
                self._owners[request.request_id] = generation

        self._commands.put(add)
        return generation

    def end(self, generation: Generation) -> None:
        """Nobody waits for it any more: abort what is left. Always called once, at the end."""
        if self._live.pop(generation.request_id, None) is None:
            return
        self._seconds += ((time.monotonic() - generation.began) - self._seconds) / 8

        def abort(engine: Engine) -> None:
            for request in generation.requests:
                if self._owners.pop(request.request_id, None) is not None:
                    engine.abort(request.request_id)

        self._commands.put(abort)

    @property
    def _wait(self) -> int:
        """Seconds after which a client may try again: what a request takes lately."""
        return min(_MOST_WAIT, max(_LEAST_WAIT, round(self._seconds)))

    # below: the engine's thread

    def _run(self) -> None:
        assert self._loop is not None and self._loaded is not None
        try:
            assembled = self._load()
        except BaseException as error:
            self._call(_settle, self._loaded, None, error)
            return
        engine = assembled.engine
        self.stats, self.load = engine.stats, engine.load
        self._call(_settle, self._loaded, assembled, None)
        try:
            self._serve(engine)
        except BaseException:
            log.critical("the engine ended, and nothing can be answered any more", exc_info=True)
            self._call(self._die)

    def _serve(self, engine: Engine) -> None:
        going = True
        while going:
            try:
                going = self._obey(engine)
                if going and engine.has_requests:
                    self._send(self._taken(engine.step()))
            except Exception as error:
                log.exception("a step failed")
                self._send(self._lost(engine, error))
            self.load = engine.load
        engine.abort_all()
        self.load = engine.load

    def _obey(self, engine: Engine) -> bool:
        """Do what was asked; wait for something where there is nothing else to do. False: end."""
        while True:
            if self._commands.empty() and engine.has_requests:
                return True
            command = self._commands.get()
            if command is None:
                return False
            command(engine)
            self.load = engine.load

    def _taken(self, events: list[TokenEvent]) -> list[tuple[Generation, list[Output]]]:
        """The events of a step, for their owners."""
        found: dict[str, tuple[Generation, list[Output]]] = {}
        for event in events:
            generation = self._owners.get(event.request_id)
            if generation is None:
                continue
            request = generation.requests[event.index]
            if not generation.cached_tokens:
                generation.cached_tokens = generation.requests[0].num_cached_tokens
            if request.params.prompt_logprobs is not None:
                generation.prompt_logprobs = request.prompt_logprobs
            row = None
            if event.token_id is not None and request.params.logprobs is not None:
                row = request.logprobs[generation.rows[event.index]]
                generation.rows[event.index] += 1
            # a step may give several tokens: how the request ended goes with the last of them
            ended = event.finish_reason is not None
            stop_reason, error = (request.stop_reason, request.error) if ended else (None, None)
            output = Output(event.index, event.token_id, event.text, row, event.finish_reason, stop_reason, error)
            found.setdefault(generation.request_id, (generation, []))[1].append(output)
            if event.finish_reason is not None:
                del self._owners[event.request_id]
        return list(found.values())

    def _lost(self, engine: Engine, error: Exception) -> list[tuple[Generation, list[Output]]]:
        """A bug of ours ended a step somewhere: no request can be trusted to stand where it should."""
        engine.abort_all()
        lost = []
        for request_id, generation in self._owners.items():
            index = next(r.index for r in generation.requests if r.request_id == request_id)
            lost.append((generation, [_failure(index, error)]))
        self._owners.clear()
        return lost

    def _send(self, batch: list[tuple[Generation, list[Output]]]) -> None:
        if batch:
            self._call(self._receive, batch)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run a function in the event loop; nothing where it has ended, and nobody listens."""
        assert self._loop is not None
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    # the event loop again

    def _die(self) -> None:
        self.dead = True
        self._fail_all(self._no_engine())

    @staticmethod
    def _no_engine() -> ApiError:
        return ApiError(500, "the engine ended by an error of its own; the server must be started again (its log says "
                        "what happened)", code="engine_dead")  # fmt: skip

    def _receive(self, batch: list[tuple[Generation, list[Output]]]) -> None:
        now = time.monotonic()
        for generation, outputs in batch:
            self.on_token(generation, now, sum(output.token_id is not None for output in outputs))
            generation.put(outputs, now)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():  # the server ended while it loaded
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def _failure(index: int, error: Exception) -> Output:
    return Output(index, None, "", finish_reason="error", error=error)
