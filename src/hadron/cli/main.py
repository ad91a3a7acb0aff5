"""`hadron`: the commands, and what becomes of an error.

A command's module is imported when that command runs, so that none pays for another. Exit codes:
0 done, 1 the checkpoint or the result has errors, 2 wrong usage or unreadable input, 70 a bug of
ours, 130 interrupted, 141 the reader of our output went away.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import cast

import click

from hadron.errors import HadronError

#: command -> (module that holds `command`, what `hadron --help` says of it)
COMMANDS = {
    "check": ("hadron.cli.check", "Say how every tensor of a checkpoint will be used."),
    "generate": ("hadron.cli.generate", "Continue a prompt."),
    "chat": ("hadron.cli.chat", "Talk with a model in the terminal."),
    "serve": ("hadron.cli.serve", "Serve a model to OpenAI's and Anthropic's clients."),
    "eval": ("hadron.cli.eval", "Evaluate a model on tasks of lm-eval."),
    "perplexity": ("hadron.cli.perplexity", "Measure how well a model predicts a text."),
    "bench": ("hadron.cli.bench", "Measure kernels and models on this machine, or a server."),
    "env": ("hadron.cli.env", "Print versions, processor and memory, for bug reports."),
}

EXIT_UNREADABLE = 2
EXIT_BUG = 70
EXIT_INTERRUPTED = 130
EXIT_PIPE = 141

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


class Commands(click.Group):
    """A group that imports a command only to run it or to print its own help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of `COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, imported now."""
        if cmd_name not in COMMANDS:
            return None
        return cast(click.Command, vars(importlib.import_module(COMMANDS[cmd_name][0]))["command"])

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, from the table instead of from their modules."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        click.echo(f"hadron {version('hadron-llm')}")
        ctx.exit()


@click.group(
    cls=Commands,
    context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done; 1 the checkpoint has errors; 2 wrong usage or unreadable input.",
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version,
    help="Print the version and exit.",
)  # fmt: skip
def cli() -> None:
    """Run quantized GLM-5-family checkpoints as they were published."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    try:
        # not `cli.main`, which would answer a closed pipe with exit code 1: "the checkpoint has errors"
        with cli.make_context("hadron", list(sys.argv[1:] if arguments is None else arguments)) as context:
            code = cli.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as done:  # `--help` and `--version`
        code = done.exit_code
    except BrokenPipeError:
        _drop_output()
        return EXIT_PIPE
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except HadronError as error:
        from hadron.cli import console

        console.write_error(error)
        return error.exit_code
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None and error.errno in _NO_SPACE:
            _drop_output()
            sys.stderr.write(f"hadron: error: the output could not be written: {error.strerror}\n")
            return EXIT_UNREADABLE
        import traceback

        traceback.print_exc()
        sys.stderr.write("hadron: this is a bug; please report it with the output of `hadron env`\n")
        return EXIT_BUG
    return code if isinstance(code, int) else 0


def _drop_output() -> None:
    """Nobody takes our output: let nothing be flushed to it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    """The `hadron` program."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # started with it closed: nobody reads
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal that is not UTF-8 gets escapes, not a traceback
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run())
