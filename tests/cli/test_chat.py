"""`hadron chat`: answers, commands, interrupts."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hadron import LLM, SamplingParams
from hadron.cli.main import run
from tests.conftest import DATA, RANDOM

QUICK = ["--threads", "1", "--temperature", "0", "--max-tokens", "6", "--no-enable-thinking"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(RANDOM, threads=1)


def talk(monkeypatch: pytest.MonkeyPatch, text: str, *options: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    named = [str(RANDOM)] if not options or options[0].startswith("-") else []
    return run(["chat", *named, *QUICK, *options])


def expected(llm: LLM, *messages: Any, **switches: Any) -> str:
    given = [{"role": role, "content": content} for role, content in messages]
    params = SamplingParams(max_tokens=6, temperature=0)
    (out,) = llm.chat(given, params, chat_template_kwargs={"enable_thinking": False, **switches})
    return out.outputs[0].text


def test_it_answers_and_remembers(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, "The river\n\nAnd then?\n/reset\nAnd then?\n/exit\nnever\n", "--system", "Be brief.") == 0
    start = ("system", "Be brief.")
    one = expected(llm, start, ("user", "The river")).lstrip()
    two = expected(llm, start, ("user", "The river"), ("assistant", one), ("user", "And then?")).lstrip()
    three = expected(llm, start, ("user", "And then?")).lstrip()
    assert two != three
    shown = capsys.readouterr()
    assert shown.out == f"{one}\n{two}\n{three}\n"
    assert "a new conversation" in shown.err and shown.err.count("(no room for more)") == 3


def test_thoughts_are_shown_apart(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--enable-thinking", "--thinking-budget", "3"]
    assert talk(monkeypatch, "a\n", *options) == 0
    plain = capsys.readouterr().out
    assert plain.startswith("[") and "]\n\n" in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert talk(monkeypatch, "a\n", *options) == 0
    dimmed = capsys.readouterr().out
    assert dimmed.startswith("\x1b[2m") and "\n\n" in dimmed and "[" not in dimmed.replace("\x1b[", "")


def test_a_line_may_go_on(llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert talk(monkeypatch, "one\\\ntwo\n") == 0
    assert expected(llm, ("user", "one\ntwo")).strip() in capsys.readouterr().out


def test_a_conversation_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there, new = tmp_path / "there", tmp_path / "new"
    there.write_text("mine")
    lines = f"a\n/save {new}\nb\n/save {new}\n/save {there}\n/save\n/save {tmp_path}/no/where\n/what\n/help\n"
    assert talk(monkeypatch, lines) == 0
    saved = json.loads(new.read_text())["messages"]
    assert [message["role"] for message in saved] == ["user", "assistant"] * 2
    assert there.read_text() == "mine"
    said = capsys.readouterr().err
    for part in (
        f"saved 2 messages to {new}",
        "is there already",
        "name a file",
        "cannot be written",
        "/what is not known",
        "/reset",
    ):
        assert part in said


def test_what_does_not_fit_is_said_and_forgotten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, "word " * 200 + "\nok\n", "--max-model-len", "128") == 0
    shown = capsys.readouterr()
    assert "the context is too small" in shown.err and "at most 128" in shown.err
    assert shown.out.count("\n") >= 1


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--top-p", "7"], "top_p"),
        (["--thinking-budget", "-1"], "thinking_budget"),
        (["--threads", "0"], "--threads"),
        ([str(DATA / "glm52-ct-w4a16")], "no tokenizer.json"),
        (["./not-there"], "not-there"),
    ],
)
def test_wrong_usage_exits_with_2(
    options: list[str], part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, "a\n", *options) == 2
    assert part in capsys.readouterr().err


def test_ctrl_c_stops_an_answer_and_not_the_program() -> None:
    main, terminal = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "hadron",
        "chat",
        str(RANDOM),
        "--threads",
        "1",
        "--temperature",
        "0",
        "--max-tokens",
        "3900",
    ]
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True)
    os.close(terminal)
    seen = b""

    def read_until(wanted: bytes) -> None:
        nonlocal seen
        end = time.monotonic() + 60
        while wanted not in seen:
            ready = select.select([main], [], [], max(0, end - time.monotonic()))[0]
            assert ready, f"{wanted!r} did not come after {seen[-2000:]!r}"
            seen += os.read(main, 4096)
        seen = seen.partition(wanted)[2]

    try:
        read_until(b"> ")
        os.write(main, b"x")  # its echo shows that the prompt is being read, so that the signal ends the reading
        read_until(b"x")
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        read_until(b"Ctrl-D leaves")
        os.write(main, b"Hello\n")
        read_until(b"Hello")
        read_until(b"a")
        process.send_signal(signal.SIGINT)
        read_until(b"(stopped)")
        read_until(b"> ")
        os.write(main, b"/exit\n")
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(main)
