"""`hadron check --data`: streams every byte of the shards and names tensors with values that cannot be.

    HC601   a weight with NaN codes (E4M3) or non-finite values (floats)
    HC602   a scale that is not finite (E8M0 byte 255, E4M3 NaN, floats)
    HC603   warning: a float scale (tensor, channel, block, group, global) that is zero;
            note: an E4M3 group scale that is zero although its codes are not. Groups that are zero
            altogether have a zero scale in NVFP4 files of several tools, which is right and not reported.

Reads into one fixed buffer instead of mapping: a file cut short meanwhile must not end in a signal.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hadron.checkpoint.facts import Facts, Shard
from hadron.checkpoint.header import Tensor, open_file
from hadron.checkpoint.header_faults import listing
from hadron.checkpoint.source import Progress, no_progress
from hadron.errors import CheckpointError
from hadron.problems import Problem, Severity, problem
from hadron.quantization.scheme import Packing, QuantizationScheme, Storage

CHUNK_BYTES = 8 << 20
_SCALES = {"scale", "global_scale", "input_scale"}
#: dtype -> (unsigned type, mask without the sign, least masked value that is not finite)
_LIMITS: dict[str, tuple[type[np.unsignedinteger[Any]], int, int]] = {
    "F8_E4M3": (np.uint8, 0x7F, 0x7F),
    "F8_E5M2": (np.uint8, 0x7F, 0x7C),
    "F8_E8M0": (np.uint8, 0xFF, 0xFF),
    "BF16": (np.uint16, 0x7FFF, 0x7F80),
    "F16": (np.uint16, 0x7FFF, 0x7C00),
    "F32": (np.uint32, 0x7FFF_FFFF, 0x7F80_0000),
    "F64": (np.uint64, 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
}

Bytes = npt.NDArray[np.uint8]


class ScannedModule(Protocol):
    """What the scan asks of a module's plan."""

    @property
    def scheme(self) -> QuantizationScheme:
        """How the weight is quantized."""

    @property
    def storage(self) -> Storage:
        """How it is laid out."""

    @property
    def tensors(self) -> dict[str, str]:
        """Role -> tensor name."""


class ScannedPlan(Protocol):
    """What the scan asks of a `LoadPlan`."""

    @property
    def facts(self) -> Facts:
        """The checkpoint."""

    @property
    def modules(self) -> Iterable[ScannedModule]:
        """Every module."""


class _Role(NamedTuple):
    role: str
    module: ScannedModule


@dataclass
class _Finding:
    """Counts of one tensor; first is the place of the first value counted in `bad`."""

    seen: int = 0
    bad: int = 0
    zero: int = 0
    first: int = -1


def scan(plan: ScannedPlan, progress: Progress = no_progress) -> list[Problem]:
    """Every problem in the data of a local checkpoint. progress gets `data`, bytes done, bytes in all.

    `CheckpointError` when only headers are at hand.
    """
    facts = plan.facts
    if any(shard.path is None for shard in facts.shards):
        raise CheckpointError(
            f"the data of {facts.model} is not here",
            where=facts.model,
            found="headers fetched from the Hub",
            accepted="a local folder",
            hint=f"run `hf download {facts.model}` first",
        )
    roles = {name: _Role(role, module) for module in plan.modules for role, name in module.tensors.items()}
    by_shard: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in facts.tensors.items():
        by_shard.setdefault(tensor.shard, []).append((name, tensor))
    report = _Report()
    meter = _Meter(progress, sum(tensor.nbytes for tensor in facts.tensors.values()))
    buffer = np.empty(CHUNK_BYTES, np.uint8)
    for number, shard in enumerate(facts.shards):
        members = sorted(by_shard.get(number, []), key=lambda item: item[1].data_offsets)
        if not members or shard.path is None:
            continue
        try:
            with open_file(shard.path) as file:
                for name, tensor in members:
                    finding = _Finding()
                    dtype = _number_format(tensor, roles.get(name))
                    for chunk in _chunks(file, shard, tensor, buffer):
                        if dtype is not None:
                            _count(chunk, dtype, finding)
                        meter.advance(chunk.nbytes)
                    report.add(name, tensor, roles.get(name), finding, facts)
        except OSError as error:
            report.unreadable(shard, error)
    meter.finish()
    return report.problems()


class _Meter:
    """Passes progress on, but not for every small tensor."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = self._reported = 0

    def advance(self, count: int) -> None:
        """Count bytes."""
        self._done += count
        if self._done - self._reported >= 4 * CHUNK_BYTES:
            self.finish()

    def finish(self) -> None:
        """Report where we are."""
        self._reported = self._done
        self._progress("data", self._done, self._total)


def _number_format(tensor: Tensor, claim: _Role | None) -> str | None:
    """The dtype to look for faults in; None where every bit pattern is a number."""
    if claim and claim.role == "scale" and claim.module.scheme.scale == "e8m0" and tensor.dtype == "U8":
        return "F8_E8M0"
    return tensor.dtype if tensor.dtype in _LIMITS else None


def _chunks(file: FileIO, shard: Shard, tensor: Tensor, buffer: Bytes) -> Iterator[Bytes]:
    """The tensor's bytes, a buffer at a time; `OSError` where the file ends early."""
    offset, end = (shard.data_start + place for place in tensor.data_offsets)
    while offset < end:
        chunk = buffer[: min(end - offset, buffer.nbytes)]
        filled = 0
        while filled < chunk.nbytes:
            got = os.preadv(file.fileno(), [chunk[filled:].data], offset + filled)
            if got == 0:
                raise OSError(0, f"the file ends at {offset + filled}, its header needs {end}")
            filled += got
        offset += filled
        yield chunk


def _count(chunk: Bytes, dtype: str, finding: _Finding) -> None:
    unsigned, mask, limit = _LIMITS[dtype]
    values = chunk.view(unsigned)
    magnitudes = values if mask == np.iinfo(unsigned).max else values & unsigned(mask)
    if int(magnitudes.max()) >= limit:
        bad = magnitudes >= limit
        finding.bad += int(np.count_nonzero(bad))
        if finding.first < 0:
            finding.first = finding.seen + int(np.argmax(bad))
    if int(magnitudes.min()) == 0:
        finding.zero += int(np.count_nonzero(magnitudes == 0))
    finding.seen += values.size


class _Report:
    """Groups findings: one problem for each kind of fault, naming every tensor."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], list[tuple[str, int, str]]] = {}
        self._unreadable: list[Problem] = []

    def unreadable(self, shard: Shard, error: OSError) -> None:
        """A shard that cannot be read to its end."""
        self._unreadable.append(
            problem(
                "HC105",
                f"{shard.name} cannot be read to its end",
                found=error.strerror or str(error),
                accepted="the bytes that its header describes",
                hint="the disk fails, or the file was changed meanwhile; run the check again",
            )
        )

    def add(self, name: str, tensor: Tensor, claim: _Role | None, finding: _Finding, facts: Facts) -> None:
        """Take in one tensor."""
        is_scale = claim is not None and claim.role in _SCALES
        if finding.bad:
            code = "HC602" if is_scale else "HC601"
            where = "" if len(tensor.shape) == 0 else f" (first at {_place(finding.first, tensor.shape)})"
            self._put(code, tensor.dtype, name, finding.bad, where)
        if not (is_scale and finding.zero) or claim is None:
            return
        if tensor.dtype in ("U8", "F8_E8M0"):
            return  # byte 0 is 2^-127
        if name.endswith("_global_scale"):  # compressed-tensors divides by it
            self._put("HC602", tensor.dtype, name, finding.zero, "")
            return
        if tensor.dtype != "F8_E4M3":
            self._put("HC603", tensor.dtype, name, finding.zero, "")
            return
        lost = _lost_groups(name, claim.module, facts)
        if lost:
            self._put("HC603", "F8_E4M3", name, lost, "")

    def _put(self, code: str, dtype: str, name: str, count: int, where: str) -> None:
        self._found.setdefault((code, dtype), []).append((name, count, where))

    def problems(self) -> list[Problem]:
        """Everything found, grouped."""
        problems = list(self._unreadable)
        for (code, dtype), rows in sorted(self._found.items()):
            names = [name for name, _, _ in rows]
            first, count, where = rows[0]
            what, accepted, hint = _TEXTS[code]
            severity = None
            if code == "HC603" and dtype == "F8_E4M3":
                what, accepted, hint = _LOST
                severity = Severity.NOTE
            problems.append(
                problem(
                    code,
                    f"{len(names)} {dtype} tensor(s) {what} ({listing(names)})",
                    found=f"{count} in {first}{where}, {sum(row[1] for row in rows)} in all",
                    accepted=accepted,
                    hint=hint,
                    tensors=tuple(names),
                    severity=severity,
                )
            )
        return problems


_AGAIN = "the file is damaged or was quantized wrongly; compare its checksum with the release, or quantize again"
_TEXTS: Mapping[str, tuple[str, str, str]] = {
    "HC601": ("hold NaN codes or non-finite values", "finite numbers", _AGAIN),
    "HC602": ("are scales that are, or make a weight, NaN or infinite", "finite scales, divisors not zero", _AGAIN),
    "HC603": ("are scales with zeros", "scales above zero", "what they scale is lost: weights of zero; quantize again"),
}
_LOST = (
    "have zero group scales over codes that are not zero",
    "zero scales for groups of zeros only",
    "these groups count as zeros: they were too small for the scale; usually harmless",
)


def _place(index: int, shape: tuple[int, ...]) -> str:
    """Row and column, and so on, of an element."""
    return "[" + ", ".join(str(int(i)) for i in np.unravel_index(index, shape)) + "]"


def _lost_groups(scale_name: str, module: ScannedModule, facts: Facts) -> int:
    """Groups whose E4M3 scale is zero although not all their 4-bit codes are."""
    scale = facts.tensors[scale_name]
    weight = facts.tensors.get(module.tensors.get("weight", ""))
    if weight is None or module.scheme.bits != 4 or module.storage.packing is not Packing.ROW_MAJOR:
        return 0
    width, rest = divmod(weight.nbytes, scale.nbytes)
    if rest or not width:  # a partial last group: the weight's rows do not line up with the scales
        return 0
    lost = 0
    scales = np.empty(CHUNK_BYTES // width, np.uint8)
    codes = np.empty(scales.nbytes * width, np.uint8)
    scale_shard, weight_shard = facts.shards[scale.shard], facts.shards[weight.shard]
    if scale_shard.path is None or weight_shard.path is None:
        return 0
    with open_file(scale_shard.path) as scale_file, open_file(weight_shard.path) as weight_file:
        pairs = zip(
            _chunks(scale_file, scale_shard, scale, scales),
            _chunks(weight_file, weight_shard, weight, codes),
            strict=True,
        )
        for some_scales, some_codes in pairs:
            zero = (some_scales & 0x7F) == 0
            lost += int(np.count_nonzero(zero & ((some_codes & 0x77).reshape(-1, width) != 0).any(axis=1)))
    return lost
