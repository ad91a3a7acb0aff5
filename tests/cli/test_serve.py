"""`hadron serve` as a process: what it says, how it stops, and its exit codes."""

from __future__ import annotations

import json
import logging
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from hadron.cli.main import run
from tests.conftest import RANDOM

BODY = {"messages": [{"role": "user", "content": "Hello"}], "stream": True, "ignore_eos": True, "temperature": 0}


@pytest.fixture(autouse=True)
def handlers_of_the_log() -> Iterator[None]:
    """A server that is run in this process sets them; others must not write to its streams."""
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


@contextmanager
def serving(*options: str, model: Path | None = RANDOM) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that is ready, and its URL. model: None for the one that ships."""
    named = [] if model is None else [str(model)]
    command = [sys.executable, "-m", "hadron", "serve", *named, "--port", "0", "--threads", "1", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        seen = []
        for line in process.stderr:
            seen.append(line)
            if " ready: " in line or '"ready' in line:
                break
        found = re.search(r"listening on (http://[\d.]+:\d+)", "".join(seen))
        assert found, "".join(seen)
        yield process, found[1]
    finally:
        process.kill()
        process.communicate()


def first_piece(answer: httpx.Response) -> Iterator[str]:
    lines = answer.iter_lines()
    for line in lines:
        if "reasoning_content" in line:
            return lines
    raise AssertionError("nothing came")


def test_sigterm_lets_requests_end_and_takes_no_more() -> None:
    with serving() as (process, url), httpx.stream("POST", f"{url}/v1/chat/completions", timeout=60,
                                                   json={**BODY, "max_tokens": 400}) as answer:  # fmt: skip
        lines = first_piece(answer)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert httpx.get(f"{url}/health").status_code == 200
        refused = httpx.post(f"{url}/v1/chat/completions", json=BODY)
        for refusal in (httpx.get(f"{url}/ready"), refused):
            assert refusal.status_code == 503 and refusal.json()["error"]["code"] == "shutting_down"
        assert int(refused.headers["retry-after"]) >= 1
        rest = list(lines)
        assert any('"finish_reason":"length"' in line for line in rest) and "data: [DONE]" in rest
        assert process.wait(20) == 0


def test_a_second_signal_stops_at_once() -> None:
    with serving("--max-num-batched-tokens", "16") as (process, url):
        with socket.create_connection((url.split("/")[2].split(":")[0], int(url.rpartition(":")[2]))) as reader:
            body = json.dumps({**BODY, "max_tokens": 4000, "n": 16}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            reader.sendall(head.encode() + body)
            assert reader.recv(4000).startswith(b"HTTP/1.1 200")
            process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            assert process.poll() is None
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
            assert time.monotonic() - began < 8
            end = b""
            while piece := reader.recv(1 << 20):
                end = end[-4000:] + piece
            assert b"stopped before the answer was complete" in end and b"data: [DONE]" in end
        assert process.stderr is not None
        said = process.stderr.read()
        assert "Traceback" not in said, said


def test_draining_has_an_end() -> None:
    with serving("--drain-timeout", "1") as (process, url), httpx.stream(
        "POST", f"{url}/v1/chat/completions", timeout=60, json={**BODY, "max_tokens": 4000, "n": 16}
    ) as answer:  # fmt: skip
        first_piece(answer)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_every_field_of_the_configuration_has_a_flag_of_its_name() -> None:
    from hadron.cli.serve import command
    from hadron.server.config import ServerConfig

    assert set(ServerConfig.__dataclass_fields__) <= {parameter.name for parameter in command.params}


def test_keys_from_a_file(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\n\ntwo\n")
    with serving("--api-key-file", str(keys), "--api-key", "three", "--served-model-name", "m") as (_, url):
        assert httpx.get(f"{url}/v1/models").status_code == 401
        for key in ("one", "two", "three"):
            models = httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"})
            assert [model["id"] for model in models.json()["data"]] == ["m"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--port", "70000"], "where:    --port"),
        (["--max-queue", "-1"], "where:    --max-queue"),
        (["--threads", "0"], "where:    --threads"),
        (["--api-key-file", "not-there"], "--api-key-file not-there"),
        (["--port", "0", "./not-there"], "not-there"),
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", *arguments]) == 2
    assert part in capsys.readouterr().err
