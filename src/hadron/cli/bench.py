"""`hadron bench`: how fast kernels and models run here, beside what this machine can do at most.

The limits are measured in the same run. Nothing is compared with a figure from elsewhere.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from hadron.errors import UsageError

if TYPE_CHECKING:
    from hadron.bench.report import KernelReport


@click.group(name="bench", epilog="Exit codes: 0 done; 2 wrong usage or unreadable input.")
def command() -> None:
    """Measure kernels and models on this machine.

    \b
    Example:
      hadron bench kernels --op linear --scheme mxfp4 --m 1,8,512
    """


def _numbers(text: str | None, flag: str) -> tuple[int, ...] | None:
    """`1,4k,512` -> (1, 4096, 512)."""
    if text is None:
        return None
    try:
        values = tuple(int(w[:-1]) * 1024 if w[-1:] in ("k", "K") else int(w) for w in text.split(","))
    except ValueError:
        values = ()
    if not values or min(values) < 1:
        raise UsageError(
            "a list of numbers cannot be read",
            where=flag,
            found=repr(text)[:80],
            accepted="whole numbers above 0 with commas between them, such as 1,8,512; 4k is 4096",
            hint="see `hadron bench --help`",
        )
    return values


def _words(text: str | None, flag: str, accepted: tuple[str, ...]) -> tuple[str, ...] | None:
    if text is None:
        return None
    words = tuple(text.split(","))
    unknown = [word for word in words if word not in accepted]
    if unknown:
        raise UsageError(
            "a benchmark does not know this name",
            where=flag,
            found=repr(unknown[0])[:80],
            accepted=", ".join(accepted),
            hint="give several with commas between them",
        )
    return words


def _print_json(value: Any) -> None:
    import msgspec

    text = msgspec.json.format(msgspec.json.encode(value), indent=2)
    sys.stdout.flush()
    sys.stdout.buffer.write(text + b"\n")


@command.command()
@click.option("--op", help="Operations, with commas between them.  [default: linear,moe]")
@click.option("--scheme", help="Schemes by the names that `check` prints, with commas between them.")
@click.option("--m", help="Numbers of tokens, such as 1,8,512.")
@click.option("--n", type=click.IntRange(min=1), help="Rows of the weight; mlp and moe: the inner width.")
@click.option("--k", type=click.IntRange(min=1), help="Columns of the weight; mlp and moe: the hidden width.")
@click.option("--experts", type=click.IntRange(min=1), default=64, show_default=True, help="Experts of moe.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads to compute with.  [default: torch's choice]")
@click.option("--isa", help="Level of instructions (docs/native.md).  [default: the widest]")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="How often each is measured.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (docs/bench.md).")
def kernels(
    op: str | None, scheme: str | None, m: str | None, n: int | None, k: int | None, experts: int,
    threads: int | None, isa: str | None, rounds: int, as_json: bool,
) -> int:  # fmt: skip
    """Time single operations on random weights that lie in no cache.

    Without options: products by 4096 x 12288 and 12288 x 4096 and a layer of 64 experts, in the common
    schemes, in about a minute.

    \b
    Example:
      hadron bench kernels --op linear --scheme mxfp4,bf16 --m 1 --n 2048 --k 6144
    """
    from hadron.bench import report, run
    from hadron.cli import console

    if (n is None) != (k is None):
        raise UsageError(
            "one side of a shape is missing",
            where="--n and --k",
            found="--n without --k" if k is None else "--k without --n",
            accepted="both, or neither for the usual shapes",
            hint="give both",
        )
    asked = run.Asked(
        ops=_words(op, "--op", run.OPS) or run.DEFAULT_OPS,
        schemes=run.scheme_names(scheme),
        ms=_numbers(m, "--m"),
        shape=None if n is None or k is None else (n, k),
        experts=experts,
        threads=threads,
        isa=isa,
        rounds=rounds,
    )
    with console.progress("measuring", unit="measurements") as advance:
        result: KernelReport = run.kernels(asked, advance)
    if as_json:
        _print_json(result)
    else:
        console.write(report.lines(result))
    return 0
