"""What reaches clients from the engine behind the server: its checkpoint's defaults, its counters, when it is ready."""

from __future__ import annotations

import json
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from hadron.checkpoint.load import MappedCheckpoint
from hadron.errors import NumericsError
from hadron.server.run import Server
from tests.conftest import DATA, RANDOM
from tests.server.running import idle, running, until

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "ignore_eos": True}


def counted(server: Server, name: str) -> float:
    page = httpx.get(f"{server.url}/metrics").text
    found = re.search(rf"^{re.escape(name)} (\S+)$", page, re.M)
    assert found is not None, name
    return float(found[1])


def chat(server: Server, **fields: Any) -> Any:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={**CHAT, **fields}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_defaults_of_the_checkpoint_reach_requests(tmp_path: Path) -> None:
    """min_p of 1 leaves the likeliest token alone, at any temperature."""
    folder = Path(shutil.copytree(RANDOM, tmp_path / "model"))
    defaults = {"temperature": 5.0, "min_p": 1.0, "max_new_tokens": 7}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    with running(folder) as server:
        own, greedy = chat(server), chat(server, temperature=0, min_p=0, max_tokens=9)
        assert own["usage"]["completion_tokens"] == 7 and own["choices"][0]["finish_reason"] == "length"
        said = [answer["choices"][0]["message"]["reasoning_content"] for answer in (own, greedy)]
        assert said[0] and said[1].startswith(said[0])
        assert greedy["usage"]["completion_tokens"] == 9


def test_guesses_move_the_counters() -> None:
    """With the layer's own guesses, of which some are right."""
    config = {"method": "mtp", "num_speculative_tokens": 2}
    with running(DATA / "glm52-quark-mxfp4-attnptpc", engine={"speculative_config": config}) as server:
        body = {"prompt": [5, 9, 2], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
        until(lambda: idle(server))
        drafts, tokens = counted(server, "hadron_drafts_total"), counted(server, "hadron_draft_tokens_total")
        assert drafts > 10 and drafts < tokens <= 2 * drafts
        right = counted(server, "hadron_accepted_tokens_total")
        assert counted(server, "hadron_steps_total") == counted(server, "hadron_generated_tokens_total") - right
        first = counted(server, 'hadron_accepted_tokens_per_position_total{position="0"}') if right else 0
        assert right / 2 <= first <= right


def test_ready_waits_until_the_weights_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, go_on, prefault = threading.Event(), threading.Event(), MappedCheckpoint.prefault

    def slowly(mapped: MappedCheckpoint) -> None:
        reading.set()
        assert go_on.wait(60)
        prefault(mapped)

    monkeypatch.setattr(MappedCheckpoint, "prefault", slowly)
    with running(engine={"prefault": True}, wait=False) as server:
        try:
            assert reading.wait(60)
            assert httpx.get(f"{server.url}/health").status_code == 200
            assert httpx.get(f"{server.url}/ready").status_code == 503
        finally:
            go_on.set()
        until(lambda: httpx.get(f"{server.url}/ready").status_code == 200)


def test_an_engine_that_ends_is_said_to_whoever_waits_asks_or_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step fails, and so does cleaning up after it."""

    def broken(*given: Any, **options: Any) -> Any:
        raise RuntimeError("a bug")

    with running() as server:
        monkeypatch.setattr("hadron.engine.engine.Engine.step", broken)
        monkeypatch.setattr("hadron.engine.engine.Engine.abort_all", broken)
        waited = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, timeout=60)
        asked = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, timeout=60)
        for answer in (waited, asked):
            assert answer.status_code == 500 and answer.json()["error"]["code"] == "engine_dead"
            assert "the server must be started again" in answer.json()["error"]["message"]
        for path in ("/health", "/ready"):
            watched = httpx.get(server.url + path)
            assert watched.status_code == 503 and watched.json()["error"]["code"] == "engine_dead"


def test_a_failure_before_the_first_token_is_no_time_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any, **options: Any) -> Any:
        raise NumericsError("not finite", where="layer 3", found="NaN", accepted="numbers", hint="check")

    with running() as server:
        monkeypatch.setattr("hadron.engine.sampler.choose", broken)
        refused = httpx.post(f"{server.url}/v1/chat/completions", json={**CHAT, "logprobs": True}, timeout=60)
        assert refused.status_code == 500
        until(lambda: idle(server))
        assert counted(server, "hadron_failures_total") == 1
        assert counted(server, "hadron_time_to_first_token_seconds_count") == 0
