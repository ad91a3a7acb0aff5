"""`hadron bench`: how fast kernels and models run here, beside what this machine can do at most; and servers.

The limits are measured in the same run. Nothing is compared with a figure from elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hadron.cli.bench_serve import serve
from hadron.cli.generate import SHIPPED
from hadron.cli.options import NUMA, NUMA_HELP
from hadron.errors import UsageError

if TYPE_CHECKING:
    from hadron.bench.report import KernelReport

F = TypeVar("F", bound=Callable[..., Any])


@click.group(name="bench", epilog="Exit codes: 0 done; 2 wrong usage or unreadable input.")
def command() -> None:
    """Measure kernels and models on this machine, or a server.

    \b
    Examples:
      hadron bench kernels --op linear --scheme mxfp4 --m 1,8,512
      hadron bench serve --max-concurrency 16
    """


command.add_command(serve)


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
@click.option("--experts", type=click.IntRange(min=1), help="Experts of moe.  [default: 64]")
@click.option("--threads", type=click.IntRange(min=1), help="Threads to compute with.  [default: torch's choice]")
@click.option("--isa", help="Level of instructions (docs/native.md).  [default: the widest]")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="How often each is measured.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (docs/bench.md).")
def kernels(
    op: str | None, scheme: str | None, m: str | None, n: int | None, k: int | None, experts: int | None,
    threads: int | None, isa: str | None, rounds: int, as_json: bool,
) -> int:  # fmt: skip
    """Time single operations on random weights that lie in no cache.

    Without options: products by 4096 x 12288 and 12288 x 4096 and a layer of 64 experts, in the common
    schemes, in about a minute. --op takes linear, mlp and moe, whose schemes and shapes can be asked for, and at
    the released sizes kda, mla, indexer, router, hyper_connection, norm, rope, embedding, lm_head and quantize.

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


_MODEL_OPTIONS = (
    click.argument("model", required=False),
    click.option("--steps", type=click.IntRange(min=1), help="How many steps to time."),
    click.option("--threads", type=click.IntRange(min=1), help="Threads to compute with.  [default: torch's choice]"),
    click.option("--isa", help="Level of instructions (docs/native.md).  [default: the widest]"),
    click.option(
        "--kernels", type=click.Choice(["auto", "cpu", "reference"]), default="auto", show_default=True,
        help="Whose kernels to use.",
    ),
    click.option(
        "--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True,
        help="Of activations and caches.",
    ),
    click.option("--prefault/--no-prefault", default=True, show_default=True, help="Read the weights before."),
    click.option("--numa", default="auto", show_default=True, metavar=NUMA, help=NUMA_HELP),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object (docs/bench.md)."),
)  # fmt: skip


def _model_options(function: F) -> F:
    for decorate in reversed(_MODEL_OPTIONS):
        function = decorate(function)
    return function


@command.command()
@click.option("--contexts", default="1k", show_default=True, help="Tokens before the step, such as 1k,4k,256k.")
@_model_options
def decode(contexts: str, steps: int | None, as_json: bool, **how: Any) -> int:
    """Time steps of one token of MODEL, at each length of the context.

    MODEL is a folder with a checkpoint; without it, the small model that ships with Hadron.

    \b
    Example:
      hadron bench decode path/to/checkpoint --contexts 1k,64k
    """
    return _measure(how, as_json, contexts=_numbers(contexts, "--contexts") or (), tokens=(1,), steps=steps or 16)


@command.command()
@click.option("--tokens", default="128,512", show_default=True, help="Tokens of a step, such as 128,512.")
@click.option("--context", type=click.IntRange(min=0), default=0, show_default=True, help="Tokens before the step.")
@_model_options
def prefill(tokens: str, context: int, steps: int | None, as_json: bool, **how: Any) -> int:
    """Time steps of many tokens of MODEL, as prompts take them.

    MODEL is a folder with a checkpoint; without it, the small model that ships with Hadron.

    \b
    Example:
      hadron bench prefill path/to/checkpoint --tokens 512
    """
    return _measure(how, as_json, contexts=(context,), tokens=_numbers(tokens, "--tokens") or (), steps=steps or 3)


def _measure(
    how: dict[str, Any], as_json: bool, *, contexts: tuple[int, ...], tokens: tuple[int, ...], steps: int
) -> int:
    from hadron.bench import model, report
    from hadron.cli import console
    from hadron.engine.config import EngineConfig

    config = EngineConfig(**{name: how[name] for name in ("threads", "kernels", "dtype", "prefault", "numa")})
    asked = model.Asked(contexts=contexts, tokens=tokens, steps=steps)
    with console.progress("measuring", unit="lengths") as advance:
        found = model.measure(how["model"] or str(SHIPPED), config, asked, isa=how["isa"], progress=advance)
    if as_json:
        _print_json(found)
    else:
        console.write(report.model_lines(found))
    return 0
