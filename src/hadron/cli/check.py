"""`hadron check`: read a checkpoint's headers and say how every tensor will be used.

Prints the plan that the engine would execute. Imports no tensor library; the planner is imported
when the command runs, so that `--help` is instant.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from hadron.cli.options import plan_options
from hadron.engine.config import MOST_DRAFTS
from hadron.errors import HadronError, UsageError

if TYPE_CHECKING:
    from hadron.preflight.plan import LoadPlan, ModulePlan


class CheckCommand(click.Command):
    """Answers wrong usage in JSON where JSON was asked for."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parse the command line."""
        wants_json, given = "--json" in args, list(args)
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            if wants_json:
                _print_error_json(None, _usage_error(error, given))
            raise


def _usage_error(error: click.UsageError, given: Sequence[str]) -> UsageError:
    return UsageError(
        "the command line cannot be used",
        where="hadron check " + " ".join(given),
        found=error.format_message(),
        accepted="hadron check MODEL [OPTIONS]",
        hint="run `hadron check --help`",
    )


@click.command(
    cls=CheckCommand,
    epilog="Exit codes: 0 no errors; 1 errors found; 2 the checkpoint could not be read, or wrong usage.",
)
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as one JSON object (docs/check.md).")
@click.option(
    "--modules", "pattern", metavar="GLOB",
    help="Print every module whose checkpoint name matches, in full, instead of the summary.",
)  # fmt: skip
@click.option("--data", is_flag=True, help="Also read every byte, and name tensors with NaN or bad scales.")
@click.option(
    "--num-speculative-tokens", type=click.IntRange(0, MOST_DRAFTS), metavar="K", default=0,
    help="Plan for the multi-token-prediction layer to guess K tokens ahead.",
)  # fmt: skip
@plan_options
def command(model: str, as_json: bool, pattern: str | None, data: bool, **wishes: Any) -> int:
    """Say how every tensor of MODEL will be used, and everything that is wrong with it.

    MODEL is a folder with a checkpoint, or the name of one on the Hub; of that only headers are
    fetched. Tensor data is not read unless --data asks for it.

    \b
    Example:
      hadron check path/to/checkpoint --modules '*.layers.3.self_attn.*'
    """
    try:
        plan = _plan(model, data, **wishes)
        chosen = _chosen(plan, pattern)
    except HadronError as error:
        if as_json:
            _print_error_json(model, error)
        raise
    if as_json:
        from hadron.preflight.json_report import encode, plan_value

        _print_bytes(encode(plan_value(plan, chosen)))
    else:
        from hadron.cli import console
        from hadron.preflight import report

        console.write(report.summary(plan) if pattern is None else report.details(plan, chosen or ()))
    return 0 if plan.ok else 1


def _plan(model: str, data: bool, **wishes: Any) -> LoadPlan:
    from hadron.cli import console
    from hadron.preflight.build import make_plan

    with console.progress("reading headers", unit="files") as advance:
        plan = make_plan(model, progress=lambda _, done, total: advance(done, total), **wishes)
    return _scanned(plan) if data else plan


def _scanned(plan: LoadPlan) -> LoadPlan:
    """The plan with what is wrong with its data among its problems."""
    from dataclasses import replace

    from hadron.checkpoint.scan import scan
    from hadron.cli import console

    with console.progress("reading") as advance:
        found = scan(plan, lambda _, done, total: advance(done, total))
    return replace(plan, problems=(*plan.problems, *found))


def _chosen(plan: LoadPlan, pattern: str | None) -> tuple[ModulePlan, ...] | None:
    """The modules that were asked for; None for all of them."""
    if pattern is None:
        return None
    from hadron.preflight.report import select

    chosen = select(plan, pattern)
    if not chosen:
        raise UsageError(
            "no module has a name that matches",
            where=f"--modules {pattern}",
            found=f"{len(plan.modules):,} modules, none of that name",
            accepted="a shell pattern over checkpoint names, such as '*.layers.0.*'",
            hint=f"`--modules '*'` prints all; names start like {plan.modules[0].name}" if plan.modules
            else "the checkpoint has no modules: run without --modules for what is wrong with it",
        )  # fmt: skip
    return chosen


def _print_error_json(model: str | None, error: HadronError) -> None:
    from hadron.preflight.json_report import encode, error_value

    _print_bytes(encode(error_value(model, error)))


def _print_bytes(text: bytes) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(text)
