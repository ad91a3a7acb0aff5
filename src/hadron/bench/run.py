"""Runs what `hadron bench kernels` was asked for: arena, probes, groups of cases, report."""

from __future__ import annotations

import os
import platform as host
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version

import psutil  # type: ignore[import-untyped]
import torch

from hadron.bench import attention, small
from hadron.bench import kernels as products
from hadron.bench.kernels import SHORT, Wanted
from hadron.bench.limits import Arena, Probes
from hadron.bench.measure import Case, Row, measure
from hadron.bench.report import Environment, KernelReport
from hadron.errors import CapacityError, UsageError
from hadron.kernels.cpu import native
from hadron.platforms import detect
from hadron.quantization.scheme import parse_scheme

#: Bytes of weights that copies are spread over, at least.
ARENA = 1 << 30

#: these multiply by a weight whose scheme and shape may be asked for; the others have the released sizes
PRODUCTS = ("linear", "mlp", "moe")
DEFAULT_OPS = ("linear", "moe")
EXPERTS = 64
_GROUPS: dict[str, Callable[[Wanted, Arena], Iterator[list[Case]]]] = {
    "linear": products.linear_groups,
    "mlp": products.mlp_groups,
    "moe": products.moe_groups,
    "kda": attention.kda_groups,
    "mla": attention.mla_groups,
    "indexer": attention.indexer_groups,
    "router": small.router_groups,
    "hyper_connection": small.hyper_connection_groups,
    "norm": small.norm_groups,
    "rope": small.rope_groups,
    "embedding": small.embedding_groups,
    "lm_head": small.lm_head_groups,
    "quantize": small.quantize_groups,
}
OPS = tuple(_GROUPS)
#: operation -> its usual schemes, shapes and numbers of tokens
_USUAL: dict[str, tuple[Sequence[object], Sequence[object], Sequence[int]]] = {
    "linear": (products.SCHEMES, products.LINEAR_SHAPES, products.LINEAR_M),
    "mlp": (products.SCHEMES, products.MLP_SHAPES, products.LINEAR_M),
    "moe": (products.MOE_SCHEMES, products.MOE_SHAPES, products.MOE_M),
    "kda": (("f32",), (attention.KDA,), attention.KDA_M),
    "mla": (("bf16",), attention.MLA_SIZES, attention.MLA_M),
    "indexer": (("bf16",), (attention.POOLS,), attention.INDEXER_M),
    **dict.fromkeys(("router", "hyper_connection", "norm", "rope", "embedding", "lm_head"), (("",), ("",), small.M)),
    "quantize": (small.ACTIVATIONS, ("",), small.M),
}


@dataclass(frozen=True, slots=True)
class Asked:
    """What a command line asked for; None takes the usual."""

    ops: tuple[str, ...] = DEFAULT_OPS
    schemes: tuple[str, ...] | None = None
    ms: tuple[int, ...] | None = None
    shape: tuple[int, int] | None = None
    experts: int | None = None
    threads: int | None = None
    isa: str | None = None
    rounds: int = 3

    def __post_init__(self) -> None:
        """`UsageError` for what an operation would not heed."""
        deaf = [op for op in self.ops if op not in PRODUCTS]
        for flag, value in (("--scheme", self.schemes), ("--n and --k", self.shape)):
            if value is not None and deaf:
                raise _unheeded(flag, deaf, PRODUCTS)
        if self.experts is not None and "moe" not in self.ops:
            raise _unheeded("--experts", self.ops, ("moe",))


def _unheeded(flag: str, ops: Sequence[str], heeding: Sequence[str]) -> UsageError:
    return UsageError(
        "an option says nothing to an operation",
        where=flag,
        found=f"--op {','.join(ops)}",
        accepted=f"with {', '.join(heeding)}",
        hint="leave it out, or measure the others in a run of their own",
    )


def scheme_names(text: str | None) -> tuple[str, ...] | None:
    """Schemes by the names that `check` prints, or short ones; `UsageError` for others."""
    if text is None:
        return None
    names = tuple(SHORT.get(word, word) for word in text.split(","))
    for name in names:
        try:
            parse_scheme(name)
        except ValueError:
            raise UsageError(
                "there is no such scheme",
                where="--scheme",
                found=repr(name)[:80],
                accepted="names that `hadron check` prints, such as " + ", ".join((*products.SCHEMES, *SHORT)),
                hint="give several with commas between them",
            ) from None
    return names


@contextmanager
def level_of(isa: str | None) -> Iterator[str]:
    """The level that is in use within, by the variable that forces one; `UsageError` when it does not run here."""
    native.extension()
    before = os.environ.get(native.ENVIRONMENT)
    if isa is not None:
        os.environ[native.ENVIRONMENT] = isa
    try:
        yield native.level_name()
    finally:
        if isa is not None:
            del os.environ[native.ENVIRONMENT]
            if before is not None:
                os.environ[native.ENVIRONMENT] = before


def kernels(asked: Asked, progress: Callable[[int, int], None] = lambda done, total: None) -> KernelReport:
    """Measure; `UnsupportedError` without native kernels, `CapacityError` where there is no memory for it."""
    threads = asked.threads or torch.get_num_threads()
    torch.set_num_threads(threads)  # of operations that run on reference kernels
    with level_of(asked.isa) as isa, torch.inference_mode():
        wanted = Wanted(
            schemes=asked.schemes,
            ms=asked.ms,
            shapes=None if asked.shape is None else (asked.shape,),
            experts=asked.experts or EXPERTS,
            threads=threads,
        )
        arena = Arena(fitting(max(ARENA, products.moe_bytes(wanted) if "moe" in asked.ops else 0)))
        probes = Probes(arena, isa, threads)
        wanted = replace(wanted, best_peak=probes.best_peak())
        rows: list[Row] = []
        for op in asked.ops:
            for group in _GROUPS[op](wanted, arena):
                rows += measure(group, probes, threads=threads, isa=isa, rounds=asked.rounds)
                progress(len(rows), _count(asked.ops, wanted))
        limits = probes.summary()
    notes = [
        f"Weights come from {arena.size / 1e9:.2f} GB of copies taken in turn, 8 bytes off a cache line (in "
        "huge pages where the system grants them): cold at M = 1 unless a cache of this machine is larger than that.",
        "fraction: of the limit named beside it (the one that would take longer), measured just before and after; "
        f"the median of {asked.rounds} rounds. Speeds are means of a round.",
        "from cache: the same call on one copy again and again.",
    ]
    return KernelReport(environment(threads, isa), limits, rows, notes)


def _count(ops: tuple[str, ...], wanted: Wanted) -> int:
    """How many rows there will be."""
    rows = 0
    for op in ops:
        schemes, shapes, ms = _USUAL[op]
        by_weight = op in PRODUCTS
        schemes = wanted.schemes or schemes if by_weight else schemes
        shapes = wanted.shapes or shapes if by_weight else shapes
        rows += len(schemes) * len(shapes) * len(wanted.ms or ms)
    return rows


def fitting(size: int) -> int:
    """`size`, or less where the memory forbids it; `CapacityError` where nothing useful fits."""
    available = int(psutil.virtual_memory().available * 0.7)
    if available < min(size, 1 << 28):
        raise CapacityError(
            "there is no memory to measure in",
            where="hadron bench",
            found=f"{available / 1e9:.2f} GB that could be used",
            accepted=f"at least {(1 << 28) / 1e9:.2f} GB, better {size / 1e9:.2f} GB",
            hint="end other programs",
        )
    return min(size, available)


def environment(threads: int, isa: str) -> Environment:
    """This machine and its software."""
    cpu = detect("cpu")
    return Environment(
        processor=cpu.description, cores=cpu.cores or 0, threads=threads, isa=isa, system=host.platform(),
        python=host.python_version(), torch=str(torch.__version__), hadron=version("hadron-llm"),
        load=os.getloadavg()[0],
    )  # fmt: skip
