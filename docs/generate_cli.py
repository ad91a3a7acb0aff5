"""Write docs/cli.md from the `--help` of every command; with `--check`, fail when it is out of date."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path

import click

from hadron.cli.main import COMMANDS, cli

TARGET = Path(__file__).with_name("cli.md")
INTRODUCTION = """\
# Commands

The output of every `--help`, written by `python docs/generate_cli.py`.
"""


def text() -> str:
    """The whole file."""
    top = cli.make_context("hadron", [], resilient_parsing=True, terminal_width=100)
    parts = [INTRODUCTION, _section("hadron", cli.get_help(top))]
    for name in COMMANDS:
        command = cli.get_command(top, name)
        if command is None:
            raise LookupError(name)
        parts += _sections(f"hadron {name}", command, top)
    return "\n".join(parts)


def _sections(title: str, command: click.Command, parent: click.Context) -> list[str]:
    """The help of a command and, of a group, of each of its commands."""
    context = command.make_context(title.split()[-1], [], parent=parent, resilient_parsing=True, terminal_width=100)
    parts = [_section(title, command.get_help(context))]
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            part = command.get_command(context, name)
            if part is not None:
                parts += _sections(f"{title} {name}", part, context)
    return parts


def _section(title: str, help_text: str) -> str:
    return f"## {title}\n\n```\n{help_text.rstrip()}\n```\n"


def main() -> int:
    """Write the file, or compare it."""
    wanted = text()
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(wanted)
        return 0
    there = TARGET.read_text() if TARGET.exists() else ""
    difference = difflib.unified_diff(there.splitlines(), wanted.splitlines(), "docs/cli.md", "--help", lineterm="")
    sys.stdout.writelines(f"{line}\n" for line in difference)
    return 0 if there == wanted else 1


if __name__ == "__main__":
    sys.exit(main())
