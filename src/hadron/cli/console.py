"""The terminal: coloured lines, error messages, progress bars. The only place that imports rich.

Colour: `NO_COLOR` (not empty) turns it off, `FORCE_COLOR` (not empty) on, else only terminals that
are not `dumb` get it. Progress goes to stderr and only to a terminal. rich is imported when a bar is
drawn, not before: `hadron check` must start at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic
from typing import IO, Any

import click

from hadron.errors import HadronError
from hadron.preflight.report import Line, Role

Progress = Callable[[int, int], None]

PATIENCE = 0.4

_STYLES: dict[Role, dict[str, Any]] = {
    Role.TITLE: {"bold": True},
    Role.HEAD: {"underline": True},
    Role.DETAIL: {"dim": True},
    Role.OK: {"fg": "green", "bold": True},
    Role.ERROR: {"fg": "red", "bold": True},
    Role.WARNING: {"fg": "yellow", "bold": True},
    Role.NOTE: {"fg": "cyan"},
}


def coloured(stream: IO[str]) -> bool:
    """Whether lines on `stream` get colour."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def write(lines: Iterable[Line]) -> None:
    """Print the lines of a report on stdout."""
    stream = sys.stdout
    colour = coloured(stream)
    for line in lines:
        text = printable(line.text)
        style = _STYLES.get(line.role) if colour else None
        stream.write(click.style(text, **style) if style else text)
        stream.write("\n")


def printable(text: str) -> str:
    """`text` with what a terminal would act upon, such as escape codes in a tensor's name, spelt out."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def visible(text: str) -> str:
    """As `printable`, but lines and tabs stay."""
    return "\n".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))


def write_error(error: HadronError) -> None:
    """Print the four parts of an error on stderr."""
    write_failure(str(error))


def write_failure(message: str) -> None:
    """Print `hadron: error: …` on stderr."""
    lines = [printable(line) for line in message.splitlines()]
    label = "hadron: error:"
    label = click.style(label, fg="red", bold=True) if coloured(sys.stderr) else label
    sys.stderr.write(f"{label} " + "\n".join(lines) + "\n")


@contextmanager
def progress(description: str, *, unit: str = "bytes") -> Iterator[Progress]:
    """A progress bar on stderr, fed by calling the yielded `(done, total)`; nothing off a terminal.

    unit: `bytes` shows sizes and speed; anything else counts. What ends within `PATIENCE` seconds
    gets no bar.
    """
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield _silent
        return
    with ExitStack() as stack:
        bar: Progress | None = None
        patient_until = monotonic() + PATIENCE

        def update(done: int, total: int) -> None:
            nonlocal bar
            if bar is None and monotonic() >= patient_until:
                bar = stack.enter_context(_bar(description, unit))
            if bar is not None:
                bar(done, total)

        yield update


@contextmanager
def _bar(description: str, unit: str) -> Iterator[Progress]:
    from rich import progress as bars
    from rich.console import Console

    figures: tuple[bars.ProgressColumn, ...] = (bars.MofNCompleteColumn(), bars.TextColumn(unit))
    if unit == "bytes":
        figures = (bars.DownloadColumn(), bars.TransferSpeedColumn())
    screen = Console(stderr=True, no_color=not coloured(sys.stderr))
    columns = (bars.TextColumn("{task.description}", markup=False), bars.BarColumn(), *figures)
    with bars.Progress(*columns, bars.TimeRemainingColumn(), console=screen, transient=True) as shown:
        task = shown.add_task(printable(description), total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


def _silent(done: int, total: int) -> None:
    """Off a terminal there is nothing to show."""
