"""Many clients that leave at any moment, on too few pages: afterwards everything is free and the bits are the same."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from typing import Any

import httpx
import psutil
import pytest

from hadron.server.run import Server
from tests.server.running import TOKENIZER, idle, running, until

#: A client of httpx that is cancelled while it connects leaves its transport to the garbage collector, which warns.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")

PAGES = 9
WORDS = TOKENIZER.decode(list(range(300, 480))).split()
FIXED = {
    "messages": [{"role": "user", "content": "The river is wide. " * 20}], "temperature": 0, "max_tokens": 24,
    "logprobs": True, "top_logprobs": 3, "ignore_eos": True,
}  # fmt: skip


def golden(server: Server) -> Any:
    """What a fixed request is answered, to the last bit of its log-probabilities."""
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=FIXED, timeout=120)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice["message"], choice["logprobs"], choice["finish_reason"]


def request(draw: random.Random) -> dict[str, Any]:
    shared = "The river is wide. " * draw.randrange(0, 30)
    text = shared + " ".join(draw.choices(WORDS, k=draw.randrange(1, 80)))
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": text}], "max_tokens": draw.randrange(1, 200),
        "n": draw.choice([1, 1, 1, 3]), "seed": draw.randrange(100), "stream": draw.random() < 0.7,
        "priority": draw.choice([0, 0, -1, 2]), "thinking_budget": draw.choice([None, 3]),
    }  # fmt: skip
    if draw.random() < 0.1:
        body["temperature"] = -1  # refused
    if draw.random() < 0.2:
        body["response_format"] = {"type": "json_object"}
    return body


async def client(http: httpx.AsyncClient, draw: random.Random, end: float, seen: dict[Any, int]) -> None:
    """One client after another until the time is over."""
    while time.monotonic() < end:
        body = request(draw)
        try:
            async with asyncio.timeout(draw.choice([0.01, 0.05, 0.3, 120, 120])):
                if not body["stream"]:
                    answer = await http.post("/v1/chat/completions", json=body)
                    seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
                    continue
                async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                    seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
                    most = draw.choice([1, 5, 10_000])
                    async for line in answer.aiter_lines():
                        assert '"error"' not in line or answer.status_code != 200, line
                        most -= 1
                        if most <= 0:
                            seen["left"] = seen.get("left", 0) + 1
                            break
        except TimeoutError:
            seen["left"] = seen.get("left", 0) + 1
        if draw.random() < 0.3:
            await asyncio.sleep(0.02)


async def storm(url: str, clients: int, seconds: float, seed: int) -> dict[Any, int]:
    seen: dict[Any, int] = {}
    end = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as http, asyncio.TaskGroup() as group:
        for i in range(clients):
            group.create_task(client(http, random.Random(seed * 1000 + i), end, seen))
    return seen


def suffer(clients: int, seconds: float) -> None:
    engine = {"num_pages": PAGES, "max_model_len": 512, "max_num_seqs": 6, "max_num_batched_tokens": 128}
    with running(engine=engine, max_queue=4 * clients) as server:
        slots = server.worker.load.free_slots
        before = golden(server)
        asyncio.run(storm(server.url, clients, seconds / 2, 1))
        until(lambda: idle(server), 120)
        memory = psutil.Process().memory_info().rss
        seen = asyncio.run(storm(server.url, clients, seconds / 2, 2))
        until(lambda: idle(server), 120)
        gc.collect()
        until(lambda: not server._server.server_state.connections)
        assert psutil.Process().memory_info().rss - memory < 64 << 20
        assert server.worker.stats.preemptions > 0
        assert seen[200] > 5 and seen["left"] > 5 and seen.get(400, 0) > 0, seen
        assert not set(seen) - {200, 400, "left"}, "all of them were in the server at a time"
        assert server.worker.load.pages_used == 0
        kept = len(server.service.model.engine._runner.manager.prefixes)  # states for later prompts
        assert server.worker.load.free_slots + kept == slots
        assert golden(server) == before


def test_clients_that_leave_take_nothing_with_them() -> None:
    suffer(24, 6)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_hundred_clients_for_two_minutes() -> None:
    suffer(200, 120)
