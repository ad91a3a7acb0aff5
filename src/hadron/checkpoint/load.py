"""Maps shards into memory and hands out their tensors as views; no byte is copied.

Every shard is mapped once, read-only, after checking that it still is the file that was planned. A
tensor lies where the header says, on any byte; it is given out once, so that what nobody asked for
shows. E8M0 is given as uint8. Writing to a view is a segmentation fault, which is the point.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import warnings
from collections.abc import Callable, Iterable, Iterator
from math import prod

import numpy as np
import torch
from msgspec import Struct

from hadron.checkpoint.facts import Facts, Shard, Tensor
from hadron.errors import ChangedError, CheckpointError, UsageError

DTYPES: dict[str, torch.dtype] = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8, "U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip

#: gap between tensors that is read along rather than starting anew
_NEARBY = 1 << 20
#: bytes between two reports of progress
_STEP = 64 << 20


class Progress(Struct, frozen=True):
    """phase: `map`, `prefault` or `lock`. done and total count bytes of tensors (or of pages)."""

    phase: str
    done: int
    total: int


OnProgress = Callable[[Progress], None]


def _silent(progress: Progress) -> None:
    del progress


class MappedCheckpoint:
    """The tensors `names` of a checkpoint. facts: of the plan, with local shards."""

    def __init__(self, facts: Facts, names: Iterable[str], progress: OnProgress = _silent) -> None:
        self._tensors = {name: facts.tensors[name] for name in names}
        self._left = dict.fromkeys(self._tensors)
        self._progress = progress
        self._maps: dict[int, mmap.mmap] = {}
        self._starts = {index: shard.data_start for index, shard in enumerate(facts.shards)}
        used = sorted({tensor.shard for tensor in self._tensors.values()})
        total = sum(facts.shards[index].size for index in used)
        done = 0
        for index in used:
            self._maps[index] = _map(facts.shards[index])
            done += facts.shards[index].size
            progress(Progress("map", done, total))

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors asked for."""
        return sum(_length(tensor) for tensor in self._tensors.values())

    @property
    def left(self) -> list[str]:
        """Names that nobody has taken yet."""
        return list(self._left)

    def take(self, name: str) -> torch.Tensor:
        """The tensor as a read-only view on the CPU, in its stored dtype and shape. Once only."""
        assert name in self._left, f"{name} was taken before, or belongs to nothing that was planned"
        del self._left[name]
        tensor = self._tensors[name]
        dtype = DTYPES.get(tensor.dtype)
        if dtype is None:
            raise CheckpointError(
                "A tensor has a dtype that cannot be loaded",
                where=name,
                found=tensor.dtype,
                accepted=", ".join(DTYPES),
                hint="run `hadron check` on the checkpoint",
            )
        count = prod(tensor.shape)
        if count == 0:
            return torch.empty(tensor.shape, dtype=dtype)
        offset = self._starts[tensor.shard] + tensor.data_offsets[0]
        with warnings.catch_warnings():  # torch warns that the buffer is read-only
            warnings.simplefilter("ignore", UserWarning)
            return torch.frombuffer(self._maps[tensor.shard], dtype=dtype, count=count, offset=offset).view(
                tensor.shape
            )

    def prefault(self) -> None:
        """Read one byte of every page that holds a tensor, so that no token waits for the disk."""
        total, done = sum(end - begin for _, begin, end in self._ranges()), 0
        for shard, begin, end in self._ranges():
            pages = np.frombuffer(self._maps[shard], dtype=np.uint8)
            for start in range(begin, end, _STEP):
                stop = min(start + _STEP, end)
                self._maps[shard].madvise(mmap.MADV_WILLNEED, start, stop - start)
                pages[start : stop : mmap.PAGESIZE].max()
                done += stop - start
                self._progress(Progress("prefault", done, total))

    def lock(self) -> None:
        """Keep the pages that hold tensors in memory; `UsageError` where the system refuses."""
        total, done = sum(end - begin for _, begin, end in self._ranges()), 0
        for shard, begin, end in self._ranges():
            address = np.frombuffer(self._maps[shard], dtype=np.uint8).ctypes.data
            if (error := _mlock(address + begin, end - begin)) != 0:
                limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
                allowed = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,} bytes"
                raise UsageError(
                    "The weights cannot be locked in memory",
                    where="--mlock",
                    found=f"{os.strerror(error)}; the limit on locked memory (RLIMIT_MEMLOCK) is {allowed}",
                    accepted=f"a limit, and memory, for {total:,} bytes",
                    hint="raise the limit (`ulimit -l`, or LimitMEMLOCK= of a systemd unit), or leave --mlock out",
                )
            done += end - begin
            self._progress(Progress("lock", done, total))

    def _ranges(self) -> Iterator[tuple[int, int, int]]:
        """(shard, begin, end) of stretches of tensors, from the start of a page."""
        spans = sorted(
            (tensor.shard, self._starts[tensor.shard] + tensor.data_offsets[0], _length(tensor))
            for tensor in self._tensors.values()
        )
        shard, begin, end = -1, 0, 0
        for where, start, length in spans:
            if where != shard or start > end + _NEARBY:
                if shard >= 0:
                    yield shard, begin, end
                shard, begin, end = where, start - start % mmap.PAGESIZE, start
            end = max(end, start + length)
        if shard >= 0:
            yield shard, begin, end


def _length(tensor: Tensor) -> int:
    return tensor.data_offsets[1] - tensor.data_offsets[0]


def _map(shard: Shard) -> mmap.mmap:
    """The whole file, read-only, if it is the one that was planned."""
    if shard.path is None:
        raise CheckpointError(
            "A shard is not on this machine",
            where=shard.name,
            found="only its header was fetched",
            accepted="a local file",
            hint="download the checkpoint first, or give a local folder",
        )
    try:
        file = shard.path.open("rb")
    except OSError as error:
        raise _changed(shard, f"it cannot be opened: {error.strerror}") from error
    with file:
        status = os.fstat(file.fileno())
        if status.st_size < shard.size:
            raise _changed(shard, f"{status.st_size:,} bytes: it was cut short")
        if status.st_size != shard.size:
            raise _changed(shard, f"{status.st_size:,} bytes")
        if status.st_mtime_ns != shard.mtime_ns:
            raise _changed(shard, f"{shard.size:,} bytes, modified since")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    # Where the file system reads in large pieces, they are mapped by one entry each: half the misses of the TLB.
    with contextlib.suppress(AttributeError, OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def _changed(shard: Shard, found: str) -> ChangedError:
    return ChangedError(
        "A shard is not the file that was planned",
        where=str(shard.path),
        found=found,
        accepted=f"{shard.size:,} bytes, not modified after the plan was made",
        hint="wait until nothing writes to the checkpoint, then run the command again; re-download a cut file",
    )


def _mlock(address: int, length: int) -> int:
    """mlock(2); 0 or the error number."""
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(length))
    return 0 if result == 0 else ctypes.get_errno()
