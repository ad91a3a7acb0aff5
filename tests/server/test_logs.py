"""The log: one line a request, and what stands in it only where it was asked for."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import httpx
import pytest

from tests.server.running import CHAT, HELLO, NAME, http, running, say, scripts, server


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "hadron.server.requests"]


def test_a_request_leaves_one_line_without_its_prompt(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    body = say("a secret", max_tokens=2, store=True)
    assert http.post(CHAT, json=body, headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    known = http.post("/v1/messages", json={}, headers={"x-request-id": "mine-2"})
    assert known.headers["request-id"] == known.json()["request_id"] == "mine-2"
    caplog.clear()
    assert http.post(CHAT, json=body, headers={"x-request-id": "mine-1"}).status_code == 200
    odd = http.post(CHAT, json={}, headers={"x-request-id": "not one"}).headers["x-request-id"]
    assert re.fullmatch(r"[0-9a-f]{32}", odd)
    assert http.get("/health").headers["request-id"]
    first, second = lines_of(caplog)
    assert first.startswith(f"POST {CHAT} 200 ") and " mine-1 " in first
    for part in ("prompt_tokens=", "completion_tokens=2", 'finish="length"', 'ignored="store"', "first_token="):
        assert part in first
    assert "secret" not in first
    assert f"POST {CHAT} 400 " in second and odd in second and second.endswith(' error="messages"')


def test_what_a_refused_request_held_is_not_logged_unless_asked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{a secret"}}
    bodies: list[tuple[str, Any]] = [
        (CHAT, {"messages": "a secret"}),
        (CHAT, {"messages": [*HELLO["messages"], {"role": "assistant", "content": "", "tool_calls": [call]}]}),
        (CHAT, {**HELLO, "structured_outputs": {"regex": "(a secret"}}),
        ("/v1/messages", {"messages": [{"role": "a secret", "content": "a"}], "max_tokens": 1}),
    ]  # fmt: skip
    for asked in (False, True):
        caplog.clear()
        with running(enable_log_requests=asked) as server:
            for path, body in bodies:
                assert httpx.post(server.url + path, json=body).status_code == 400
        lines = lines_of(caplog)
        assert len(lines) == len(bodies) and all("error=" in line for line in lines)
        assert all(("secret" in line) is asked for line in lines), lines
        assert all(("secret" in record.getMessage()) is False for record in caplog.records if not asked)


def test_lines_may_be_json_and_may_hold_the_prompt(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with running(log_format="json", enable_log_requests=True) as server:
        httpx.post(server.url + CHAT, json=say("no\nsecret", max_tokens=2))
        httpx.post(server.url + "/v1/completions", json={"prompt": [5, 6], "max_tokens": 1})
    first, second = (json.loads(line) for line in lines_of(caplog))
    assert first["status"] == 200 and first["model"] == NAME and first["path"] == CHAT
    assert "no\nsecret" in first["prompt"] and second["prompt"] == "(5, 6)"
