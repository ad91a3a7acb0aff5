"""The description of the interface, taken at its word by schemathesis: whatever it allows or forbids, nothing fails."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from hadron.server.run import Server
from tests.server.running import idle, running, until

log = logging.getLogger(__name__)

#: path -> requests that the description allows, and that it forbids, for `.ci/run`: more where one takes less time
THOUSANDS = {
    "/v1/chat/completions": (120, 80),
    "/v1/completions": (150, 140),
    "/v1/responses": (100, 120),
    "/v1/messages": (140, 130),
    "/v1/messages/count_tokens": (140, 140),
    "/tokenize": (200, 190),
    "/detokenize": (200, 200),
}

#: paths without a body; of the last, names that are no model's
READ = ("/health", "/ready", "/metrics", "/version", "/v1/models", "/v1/models/{name}")


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """Answers are short, because the context is."""
    with running(engine={"max_model_len": 48, "num_pages": 8, "max_num_seqs": 8}, max_queue=8) as made:
        yield made
        until(lambda: idle(made), 60)


def statuses(server: Server, path: str, mode: GenerationMode, examples: int, method: str = "POST") -> Counter[int]:
    """What a server answers to generated requests; every answer is JSON or events, and errors say something."""
    schema = schemathesis.openapi.from_dict(httpx.get(f"{server.url}/openapi.json").json())
    seen: Counter[int] = Counter()
    with httpx.Client(base_url=server.url, timeout=60) as http:

        @given(case=schema[path][method].as_strategy(generation_mode=mode))
        @settings(
            max_examples=examples, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        def sent(case: Any) -> None:
            prepared = case.as_transport_kwargs(base_url=server.url)
            body = {key: prepared[key] for key in ("json", "content", "data") if prepared.get(key) is not None}
            if isinstance(body.get("data"), str | bytes):
                body["content"] = body.pop("data")
            headers = {str(key): str(value) for key, value in (prepared.get("headers") or {}).items()}
            try:
                answer = http.request(case.method, prepared["url"], headers=headers, **body)
            except (UnicodeEncodeError, TypeError, ValueError):
                return  # httpx itself cannot send it
            seen[answer.status_code] += 1
            assert answer.status_code < 500, (body, answer.text)
            if answer.status_code >= 400:
                assert len(answer.json()["error"]["message"]) > 10, answer.text

        sent()
    return seen


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", THOUSANDS)
def test_no_request_makes_the_server_fail(small: Server, path: str, mode: GenerationMode) -> None:
    seen = statuses(small, path, mode, 12)
    assert seen
    assert mode is not GenerationMode.NEGATIVE or max(seen) >= 400


@pytest.mark.parametrize("path", READ)
def test_nothing_that_is_read_makes_the_server_fail(small: Server, path: str) -> None:
    seen = statuses(small, path, GenerationMode.POSITIVE, 12, "GET")
    assert set(seen) == ({404} if "{" in path else {200})


def test_all_paths_are_tried(small: Server) -> None:
    paths = httpx.get(f"{small.url}/openapi.json").json()["paths"]
    assert set(THOUSANDS) == {path for path, methods in paths.items() if "post" in methods}
    assert set(READ) == {path for path, methods in paths.items() if "get" in methods}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_request_of_two_thousand_makes_the_server_fail(small: Server) -> None:
    """At least two thousand are answered, below 500; `--log-cli-level=info` shows how many and how, path by path."""
    seen: Counter[int] = Counter()
    for path, counts in THOUSANDS.items():
        for mode, count in zip((GenerationMode.POSITIVE, GenerationMode.NEGATIVE), counts, strict=True):
            found = statuses(small, path, mode, count)
            log.info("%s %s: %d requests, %s", path, mode.value, found.total(), dict(sorted(found.items())))
            seen += found
    log.info("%d requests in all: %s", seen.total(), dict(sorted(seen.items())))
    assert seen.total() >= 2000 and max(seen) < 500, seen
    assert seen[200] >= 100
