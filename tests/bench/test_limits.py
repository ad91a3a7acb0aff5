"""Probes: units by a clock that we hold, and that they do what they say on the bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hadron.bench import limits
from hadron.bench.limits import Arena, Probes
from hadron.kernels.cpu import native

pytestmark = pytest.mark.skipif(
    not native.levels(), reason="this build has no native kernels: install with a C++ compiler to run these"
)


class Ticks:
    """Every look at the clock is a second later."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SLICE", 1 << 20)
    monkeypatch.setattr(limits, "WORK", 1e6)


def probes(level: str = "baseline", threads: int = 2) -> Probes:
    return Probes(Arena(3 << 20), level, threads, Ticks())


def test_bandwidths_are_bytes_over_time_and_an_update_moves_twice_as_many() -> None:
    found = probes()
    assert found.read() == pytest.approx((1 << 20) / 1e9)
    assert found.update() == pytest.approx((2 << 20) / 1e9)


def test_an_update_leaves_the_bytes_as_they_were() -> None:
    arena = Arena(2 << 20)
    arena.tensor.copy_(torch.arange(2 << 20).to(torch.uint8))
    before = arena.tensor.clone()
    Probes(arena, "baseline", 2, Ticks()).update()
    assert torch.equal(arena.tensor, before)


def test_peaks_are_operations_of_all_threads_over_time() -> None:
    for level in native.levels():
        operations = native.extension().probe_peak_operations(level, "fp32")
        rounds = int(1e6 / operations)
        assert probes(level, threads=2).peak("fp32") == pytest.approx(operations * rounds * 2 / 1e9)


def test_a_level_without_dots_has_no_such_peak() -> None:
    assert probes("baseline").peak("bf16") is None
    assert probes("baseline").peak("int8") is None
    assert probes("baseline").peak("tile") is None
    assert probes("baseline").best_peak() == "fp32_gflops"
    summary = probes("baseline").summary()
    assert (summary.bf16_gflops, summary.int8_gops) == (None, None)
    assert summary.fp32_gflops > 0


def test_every_slice_is_another_part_of_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[int] = []
    found = probes()
    monkeypatch.setattr(
        found, "_native", type("Native", (), {"probe_read": lambda self, at, n, t: places.append(at)})()
    )
    for _ in range(4):
        found.read()
    base = places[0]
    assert [place - base for place in places] == [0, 1 << 20, 2 << 20, 0]


def test_a_reading_depends_on_every_byte() -> None:
    """What a probe returns is the exclusive or of all words: nothing can have been left out."""
    data = np.random.default_rng(0).integers(0, 256, 3 << 12, dtype=np.uint8)
    aligned = torch.empty(len(data) + 64, dtype=torch.uint8)
    start = -aligned.data_ptr() % 64
    aligned[start : start + len(data)] = torch.from_numpy(data)
    for threads in (1, 2, 3):
        read = native.extension().probe_read(aligned.data_ptr() + start, len(data), threads)
        assert read == int(np.bitwise_xor.reduce(data.view(np.uint64))), threads


def test_an_unknown_peak_or_level_is_refused() -> None:
    with pytest.raises(ValueError, match="no peak: fp64"):
        native.extension().probe_peak_operations("baseline", "fp64")
    with pytest.raises(ValueError, match="no peaks are known of level sse"):
        native.extension().probe_peak_operations("sse", "fp32")
    with pytest.raises(ValueError, match="baseline has no instruction for bf16"):
        native.extension().probe_peak("baseline", "bf16", 1, 1)
