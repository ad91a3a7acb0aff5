"""Timing with a clock that we hold: means, rates, the limit that binds, the median of rounds."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from hadron.bench.measure import ENOUGH, ROUND, Case, measure


class Clock:
    """Seconds that only work moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeProbes:
    """Limits from lists, one value a measurement; the last stays."""

    def __init__(self, **values: list[float]) -> None:
        self.values = values
        self.asked: list[str] = []

    def limit(self, name: str) -> float:
        self.asked.append(name)
        values = self.values[name]
        return values.pop(0) if len(values) > 1 else values[0]


def case(clock: Clock, seconds: Callable[[int], float], **changes: object) -> Case:
    def call(turn: int) -> None:
        clock.now += seconds(turn)

    values = {
        "op": "linear", "scheme": "mxfp4", "m": 1, "n": 6, "k": 4, "provider": "cpu", "gigabytes": 0.5, "gigaflops": 2.0,
        "call": call, **changes,
    }  # fmt: skip
    return Case(**values)  # type: ignore[arg-type]


def rows(clock: Clock, cases: list[Case], probes: FakeProbes, rounds: int = 1) -> list[object]:
    return measure(cases, probes, threads=2, isa="avx2", rounds=rounds, clock=clock)  # type: ignore[arg-type, return-value]


def test_rates_are_of_the_mean_call_and_the_fraction_is_of_the_limit_that_takes_longer() -> None:
    clock = Clock()
    probes = FakeProbes(read_gbps=[50.0], bf16_gflops=[160.0])
    (row,) = rows(clock, [case(clock, lambda turn: 0.02)], probes)
    assert (row.ms, row.gbps, row.gflops) == pytest.approx((20.0, 25.0, 100.0))
    # 0.5 GB at 50 GB/s are 10 ms, 2 GFLOP at 160 are 12.5: arithmetic binds
    assert (row.limit, row.limit_value) == ("bf16_gflops", 160.0)
    assert row.fraction == pytest.approx(12.5 / 20)
    assert row.fraction == pytest.approx(row.gflops / row.limit_value)
    assert (row.of_bandwidth, row.of_peak) == pytest.approx((0.5, 0.625))
    assert (row.threads, row.isa, row.warm_gbps) == (2, "avx2", None)


def test_bandwidth_binds_where_its_time_is_longer() -> None:
    clock = Clock()
    probes = FakeProbes(read_gbps=[25.0], bf16_gflops=[1000.0])
    (row,) = rows(clock, [case(clock, lambda turn: 0.04)], probes)
    assert (row.limit, row.fraction) == ("read_gbps", pytest.approx(0.5))
    assert row.fraction == pytest.approx(row.gbps / row.limit_value)


def test_limits_are_the_better_of_just_before_and_just_after() -> None:
    clock = Clock()
    probes = FakeProbes(read_gbps=[30.0, 40.0], bf16_gflops=[1e6])
    (row,) = rows(clock, [case(clock, lambda turn: 0.05)], probes)
    assert row.limit_value == 40.0
    assert probes.asked == ["read_gbps", "bf16_gflops"] * 2


def test_the_round_of_the_median_fraction_counts_with_its_own_limit() -> None:
    clock = Clock()
    speeds = iter([0.0, 0.05, 0.1, 0.2])  # first is the warm-up; then one call fills a round
    probes = FakeProbes(read_gbps=[10.0, 10.0, 20.0, 20.0, 25.0, 25.0], bf16_gflops=[1e9])
    (row,) = rows(clock, [case(clock, lambda turn: next(speeds))], probes, rounds=3)
    # fractions: 10/10 = 1, 5/20 = 0.25, 2.5/25 = 0.1
    assert (row.fraction, row.limit_value, row.ms) == pytest.approx((0.25, 20.0, 100.0))


def test_rounds_take_turns_and_calls_go_through_the_copies() -> None:
    clock = Clock()
    order: list[tuple[str, int]] = []

    def recorded(name: str) -> Callable[[int], float]:
        def seconds(turn: int) -> float:
            order.append((name, turn))
            return 0.6 * ROUND

        return seconds

    cases = [case(clock, recorded("a")), case(clock, recorded("b"))]
    rows(clock, cases, FakeProbes(read_gbps=[1.0], bf16_gflops=[1.0]), rounds=2)
    names = [name for name, _ in itertools.groupby(order, key=lambda entry: entry[0])]
    assert names == ["a", "b", "a", "b"]
    assert [turn for name, turn in order if name == "a"] == [-1, 0, 1, 0, 1]


def test_long_cases_are_not_repeated_for_ever() -> None:
    clock = Clock()
    calls: list[int] = []

    def seconds(turn: int) -> float:
        calls.append(turn)
        return ENOUGH + 0.1

    rows(clock, [case(clock, seconds)], FakeProbes(read_gbps=[1.0], bf16_gflops=[1.0]), rounds=5)
    assert calls == [-1, 0]


def test_the_rate_from_a_cache_is_apart() -> None:
    clock = Clock()

    def warm(turn: int) -> None:
        clock.now += 0.01

    (row,) = rows(
        clock, [case(clock, lambda turn: 0.02, warm=warm)], FakeProbes(read_gbps=[50.0], bf16_gflops=[1e6])
    )  # fmt: skip
    assert (row.gbps, row.warm_gbps) == pytest.approx((25.0, 50.0))


def test_progress_counts_every_measurement() -> None:
    clock = Clock()
    seen: list[tuple[int, int]] = []
    cases = [case(clock, lambda turn: 0.05)] * 2
    probes = FakeProbes(read_gbps=[1.0], bf16_gflops=[1.0])
    measure(cases, probes, threads=1, isa="x", rounds=2, clock=clock, progress=lambda *at: seen.append(at))  # type: ignore[arg-type]
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
