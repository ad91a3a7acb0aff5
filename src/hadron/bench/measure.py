"""Times cases in rounds, each beside the limits that it is compared with.

The speed of a shared host moves by tens of per cent within a minute, so a case and its limits are measured
within a fraction of a second of each other, several times, and the median of the ratios counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from hadron.bench.limits import Clock, Probes

#: Seconds of calls of a case in one round, and of a case in all rounds before it is left at what it has.
ROUND, ENOUGH = 0.05, 0.9


@dataclass(frozen=True, slots=True)
class Case:
    """Something to time. call: runs it once; the number it gets counts up, to take the next cold copy.

    gigabytes, gigaflops: of one call. peak, bandwidth: the fields of `Limits` that apply. warm: the same
    on operands that lie in a cache, or None. shape: further fields of its row.
    """

    op: str
    scheme: str
    m: int
    n: int
    k: int
    provider: str
    gigabytes: float
    gigaflops: float
    call: Callable[[int], object]
    peak: str = "bf16_gflops"
    bandwidth: str = "read_gbps"
    warm: Callable[[int], object] | None = None
    shape: str = ""


class Row(Struct, frozen=True):
    """What a case took. limit: the field of `limits` that binds it (the one that would take longer).

    fraction: of that limit as it was beside the case; limit_value: what it was. of_bandwidth, of_peak: both
    fractions. warm_gbps: from a cache, where that was measured.
    """

    op: str
    scheme: str
    m: int
    n: int
    k: int
    shape: str
    provider: str
    threads: int
    isa: str
    ms: float
    gbps: float
    gflops: float
    limit: str
    limit_value: float
    fraction: float
    of_bandwidth: float
    of_peak: float
    warm_gbps: float | None


@dataclass(frozen=True, slots=True)
class _Sample:
    seconds: float
    bandwidth: float
    peak: float


def measure(
    cases: Sequence[Case],
    probes: Probes,
    *,
    threads: int,
    isa: str,
    rounds: int = 3,
    clock: Clock = time.perf_counter,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Row]:
    """A row for each case, in their order."""
    samples: list[list[_Sample]] = [[] for _ in cases]
    warm: list[list[float]] = [[] for _ in cases]
    spent = [0.0] * len(cases)
    for turn in range(rounds):
        for i, case in enumerate(cases):
            if spent[i] < ENOUGH:
                sample, took = _sample(case, probes, clock, first=turn == 0)
                samples[i].append(sample)
                spent[i] += took
                if case.warm is not None:
                    warm[i].append(_repeat(case.warm, clock)[0])
            progress(turn * len(cases) + i + 1, rounds * len(cases))
    return [row(case, taken, hot, threads, isa) for case, taken, hot in zip(cases, samples, warm, strict=True)]


def _sample(case: Case, probes: Probes, clock: Clock, *, first: bool) -> tuple[_Sample, float]:
    def limits() -> tuple[float, float]:
        bandwidth, peak = probes.limit(case.bandwidth), probes.limit(case.peak)
        assert bandwidth is not None and peak is not None, case
        return bandwidth, peak

    if first:
        case.call(-1)
    before = limits()
    seconds, total = _repeat(case.call, clock)
    after = limits()
    return _Sample(seconds, max(before[0], after[0]), max(before[1], after[1])), total


def _repeat(call: Callable[[int], object], clock: Clock) -> tuple[float, float]:
    """Mean seconds of a call, and seconds of all calls of one round."""
    count, begin = 0, clock()
    while True:
        call(count)
        count += 1
        total = clock() - begin
        if total >= ROUND:
            return total / count, total


def row(case: Case, samples: Sequence[_Sample], warm: Sequence[float], threads: int, isa: str) -> Row:
    """The round with the median fraction, in figures."""

    def figures(sample: _Sample) -> dict[str, Any]:
        of_bandwidth = case.gigabytes / sample.seconds / sample.bandwidth
        of_peak = case.gigaflops / sample.seconds / sample.peak
        bound = of_bandwidth >= of_peak
        return {
            "ms": sample.seconds * 1e3,
            "gbps": case.gigabytes / sample.seconds,
            "gflops": case.gigaflops / sample.seconds,
            "limit": case.bandwidth if bound else case.peak,
            "limit_value": sample.bandwidth if bound else sample.peak,
            "fraction": max(of_bandwidth, of_peak),
            "of_bandwidth": of_bandwidth,
            "of_peak": of_peak,
        }

    middle = sorted((figures(s) for s in samples), key=lambda f: float(f["fraction"]))[len(samples) // 2]
    hot = case.gigabytes / sorted(warm)[len(warm) // 2] if warm else None
    return Row(
        op=case.op, scheme=case.scheme, m=case.m, n=case.n, k=case.k, shape=case.shape, provider=case.provider,
        threads=threads, isa=isa, warm_gbps=hot, **middle,
    )  # fmt: skip
