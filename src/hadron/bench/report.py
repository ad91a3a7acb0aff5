"""What `hadron bench` found, as the value that `--json` prints and as lines for people."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from hadron.bench.limits import Limits
from hadron.bench.measure import Row
from hadron.bench.profile import Breakdown
from hadron.bench.table import table
from hadron.bench.weigh import Cost
from hadron.preflight.report import Line, Role


class Environment(Struct, frozen=True):
    """Where it was measured. load: of the machine, one minute before the end."""

    processor: str
    cores: int
    threads: int
    isa: str
    system: str
    python: str
    torch: str
    hadron: str
    load: float


class KernelReport(Struct, frozen=True):
    """limits: medians over the run. notes: how it was measured, one sentence each."""

    environment: Environment
    limits: Limits
    rows: list[Row]
    notes: list[str]


class Step(Struct, frozen=True):
    """Steps of `tokens` tokens behind a context. ms: the median of a step; tokens_per_second: by it.

    context_bytes: of caches, by one token. gbps: bytes of weights and caches over time; gflops: products by weights
    over time. limit: what binds; fraction: of it as it was just before and after.
    """

    context: int
    context_bytes: int
    tokens: int
    steps: int
    ms: float
    tokens_per_second: float
    gbps: float
    gflops: float
    limit: str
    limit_value: float
    fraction: float
    profile: Breakdown


class ModelReport(Struct, frozen=True):
    """model: as given. layers: how many run. cost: of one token."""

    environment: Environment
    limits: Limits
    model: str
    layers: int
    bytes: int
    cost: Cost
    steps: list[Step]
    notes: list[str]


def lines(report: KernelReport) -> Iterator[Line]:
    """A table."""
    yield from environment_lines(report.environment)
    yield Line(limits_text(report.limits))
    yield Line("")
    head = ("kernel", "scheme", "shape", "m", "ms", "GB/s", "GFLOP/s", "fraction", "of", "from cache")
    rows = [
        (
            f"{r.provider}.{r.op}", r.scheme, r.shape or f"{r.k} -> {r.n}", str(r.m), f"{r.ms:.3f}", f"{r.gbps:.1f}",
            f"{r.gflops:.0f}", f"{r.fraction:.2f}", LIMIT_NAMES[r.limit],
            "" if r.warm_gbps is None else f"{r.warm_gbps:.1f} GB/s",
        )
        for r in report.rows
    ]  # fmt: skip
    yield from table(head, "<<<>>>>><>", rows)
    yield Line("")
    for note in report.notes:
        yield Line(note, Role.DETAIL)


LIMIT_NAMES = {
    "read_gbps": "read bandwidth",
    "update_gbps": "read+write bandwidth",
    "bf16_gflops": "bf16 peak",
    "tile_gflops": "tile peak",
    "fp32_gflops": "fp32 peak",
    "int8_gops": "int8 peak",
}


def environment_lines(found: Environment) -> Iterator[Line]:
    """Machine and software."""
    yield Line(
        f"{found.processor}, {found.cores} cores, {found.threads} threads, level {found.isa}, load {found.load:.1f}",
        Role.TITLE,
    )
    yield Line(f"hadron {found.hadron}, Python {found.python}, torch {found.torch}, {found.system}", Role.DETAIL)


def limits_text(limits: Limits) -> str:
    """One line."""

    def peak(value: float | None) -> str:
        return "none" if value is None else f"{value:.0f}"

    return (
        f"limits here: read {limits.read_gbps:.1f} GB/s, read+write {limits.update_gbps:.1f} GB/s; "
        f"bf16 {peak(limits.bf16_gflops)} (tiles {peak(limits.tile_gflops)}), fp32 {limits.fp32_gflops:.0f} GFLOP/s, "
        f"int8 {peak(limits.int8_gops)} GOP/s"
    )


def model_lines(report: ModelReport) -> Iterator[Line]:
    """A table of steps, and where the time of each went."""
    yield from environment_lines(report.environment)
    yield Line(limits_text(report.limits))
    cost = report.cost
    yield Line(
        f"{report.model}: {report.layers} layers, {report.bytes / 1e9:.2f} GB; a token reads "
        f"{cost.bytes / 1e9:.3f} GB of weights, {(cost.flops + cost.head_flops) / 1e9:.2f} GFLOP"
    )
    yield Line("")
    head = ("context", "tokens", "ms", "tokens/s", "GB/s", "GFLOP/s", "fraction", "of", "native calls", "a layer")
    rows = [
        (
            str(s.context), str(s.tokens), f"{s.ms:.2f}", f"{s.tokens_per_second:.1f}", f"{s.gbps:.1f}",
            f"{s.gflops:.0f}", f"{s.fraction:.2f}", LIMIT_NAMES[s.limit], f"{s.profile.native_calls:.0f}",
            f"{s.profile.native_calls_a_layer:.1f}",
        )
        for s in report.steps
    ]  # fmt: skip
    yield from table(head, ">>>>>>><>>", rows)
    for step in report.steps:
        yield Line("")
        yield Line(f"a step of {step.tokens} behind {step.context}", Role.TITLE)
        parts = [*step.profile.operations, step.profile.outside]
        yield from table(
            ("operation", "calls", "ms", "share"),
            "<>>>",
            [(p.name, f"{p.calls:.0f}", f"{p.ms:.2f}", f"{p.share:.0%}") for p in parts],
        )
        yield Line(f"native code: {step.profile.native_share:.0%} of the step", Role.DETAIL)
    yield Line("")
    for note in report.notes:
        yield Line(note, Role.DETAIL)
