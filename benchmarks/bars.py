"""What the native kernels have to reach, as data, and whether rows of `hadron bench` reach it.

A bar holds if one of its ways does. Fractions are of what the same run measured; "bf16 peak" is that of vector
dots, also where the products use tiles (AMX), whose own peak is another column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

FP8 = ("fp8_e4m3_block_128x128", "fp8_e4m3_channel")
CORE_GBPS = 20.0


class Row(Protocol):
    """Of `hadron.bench.measure.Row`, what bars look at."""

    op: str
    scheme: str
    m: int
    n: int
    k: int
    shape: str
    threads: int
    gbps: float
    gflops: float
    of_bandwidth: float
    of_peak: float
    ms: float
    warm_gbps: float | None


@dataclass(frozen=True, slots=True)
class Bar:
    """Rows it is for, what it says, and how far a row is, given the bf16 peak: 1 and above meets it."""

    text: str
    applies: Callable[[Row], bool]
    reached: Callable[[Row, float], float]


def _is(op: str, m: int, *schemes: str, shape: str = "") -> Callable[[Row], bool]:
    return lambda row: row.op == op and row.m == m and row.scheme in schemes and shape in row.shape


def bandwidth(op: str, schemes: tuple[str, ...], fraction: float, shape: str = "") -> Bar:
    """At M = 1: a fraction of the read bandwidth, or 0.95 of the rate from a cache where that is 20 GB/s a core."""

    def reached(row: Row, peak: float) -> float:
        ways = [row.of_bandwidth / fraction]
        if row.warm_gbps is not None and row.warm_gbps >= CORE_GBPS * row.threads:
            ways.append(row.gbps / (0.95 * row.warm_gbps))
        return max(ways)

    return Bar(f"{fraction:.2f} of read bandwidth", _is(op, 1, *schemes, shape=shape), reached)


def rate(op: str, m: int, schemes: tuple[str, ...], fraction: float, gflops: float = 0.0, shape: str = "") -> Bar:
    """A fraction of the bf16 peak, or so many GFLOP/s."""
    text = f"{fraction:.2f} of bf16 peak" + (f" or {gflops:.0f} GFLOP/s" if gflops else "")

    def reached(row: Row, peak: float) -> float:
        return max(row.gflops / peak / fraction, row.gflops / gflops if gflops else 0.0)

    return Bar(text, _is(op, m, *schemes, shape=shape), reached)


FP4 = ("mxfp4", "nvfp4")
BARS = (
    bandwidth("linear", FP4, 0.85),
    bandwidth("linear", (*FP8, "bf16", "int8_channel"), 0.95),
    rate("linear", 4, FP4, 0.55, 250),
    rate("linear", 8, FP4, 0.63, 290),
    rate("linear", 4, FP8, 0.39, 180),
    rate("linear", 8, FP8, 0.52, 240),
    rate("linear", 32, FP4 + FP8, 0.60),
    rate("linear", 512, ("mxfp4", "fp8_e4m3_channel"), 0.75),
    rate("linear", 512, ("nvfp4", "fp8_e4m3_block_128x128"), 0.62),
    bandwidth("moe", FP4, 0.80, "64 experts"),
    bandwidth("moe", FP8, 0.90, "64 experts"),
    rate("moe", 512, ("mxfp4",), 0.45, shape="64 experts"),
    rate("moe", 512, ("mxfp4",), 0.40, shape="288 experts"),
    Bar("0.70 of read+write bandwidth", lambda r: r.op == "kda" and r.m == 1, lambda r, peak: r.of_bandwidth / 0.70),
    Bar("0.45 of bf16 peak", lambda r: r.op == "mla" and " of 16," in r.shape, lambda r, peak: r.gflops / peak / 0.45),
    Bar(
        "0.50 of bf16 peak, its top-k included",
        lambda r: r.op == "indexer",
        lambda r, peak: r.gflops / peak * 1.2 / 0.50,
    ),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A row against a bar. reached: 1 and above meets it."""

    row: Row
    bar: Bar
    reached: float

    @property
    def met(self) -> bool:
        """Whether the bar is met."""
        return self.reached >= 1.0


def verdicts(rows: Sequence[Row], peak: float) -> Iterator[Verdict]:
    """Every row against every bar that is for it. peak: GFLOP/s of bf16 dots."""
    for row in rows:
        for bar in BARS:
            if bar.applies(row):
                yield Verdict(row, bar, bar.reached(row, peak))


def table(found: Sequence[Verdict]) -> Iterator[str]:
    """Lines: the case, what was measured, the bar, and whether it is met."""
    for v in found:
        r = v.row
        case = f"{r.op} {r.scheme} {r.k}->{r.n} M={r.m} {r.shape}".strip()
        measured = f"{r.ms:9.3f} ms {r.gbps:6.1f} GB/s {r.gflops:6.0f} GFLOP/s"
        fractions = f"{r.of_bandwidth:5.2f} bandwidth {r.of_peak:5.2f} peak"
        yield f"{case:58} {measured} {fractions}  {v.bar.text:38} {'met' if v.met else 'MISSED'} ({v.reached:.2f})"
    met = sum(v.met for v in found)
    yield f"{met} of {len(found)} met"
