"""What this machine can do at most, measured in the same run as what is compared with it.

Bandwidth is of a buffer larger than the caches, a different part of it every time; peaks are of
instructions of the level in use, with operands in registers. The clock is a parameter.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable

import torch
from msgspec import Struct

from hadron.kernels.cpu.native import extension

Clock = Callable[[], float]

#: Bytes of one measurement of bandwidth, and operations of one of a peak.
SLICE = 192 << 20
WORK = 1.5e9
PAGE = 4096
PEAKS = ("bf16", "int8", "fp32", "tile")


class Limits(Struct, frozen=True):
    """GB/s and 10^9 operations a second; None where the level has no such instruction.

    read_gbps: bytes read. update_gbps: bytes read and written, both counted. A multiply and an add are two.
    bf16_gflops: dots of vectors of bfloat16. tile_gflops: dots of tiles of it (AMX).
    """

    read_gbps: float
    update_gbps: float
    bf16_gflops: float | None
    int8_gops: float | None
    fp32_gflops: float
    tile_gflops: float | None = None


class Arena:
    """Memory that weights and probes share: larger than the caches, every page touched.

    In huge pages where the system grants them, as Linux 6.16 and later map files of ext4 and xfs.
    """

    def __init__(self, size: int) -> None:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self.tensor[::PAGE] = 1

    @property
    def size(self) -> int:
        """Bytes."""
        return self.tensor.numel()


class Probes:
    """Measures limits with `threads` threads at one level, in slices of an arena."""

    def __init__(self, arena: Arena, level: str, threads: int, clock: Clock = time.perf_counter) -> None:
        self._arena = arena
        self._level = level
        self._threads = threads
        self._clock = clock
        self._native = extension()
        self._slice = min(SLICE, arena.size // 4096 * 4096)
        self._next = 0
        self.seen: dict[str, list[float]] = {}

    def read(self) -> float:
        """GB/s of reading."""
        return self._bandwidth("read_gbps", self._native.probe_read, 1)

    def update(self) -> float:
        """GB/s of reading and writing in place. Twice, so that the bytes are again what they were."""
        start = self._slice_start(advance=False)
        self._bandwidth("update_gbps", self._native.probe_update, 2)
        self._next = start
        return self._bandwidth("update_gbps", self._native.probe_update, 2)

    def peak(self, kind: str) -> float | None:
        """10^9 operations a second of one of `PEAKS`; None where the level has none."""
        operations = self._native.probe_peak_operations(self._level, kind)
        if not operations:
            return None
        rounds = max(1, int(WORK / operations))
        begin = self._clock()
        self._native.probe_peak(self._level, kind, rounds, self._threads)
        return self._noted(_peak_name(kind), operations * rounds * self._threads / (self._clock() - begin) / 1e9)

    def best_peak(self) -> str:
        """The field of `Limits` that products of bfloat16 are held against at this level."""
        kinds = (kind for kind in ("tile", "bf16") if self._native.probe_peak_operations(self._level, kind))
        return _peak_name(next(kinds, "fp32"))

    def limit(self, name: str) -> float | None:
        """One field of `Limits`, measured now."""
        if name == "read_gbps":
            return self.read()
        return self.update() if name == "update_gbps" else self.peak(name.partition("_")[0])

    def summary(self) -> Limits:
        """The median of everything measured so far; what was not is measured now."""
        names = ("read_gbps", "update_gbps", *map(_peak_name, PEAKS))
        for name in names:
            if name not in self.seen:
                self.limit(name)
        return Limits(**{name: _median(self.seen[name]) if name in self.seen else None for name in names})  # type: ignore[arg-type]

    def _slice_start(self, *, advance: bool = True) -> int:
        start = self._next if self._next + self._slice <= self._arena.size else 0
        if advance:
            self._next = start + self._slice
        return start

    def _bandwidth(self, name: str, probe: Callable[[int, int, int], object], passes: int) -> float:
        start = self._slice_start()
        begin = self._clock()
        probe(self._arena.tensor.data_ptr() + start, self._slice, self._threads)
        return self._noted(name, passes * self._slice / (self._clock() - begin) / 1e9)

    def _noted(self, name: str, value: float) -> float:
        self.seen.setdefault(name, []).append(value)
        return value


def _peak_name(kind: str) -> str:
    return f"{kind}_{'gops' if kind == 'int8' else 'gflops'}"


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
