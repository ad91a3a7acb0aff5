"""`hadron generate`: what it prints, where, and its exit codes."""

from __future__ import annotations

import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hadron import LLM, SamplingParams
from hadron.cli import console, generate
from hadron.cli.generate import SHIPPED, SHIPPED_NOTE
from hadron.cli.main import run
from tests.conftest import DATA, RANDOM

RUN = ["--kernels", "reference", "--dtype", "float32", "--threads", "1", "--temperature", "0", "--max-tokens", "6"]
BARE = str(DATA / "glm52-ct-w4a16")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(RANDOM, kernels="reference", dtype="float32", threads=1)


def expected(llm: LLM, prompt: Any, **params: Any) -> Any:
    return llm.generate(prompt, SamplingParams(**({"max_tokens": 6, "temperature": 0} | params)))[0]


def test_the_shipped_model_is_the_default_and_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "--prompt", "The river", *RUN]) == 0
    shown = capsys.readouterr()
    shipped = LLM(SHIPPED, kernels="reference", dtype="float32", threads=1)
    assert shown.out == expected(shipped, "The river").outputs[0].text + "\n"
    assert shown.err == SHIPPED_NOTE + "\n"
    assert "docs/models.md" in SHIPPED_NOTE and (DATA.parents[1] / "docs" / "models.md").exists()


@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["text", "json"])
def test_the_chat_template_makes_a_turn_of_the_text(
    llm: LLM, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", str(RANDOM), "--prompt", "The river", "--apply-chat-template", *flags, *RUN]) == 0
    (wanted,) = llm.chat([{"role": "user", "content": "The river"}], SamplingParams(max_tokens=6, temperature=0))
    assert wanted.prompt_token_ids != expected(llm, "The river").prompt_token_ids
    shown = capsys.readouterr().out
    if flags:
        (output,) = json.loads(shown)["outputs"]
        assert output["prompt_token_ids"] == wanted.prompt_token_ids
        assert output["text"] == wanted.outputs[0].text
    else:
        assert shown == f"{wanted.outputs[0].text}\n"


def test_the_chat_template_takes_no_ids(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", str(RANDOM), "--prompt-ids", "5,9", "--apply-chat-template", *RUN]) == 2
    told = capsys.readouterr().err
    assert "the chat template takes text" in told and "found:    --prompt-ids" in told


def test_without_a_tokenizer_ids_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", BARE, "--prompt-ids", "5,9, 2", *RUN]) == 0
    ids = LLM(BARE, kernels="reference", dtype="float32").generate(
        {"prompt_token_ids": [5, 9, 2]}, SamplingParams(max_tokens=6, temperature=0)
    )
    shown = capsys.readouterr()
    assert [int(word) for word in shown.out.split()] == ids[0].outputs[0].token_ids
    assert shown.err == ""


def test_json_has_the_documented_keys(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", str(RANDOM), "--prompt", "The river", "--json", *RUN]) == 0
    out = expected(llm, "The river")
    assert json.loads(capsys.readouterr().out) == {
        "outputs": [
            {
                "prompt_token_ids": out.prompt_token_ids,
                "token_ids": out.outputs[0].token_ids,
                "text": out.outputs[0].text,
                "finish_reason": "length",
                "logprobs": None,
            }
        ]
    }


def test_an_error_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", str(RANDOM), "--prompt", "a", "--json", "--top-p", "7"]) == 2
    shown = capsys.readouterr()
    error = json.loads(shown.out)["error"]
    assert (error["where"], error["found"]) == ("top_p", "7.0") and error["accepted"] and error["hint"]
    assert error["what"] in shown.err


def test_json_without_a_tokenizer_has_null_for_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", BARE, "--prompt-ids", "5", "--json", "--logprobs", "1", *RUN]) == 0
    (output,) = json.loads(capsys.readouterr().out)["outputs"]
    assert output["text"] is None
    assert output["logprobs"][0]["text"] is None


def test_several_continuations(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = ["--n", "2", "--temperature", "1.5", "--seed", "3", "--logprobs", "0", "--prompt-logprobs", "1"]
    out = expected(llm, "The river", n=2, temperature=1.5, seed=3, prompt_logprobs=1)
    texts = [completion.text for completion in out.outputs]
    assert texts[0] != texts[1]
    assert run(["generate", str(RANDOM), "--prompt", "The river", "--json", *RUN, *drawn]) == 0
    values = json.loads(capsys.readouterr().out)["outputs"]
    assert [value["text"] for value in values] == texts
    assert values[0]["prompt_logprobs"][0] is None
    row = out.prompt_logprobs[1][out.prompt_token_ids[1]]
    assert values[1]["prompt_logprobs"][1]["logprob"] == row.logprob
    assert run(["generate", str(RANDOM), "--prompt", "The river", *RUN, *drawn]) == 0
    lines = capsys.readouterr().out
    assert lines.startswith(f"[0] {texts[0]}\n") and f"\n[1] {texts[1]}\n" in lines
    assert lines.splitlines()[-1].startswith(f"{out.prompt_token_ids[-1]} ")


def test_biases_of_logits(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", BARE, "--prompt-ids", "5", *RUN]
    assert run([*arguments, "--logit-bias", "7=100,9=-2.5"]) == 0
    assert set(capsys.readouterr().out.split()) == {"7"}
    assert run([*arguments, "--logit-bias", "7:100"]) == 2
    shown = capsys.readouterr().err
    assert "--logit-bias" in shown and "7:100" in shown and "5=-1.5,9=2" in shown


def test_structured_outputs(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", str(RANDOM), "--prompt", "a", *RUN, "--structured-outputs"]
    assert run([*arguments, '{"choice": ["no"]}']) == 0
    assert capsys.readouterr().out == "no\n"
    for text in ("{", '["no"]'):
        assert run([*arguments, text]) == 2
        shown = capsys.readouterr().err
        assert "--structured-outputs" in shown and text in shown


def test_logprobs_in_json_and_in_text(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    row = expected(llm, "The river", logprobs=2).outputs[0].logprobs[0]
    assert run(["generate", str(RANDOM), "--prompt", "The river", "--logprobs", "2", "--json", *RUN]) == 0
    first = json.loads(capsys.readouterr().out)["outputs"][0]["logprobs"][0]
    assert first["token_id"] == first["top"][0]["token_id"] == next(iter(row))
    assert [entry["logprob"] for entry in first["top"]] == [entry.logprob for entry in row.values()]
    assert [entry["rank"] for entry in first["top"]] == [1, 2]
    assert run(["generate", str(RANDOM), "--prompt", "The river", "--logprobs", "2", *RUN]) == 0
    lines = capsys.readouterr().out.splitlines()[-6:]
    token, entry = next(iter(row.items()))
    assert lines[0].startswith(f"{token} {json.dumps(entry.decoded_token, ensure_ascii=False)} {entry.logprob:.4f}  ")


@pytest.mark.parametrize("arguments", [["-"], [str(RANDOM), "-"]])
def test_a_dash_reads_standard_input(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO("Вчера\n".encode())))
    assert run(["generate", *arguments, "--json", *RUN]) == 0
    (output,) = json.loads(capsys.readouterr().out)["outputs"]
    asked = llm if str(RANDOM) in arguments else LLM(SHIPPED, kernels="reference", dtype="float32", threads=1)
    assert output["prompt_token_ids"] == asked.tokenizer.encode("Вчера")
    assert output["text"] == expected(asked, "Вчера").outputs[0].text


def test_input_that_is_no_text_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"ab\xff")))
    assert run(["generate", "-"]) == 2
    assert "byte 2" in capsys.readouterr().err


def test_stop_flags_reach_the_request(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = expected(llm, "The river").outputs[0].token_ids
    flags = ["--stop-token-ids", f"{tokens[2]},3", "--json"]
    assert run(["generate", str(RANDOM), "--prompt", "The river", *flags, *RUN]) == 0
    (output,) = json.loads(capsys.readouterr().out)["outputs"]
    assert (output["token_ids"], output["finish_reason"]) == (tokens[: tokens.index(tokens[2]) + 1], "stop")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "found:    none"),
        (["--prompt", "a", "--prompt-ids", "1"], "found:    --prompt and --prompt-ids"),
        ([str(RANDOM), "-", "--prompt", "a"], "found:    --prompt and '-'"),
        ([str(RANDOM), "what"], "found:    'what'"),
        (["--prompt-ids", "1,x"], "found:    '1,x'"),
        (["--prompt", "a", "--stop-token-ids", "b"], "where:    --stop-token-ids"),
        (["--prompt", "a", "--temperature", "-1"], "where:    temperature"),
        (["--prompt", "a", "--max-tokens", "0"], "where:    max_tokens"),
        ([str(RANDOM), "--prompt-ids", "512"], "accepted: an integer from 0 to 511"),
        (["--prompt", "a", "--threads", "0"], "where:    --threads"),
        (["--prompt", "a", "--dtype", "int3"], "--dtype"),
        ([BARE, "--prompt", "a"], "has no tokenizer"),
        (["./not-there", "--prompt", "a"], "not-there"),
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", *arguments]) == 2
    shown = capsys.readouterr()
    assert part in shown.err
    assert shown.out == ""


def test_a_plan_with_errors_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(shutil.copytree(RANDOM, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["OtherForCausalLM"]}))
    assert run(["generate", str(folder), "--prompt", "a"]) == 1
    assert "HC202" in capsys.readouterr().err


def test_help_groups_options_and_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "--help"]) == 0
    shown = capsys.readouterr().out
    headings = ["The prompt:", "How to continue:", "How to run it:", "Output:", "Exit codes:"]
    places = [shown.index(heading) for heading in headings]
    assert places == sorted(places)
    assert "hadron generate path/to/checkpoint --prompt" in shown


def test_escape_codes_do_not_reach_a_terminal() -> None:
    assert console.visible("a\x1b[2Jb\n\tc\r\x00é😀") == "a\\x1b[2Jb\n\tc\\r\\x00é😀"


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def test_text_streams_on_a_terminal() -> None:
    """In a pseudo-terminal the first piece comes before the last token; an interrupt ends it cleanly."""
    reader, writer = pty.openpty()
    arguments = ["generate", str(RANDOM), "--prompt", "a", "--ignore-eos", "--max-tokens", "4000", "--seed", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "hadron", *arguments], stdout=writer, stderr=subprocess.PIPE, env=environment()
    )
    os.close(writer)
    assert os.read(reader, 100)
    time.sleep(0.2)
    assert process.poll() is None, "it was done before its first piece was read"
    process.send_signal(signal.SIGINT)
    output = bytearray()
    while True:
        try:
            piece = os.read(reader, 4096)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        output += piece
    assert process.wait(timeout=30) == 130
    assert output.endswith(b"\n")
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    os.close(reader)


def test_a_reader_that_goes_away_is_no_error() -> None:
    arguments = ["generate", str(RANDOM), "--prompt", "a", "--ignore-eos", "--max-tokens", "3000", "--seed", "1"]
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "hadron", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=30) == 141
    process.stderr.close()


class Bar:
    """Stands in for a progress bar."""

    opened: list[tuple[str, str]] = []  # noqa: RUF012

    def __init__(self, description: str, *, unit: str = "bytes") -> None:
        Bar.opened.append((description, unit))

    def __enter__(self) -> Any:
        return lambda done, total: Bar.opened.append((str(done), str(total)))

    def __exit__(self, *_: object) -> None:
        Bar.opened.append(("closed", ""))


def test_bars_follow_what_is_being_done(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(generate.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(console, "progress", Bar)
    Bar.opened = []
    with generate.Bars() as bars:
        bars.report("headers", 1, 3)
        bars.report("headers", 3, 3)
        bars.report("download", 10, 90)
    assert Bar.opened == [
        ("headers", "shards"), ("1", "3"), ("3", "3"), ("closed", ""),
        ("download", "bytes"), ("10", "90"), ("closed", ""),
    ]  # fmt: skip


def test_what_is_done_at_once_gets_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate.time, "monotonic", lambda: 0.0)
    monkeypatch.setattr(console, "progress", Bar)
    Bar.opened = []
    with generate.Bars() as bars:
        bars.report("map", 1, 2)
        bars.report("map", 2, 2)
    assert Bar.opened == []
