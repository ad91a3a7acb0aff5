"""Drives a server for `hadron bench serve`: warm up, send by a schedule or so many at a time, gather what came.

A request that is refused or fails is counted and not sent again. The last requests may end after the duration.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import httpx

from hadron.bench.serve.client import Client, Outcome, said
from hadron.bench.serve.load import COMPLETIONS, Load, Prompt
from hadron.bench.serve.summary import ServeReport, summarize
from hadron.errors import UsageError

#: Seconds that a server gets to say which model it has.
_PATIENCE = 30.0


@dataclass(frozen=True, slots=True)
class Asked:
    """What a command line asked for. base_url: up to `/v1`. model: None takes the server's first. requests: how many;
    None is as many as fit into `duration` seconds. rate: a second, or None to keep `concurrency` running. bounds:
    milliseconds by name, for goodput."""

    base_url: str
    endpoint: str = COMPLETIONS
    model: str | None = None
    api_key: str | None = None
    load: Load = field(default_factory=Load)
    requests: int | None = 100
    duration: float | None = None
    rate: float | None = None
    concurrency: int = 1
    warmups: int = 1
    timeout: float = 600.0
    extra: dict[str, Any] = field(default_factory=dict)
    bounds: dict[str, float] = field(default_factory=dict)


def measure(asked: Asked, progress: Callable[[int, int], None] = lambda done, total: None) -> ServeReport:
    """Send and measure. progress: requests that ended, or seconds where only a duration was given. `UsageError`
    where the server does not answer at all, or refuses the requests to warm up."""
    return asyncio.run(_measure(asked, progress))


async def _measure(asked: Asked, progress: Callable[[int, int], None]) -> ServeReport:
    key = {} if asked.api_key is None else {"authorization": f"Bearer {asked.api_key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(headers=key, timeout=None, limits=limits, trust_env=False) as http:
        model = asked.model or await _first_model(http, asked.base_url)
        began = time.perf_counter()

        def client(since: float) -> Client:
            return Client(
                http, asked.base_url, asked.endpoint, model, asked.extra, asked.timeout,
                lambda: time.perf_counter() - since,
            )  # fmt: skip

        for prompt in islice(asked.load.prompts("warm-up"), asked.warmups):
            _check(await client(began).ask(prompt), asked)
        began = time.perf_counter()
        outcomes = await _Drive(client(began), asked, progress).run()
    return summarize(asked.base_url, asked.endpoint, model, outcomes, asked.bounds)


@dataclass(slots=True)
class _Drive:
    """One run."""

    client: Client
    asked: Asked
    progress: Callable[[int, int], None]
    outcomes: list[Outcome] = field(default_factory=list)

    async def run(self) -> list[Outcome]:
        """In the order in which they ended."""
        prompts = islice(self.asked.load.prompts(), self.asked.requests)
        async with asyncio.TaskGroup() as group:
            if self.asked.rate is None:
                for _ in range(self.asked.concurrency):
                    group.create_task(self._keep_sending(prompts))
            else:
                await self._send_by_schedule(prompts, self.asked.rate, group)
        return self.outcomes

    async def _keep_sending(self, prompts: Iterator[Prompt]) -> None:
        while not self._over(self.client.clock()) and (prompt := next(prompts, None)) is not None:
            await self._ask(prompt)

    async def _send_by_schedule(self, prompts: Iterator[Prompt], rate: float, group: asyncio.TaskGroup) -> None:
        for due, prompt in zip(self.asked.load.arrivals(rate), prompts, strict=False):
            if self._over(due):
                return
            await asyncio.sleep(due - self.client.clock())
            group.create_task(self._ask(prompt, due))

    def _over(self, at: float) -> bool:
        return self.asked.duration is not None and at >= self.asked.duration

    async def _ask(self, prompt: Prompt, due: float | None = None) -> None:
        self.outcomes.append(await self.client.ask(prompt, due))
        if self.asked.requests is not None:
            self.progress(len(self.outcomes), self.asked.requests)
        elif self.asked.duration is not None:
            self.progress(int(min(self.client.clock(), self.asked.duration)), int(self.asked.duration))


async def _first_model(http: httpx.AsyncClient, base_url: str) -> str:
    try:
        answer = await http.get(f"{base_url}/models", timeout=_PATIENCE)
        if answer.status_code != 200:
            raise _unanswered(base_url, f"HTTP {answer.status_code}: {said(answer.content)}")
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _unanswered(base_url, str(error) or type(error).__name__) from error
    except (ValueError, LookupError, TypeError) as error:
        raise _unanswered(base_url, "/models that lists no model") from error


def _check(outcome: Outcome, asked: Asked) -> None:
    """Nothing is measured where not even a first request is answered."""
    if outcome.failure is not None:
        raise _unanswered(asked.base_url, f"{outcome.failure}: {outcome.detail}")


def _unanswered(base_url: str, found: str) -> UsageError:
    return UsageError(
        "the server cannot be measured", where=f"--base-url {base_url}", found=found,
        accepted="an OpenAI-compatible server that answers",
        hint="start one, such as `hadron serve MODEL`; see --model, --api-key and --endpoint",
    )  # fmt: skip
