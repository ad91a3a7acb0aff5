"""Colour, escape codes and progress bars: when, and when not."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys

import pytest

from hadron.cli import console
from hadron.errors import UsageError
from hadron.preflight.report import Line, Role


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.parametrize(
    ("terminal", "environment", "coloured"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),
        (False, {"FORCE_COLOR": "1"}, True),
        (False, {"FORCE_COLOR": ""}, False),
        (True, {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
    ],
)
def test_colour(terminal: bool, environment: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert console.coloured(Terminal() if terminal else io.StringIO()) is coloured


def test_lines_off_a_terminal_are_plain(capsys: pytest.CaptureFixture[str]) -> None:
    console.write([Line("title", Role.TITLE), Line("bad", Role.ERROR), Line("")])
    assert capsys.readouterr().out == "title\nbad\n\n"


def test_roles_become_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    console.write([Line("bad", Role.ERROR), Line("plain")])
    bad, plain = screen.getvalue().splitlines()
    assert bad == "\x1b[31m\x1b[1mbad\x1b[0m"
    assert plain == "plain"


def test_a_name_cannot_act_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    console.write([Line("model\x1b[2J.w\r\u202e"), Line("größe 長さ")])
    assert capsys.readouterr().out == "model\\x1b[2J.w\\r\\u202e\ngröße 長さ\n"
    console.write_error(UsageError("a\x1b]0;title\x07", where="w", found="f", accepted="a", hint="h"))
    assert capsys.readouterr().err.splitlines()[0] == "hadron: error: a\\x1b]0;title\\x07"


def test_no_progress_off_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with console.progress("reading") as advance:
        advance(1, 2)
        advance(2, 2)
    assert capfd.readouterr() == ("", "")


_PROGRESS = """
import sys
from hadron.cli import console
console.PATIENCE = float(sys.argv[1])
with console.progress("reading [x]") as advance:
    for i in range(5):
        advance(i, 4)
print("rich" in sys.modules)
"""


def on_a_terminal(patience: str) -> tuple[str, str]:
    """stdout, and what the terminal on stderr got."""
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", _PROGRESS, patience], stdout=subprocess.PIPE, stderr=theirs, text=True, check=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )  # fmt: skip
    os.close(theirs)
    drawn = b""
    try:
        while chunk := os.read(ours, 65536):
            drawn += chunk
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    return done.stdout, drawn.decode()


def test_a_bar_is_drawn_on_stderr_only() -> None:
    out, drawn = on_a_terminal("0")
    assert out == "True\n"
    assert "reading [x]" in drawn


def test_what_ends_soon_gets_no_bar_and_imports_no_rich() -> None:
    assert on_a_terminal("60") == ("False\n", "")
