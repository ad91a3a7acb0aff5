"""`hadron bench serve`: its JSON, its table, and what becomes of wrong usage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hadron.cli import main
from tests.bench.endpoint import endpoint, status, talk

REPORT = {
    "base_url", "endpoint", "model", "hadron", "python", "seconds", "sent", "answered", "failed", "most_at_once",
    "late_ms", "input_tokens", "output_tokens", "tokens_by", "requests_per_second", "input_tokens_per_second",
    "output_tokens_per_second", "ttft_ms", "itl_ms", "tpot_ms", "e2el_ms", "goodput", "failures",
}  # fmt: skip


async def answers(number: int, body: Any, send: Any) -> None:
    await talk(send, 0.01, 0.01)


def test_json_is_what_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    with endpoint(answers) as made:
        options = ["--num-prompts", "3", "--input-len", "4", "--ignore-eos", "--goodput", "ttft:5000,itl:4000.5"]
        code = main.run(["bench", "serve", "--base-url", made.url.removesuffix("/v1") + "/", "--json", *options])
        found = json.loads(capsys.readouterr().out)
        assert code == 0 and set(found) == REPORT
        assert set(found["ttft_ms"]) == {"mean", "p50", "p90", "p95", "p99", "max"}
        assert found["goodput"]["bounds"] == {"ttft": 5000, "itl": 4000.5} and found["goodput"]["fraction"] == 1
        assert [body["ignore_eos"] for body in made.bodies] == [True] * 4  # one to warm up
        assert {len(body["prompt"].split(" ")) for body in made.bodies} == {4}


def test_the_table_shows_latencies_throughput_and_failures(capsys: pytest.CaptureFixture[str]) -> None:
    async def behave(number: int, body: Any, send: Any) -> None:
        await (send(status(500, {"error": {"message": "oops"}})) if number == 2 else answers(number, body, send))

    with endpoint(behave) as made:
        assert main.run(["bench", "serve", "--base-url", made.url, "--num-prompts", "3", "--goodput", "e2el:9000"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""  # progress is for terminals
    assert "3 requests in " in shown.out and "2 answered, 1 failed" in shown.out and "  1 HTTP 500: oops" in shown.out
    assert [line.split()[0] for line in shown.out.splitlines() if line[:6] in ("reques", "input ", "output")] == [
        "requests", "input", "output",
    ]  # fmt: skip
    assert "time to first token" in shown.out and "67% of what was sent within e2el 9000 ms" in shown.out


def test_a_file_of_prompts_is_sent_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    with endpoint(answers) as made:
        options = ["--dataset", str(path), "--num-warmups", "0", "--json"]
        assert main.run(["bench", "serve", "--base-url", made.url, *options]) == 0
        assert [body["prompt"] for body in made.bodies] == ["one", "two"]


def test_nothing_answered_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    async def behave(number: int, body: Any, send: Any) -> None:
        await send(status(429, {"error": {"message": "full"}}))

    with endpoint(behave) as made:
        assert main.run(["bench", "serve", "--base-url", made.url, "--num-prompts", "2", "--num-warmups", "0"]) == 1
    assert "  2 HTTP 429: full" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--request-rate", "2", "--max-concurrency", "3"], "where:    --request-rate and --max-concurrency"),
        (["--input-len", "many"], "where:    --input-len\n  found:    'many'"),
        (["--output-len", "uniform:9:2"], "where:    --output-len"),
        (["--prompt-ids", "9-2"], "where:    --prompt-ids\n  found:    '9-2'"),
        (["--prompt-ids", "1-2", "--endpoint", "chat"], "found:    --endpoint chat"),
        (["--goodput", "ttft:5,speed:2"], "where:    --goodput\n  found:    'speed:2'"),
        (["--goodput", "ttft:-5"], "found:    'ttft:-5'"),
        (["--extra-body", "[1]"], "where:    --extra-body\n  found:    '[1]'"),
        (["--base-url", "localhost:8000"], "where:    --base-url\n  found:    'localhost:8000'"),
        (["--dataset", "no/such/file"], "where:    --dataset"),
        (["--base-url", "http://127.0.0.1:9/v1"], "the server cannot be measured"),
    ],
)
def test_wrong_usage_is_refused_with_what_would_do(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["bench", "serve", *options]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and shown.out == ""


def test_it_loads_no_tensor_library() -> None:
    code = (
        "import sys, hadron.cli.bench, hadron.bench.serve.run, hadron.bench.serve.report; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
