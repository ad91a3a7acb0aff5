"""`hadron perplexity`: how well a model predicts a text."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from hadron.cli import console
from hadron.cli.generate import Bars, load
from hadron.cli.options import GroupedCommand, engine_options, option

_WINDOWS = "The windows"


@click.command(
    cls=GroupedCommand,
    epilog="Exit codes: 0 done; 1 the checkpoint or its results have errors; 2 wrong usage or unreadable input; "
    "130 interrupted.",
)
@click.argument("model")
@click.argument("file", type=click.Path(path_type=Path))
@option(
    "--window",
    type=click.IntRange(min=1),
    default=2048,
    show_default=True,
    group=_WINDOWS,
    help="Most tokens the model reads at once.",
)
@option(
    "--stride",
    type=click.IntRange(min=1),
    group=_WINDOWS,
    help="Tokens that a window after the first predicts; fewer give each more context.  [default: --window]",
)
@option("--json", "as_json", is_flag=True, group="Output", help="Print one JSON object (docs/eval.md).")
@engine_options
def command(model: str, file: Path, window: int, stride: int | None, as_json: bool, **settings: Any) -> int:
    """Measure how well MODEL, a folder or a Hub id, predicts the text in FILE, which is UTF-8.

    \b
    Example:
      hadron perplexity path/to/checkpoint wikitext.txt --window 2048 --stride 512
    """
    from hadron.eval.perplexity import measure, read_text
    from hadron.eval.report import perplexity_lines

    text = read_text(file)
    if settings["max_model_len"] is None:
        settings["max_model_len"] = window
    llm = load(model, settings)
    with Bars() as bars:
        found = measure(
            llm, text, file=str(file), window=window, stride=stride, progress=partial(bars.report, "windows")
        )
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        console.write(perplexity_lines(found))
    return 0
