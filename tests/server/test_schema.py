"""The description of the interface, taken at its word by schemathesis: whatever it allows or forbids, nothing fails."""

from __future__ import annotations

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

POSTS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/tokenize", "/detokenize",
)  # fmt: skip


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """Answers are short, because the context is."""
    with running(engine={"max_model_len": 48, "num_pages": 8, "max_num_seqs": 8}, max_queue=8) as made:
        yield made
        until(lambda: idle(made), 60)


def statuses(server: Server, path: str, mode: GenerationMode, examples: int) -> Counter[int]:
    """What a server answers to generated requests; every answer is JSON or events, and errors say something."""
    schema = schemathesis.openapi.from_dict(httpx.get(f"{server.url}/openapi.json").json())
    seen: Counter[int] = Counter()
    with httpx.Client(base_url=server.url, timeout=60) as http:

        @given(case=schema[path]["POST"].as_strategy(generation_mode=mode))
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
                answer = http.request(case.method, path, headers=headers, **body)
            except (UnicodeEncodeError, TypeError, ValueError):
                return  # httpx itself cannot send it
            seen[answer.status_code] += 1
            assert answer.status_code < 500, (body, answer.text)
            if answer.status_code >= 400:
                assert len(answer.json()["error"]["message"]) > 10, answer.text

        sent()
    return seen


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", POSTS)
def test_no_request_makes_the_server_fail(small: Server, path: str, mode: GenerationMode) -> None:
    seen = statuses(small, path, mode, 25)
    assert seen
    assert mode is not GenerationMode.NEGATIVE or max(seen) >= 400


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("path", POSTS)
def test_no_request_of_thousands_makes_the_server_fail(small: Server, path: str) -> None:
    sent = sum(sum(statuses(small, path, mode, 200).values()) for mode in GenerationMode)
    assert sent >= 300
