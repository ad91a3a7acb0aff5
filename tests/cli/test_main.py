"""The program's frame: lazy commands, exit codes, what becomes of errors."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import click
import pytest

from hadron.cli import main as program
from hadron.errors import NumericsError, PlanError, UsageError
from hadron.problems import problem

FOUR = {"where": "here", "found": "this", "accepted": "that", "hint": "do so"}


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.fixture
def fails_with(monkeypatch: pytest.MonkeyPatch):
    """Adds a command `fake` that raises what it is given, or returns it."""

    def install(outcome: object) -> None:
        @click.command()
        def command() -> object:
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        module = ModuleType("fake_command")
        module.command = command  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "fake_command", module)
        monkeypatch.setitem(program.COMMANDS, "fake", ("fake_command", "Fail."))

    return install


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.run(["--help"]) == 0
    out = capsys.readouterr().out
    for name, (_, summary) in program.COMMANDS.items():
        assert f"  {name}" in out
        assert summary in out
    assert "Exit codes" in out


def test_help_imports_no_command() -> None:
    done = python(
        "import sys\nfrom hadron.cli.main import run\nrun(['--help'])\n"
        "print(sorted(m for m in sys.modules if m.startswith('hadron.')))"
    )
    assert done.stdout.splitlines()[-1] == "['hadron.cli', 'hadron.cli.main', 'hadron.errors']"


def test_version_is_the_distributions(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.run(["--version"]) == 0
    assert capsys.readouterr().out == f"hadron {version('hadron-llm')}\n"


def test_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "hadron", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("hadron ")


@pytest.mark.parametrize("arguments", [["nothing"], ["--nothing"], ["check"], ["check", "a", "b"]])
def test_wrong_usage_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert program.run(arguments) == 2
    assert capsys.readouterr().err.startswith("Usage: hadron")


def test_an_error_is_told_in_four_parts(fails_with, capsys: pytest.CaptureFixture[str]) -> None:
    fails_with(UsageError("it failed", **FOUR))
    assert program.run(["fake"]) == 2
    assert capsys.readouterr().err == (
        "hadron: error: it failed\n  where:    here\n  found:    this\n  accepted: that\n  try:      do so\n"
    )


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (None, 0),
        (0, 0),
        (1, 1),
        (PlanError("m", [problem("HC301", "x", found="a", accepted="b", hint="c")]), 1),
        (NumericsError("nan", **FOUR), 1),
        (KeyboardInterrupt(), 130),
        (click.Abort(), 130),
        (click.UsageError("odd"), 2),
        (BrokenPipeError(), 141),
    ],
)
def test_exit_codes(outcome: object, code: int, fails_with, capfd: pytest.CaptureFixture[str]) -> None:
    fails_with(outcome)
    saved = sys.stdout
    assert program.run(["fake"]) == code
    assert sys.stdout is saved
    assert "Traceback" not in capfd.readouterr().err


def test_a_bug_keeps_its_traceback_and_asks_for_a_report(fails_with, capsys: pytest.CaptureFixture[str]) -> None:
    fails_with(ZeroDivisionError("oops"))
    assert program.run(["fake"]) == 70
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last):")
    assert "ZeroDivisionError: oops" in err
    assert err.splitlines()[-1] == "hadron: this is a bug; please report it with the output of `hadron env`"


def test_closed_output_is_quiet() -> None:
    """`hadron … >&-`: nobody reads."""
    command = f"{sys.executable} -m hadron --version >&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_pipe_is_quiet() -> None:
    """`hadron … | head -1`: no traceback, no complaint at interpreter exit."""
    code = (
        "import sys, types, click\n"
        "from hadron.cli import main\n"
        "@click.command()\n"
        "def command():\n"
        "    for _ in range(100_000): sys.stdout.write('x' * 100 + '\\n')\n"
        "sys.modules['fake'] = module = types.ModuleType('fake')\n"
        "module.command = command\n"
        "main.COMMANDS['fake'] = ('fake', 'f')\n"
        "sys.argv = ['hadron', 'fake']\n"
        "main.main()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.read(10) == b"x" * 10
        running.stdout.close()
        assert running.stderr.read() == b""
        assert running.wait(60) == 141


def test_a_full_disk_is_not_a_bug() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "hadron", "--help"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2
    assert done.stderr == "hadron: error: the output could not be written: No space left on device\n"


def test_a_terminal_that_cannot_show_a_character_gets_an_escape(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hadron", "check", str(tmp_path / "größe")],
        capture_output=True, check=False, env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 2
    assert b"gr\\xf6\\xdfe" in done.stderr
    assert b"Traceback" not in done.stderr
