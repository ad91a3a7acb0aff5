"""Write docs/cli.md from the `--help` of every command; with `--check`, fail when it is out of date."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path

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
        context = command.make_context(name, [], parent=top, resilient_parsing=True, terminal_width=100)
        parts.append(_section(f"hadron {name}", command.get_help(context)))
    return "\n".join(parts)


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
