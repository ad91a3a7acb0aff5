"""What `hadron bench` found, as the value that `--json` prints and as lines for people."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from hadron.bench.limits import Limits
from hadron.bench.measure import Row
from hadron.preflight.report import Line, Role, table


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


def lines(report: KernelReport) -> Iterator[Line]:
    """A table."""
    yield from environment_lines(report.environment)
    yield Line(limits_text(report.limits))
    yield Line("")
    head = ("op", "scheme", "m", "n", "k", "ms", "GB/s", "GFLOP/s", "fraction", "of", "from cache", "")
    rows = [
        (
            r.op, r.scheme, str(r.m), str(r.n), str(r.k), f"{r.ms:.3f}", f"{r.gbps:.1f}", f"{r.gflops:.0f}",
            f"{r.fraction:.2f}", LIMIT_NAMES[r.limit], "" if r.warm_gbps is None else f"{r.warm_gbps:.1f} GB/s",
            r.shape,
        )
        for r in report.rows
    ]  # fmt: skip
    yield from table(head, "<<>>>>>>><><", rows)
    yield Line("")
    for note in report.notes:
        yield Line(note, Role.DETAIL)


LIMIT_NAMES = {
    "read_gbps": "read bandwidth",
    "update_gbps": "read+write bandwidth",
    "bf16_gflops": "bf16 peak",
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
        f"bf16 {peak(limits.bf16_gflops)}, fp32 {limits.fp32_gflops:.0f} GFLOP/s, int8 {peak(limits.int8_gops)} GOP/s"
    )
