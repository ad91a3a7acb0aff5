"""The products that `hadron bench kernels` times: `linear`, `mlp` and `moe` on weights that lie in no cache.

M = 1 also runs on one copy again and again, which then comes from the cache: where the memory is faster than
that, the kernel and not the memory is what limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hadron.bench.limits import Arena
from hadron.bench.measure import Case
from hadron.bench.weights import Space, random_weight, weight_bytes
from hadron.kernels.cpu import linear, mlp, moe
from hadron.kernels.stored import StoredWeight
from hadron.quantization.dtypes import Element
from hadron.quantization.scheme import QuantizationScheme, parse_scheme

SCHEMES = ("mxfp4", "nvfp4", "fp8_e4m3_block_128x128", "fp8_e4m3_channel", "bf16", "int8_channel")
SHORT = {"fp8_block": "fp8_e4m3_block_128x128", "fp8_channel": "fp8_e4m3_channel", "int8": "int8_channel"}
LINEAR_SHAPES = ((12288, 4096), (4096, 12288))
LINEAR_M = (1, 4, 8, 32, 512)
MLP_SHAPES = ((2048, 4096),)
MOE_SHAPES = ((2048, 4096),)
MOE_M = (1, 32, 512)
MOE_SCHEMES = ("mxfp4", "nvfp4", "fp8_e4m3_block_128x128")
TOP_K = 8

Call = Callable[..., torch.Tensor]
LIMIT = 10.0  # of gate and up, as GLM-5.3-Flash has it


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to time; None takes the operation's own list. shapes: (n, k)."""

    schemes: tuple[str, ...] | None = None
    ms: tuple[int, ...] | None = None
    shapes: tuple[tuple[int, int], ...] | None = None
    experts: int = 64
    threads: int = 1
    best_peak: str = "bf16_gflops"  # of products of bfloat16 at this level

    def peak(self, scheme: QuantizationScheme) -> str:
        """The peak of arithmetic that products by this scheme are held against."""
        exact = scheme.element in (Element.F32, Element.F16)
        return "fp32_gflops" if exact else self.best_peak


def linear_groups(wanted: Wanted, arena: Arena) -> Iterator[list[Case]]:
    """`linear`: y = x @ w.T. A group shares the copies that are in the arena when it is yielded."""
    space = Space(arena)
    for name in wanted.schemes or SCHEMES:
        scheme = parse_scheme(name)
        for n, k in wanted.shapes or LINEAR_SHAPES:
            stored = random_weight(scheme, n, k)
            products = [linear.bind(w, None, wanted.threads) for w in space.copies(stored)]
            yield [_linear(wanted, products, stored, m) for m in wanted.ms or LINEAR_M]


def _linear(wanted: Wanted, products: list[linear.Product], stored: StoredWeight, m: int) -> Case:
    scheme, (n, k) = stored.scheme, stored.shape
    x = activations(m, k)
    return Case(
        "linear", scheme.name, m, n, k, "cpu", weight_bytes(stored) / 1e9, 2 * m * n * k / 1e9,
        lambda turn: products[turn % len(products)](x), peak=wanted.peak(scheme),
        warm=(lambda turn: products[0](x)) if m == 1 else None,
    )  # fmt: skip


class Gate(NamedTuple):
    """A gated MLP of bound products, as `mlp.bind` and `moe.bind` take one."""

    gate: Bound
    up: Bound
    down: Bound
    limit: float | None


class Bound(NamedTuple):
    """A product where a layer would have one."""

    run: linear.Product


def gated(space: Space, parts: tuple[StoredWeight, StoredWeight], threads: int) -> Gate:
    """A copy of one: parts are gate (and up) [inner, hidden] and down [hidden, inner]."""
    gate, up, down = (Bound(linear.bind(space.copy(w), None, threads)) for w in (parts[0], parts[0], parts[1]))
    return Gate(gate, up, down, LIMIT)


def gated_weights(scheme: QuantizationScheme, n: int, k: int) -> tuple[StoredWeight, StoredWeight]:
    """Of gate and up, and of down."""
    return random_weight(scheme, n, k), random_weight(scheme, k, n, seed=1)


def mlp_groups(wanted: Wanted, arena: Arena) -> Iterator[list[Case]]:
    """`mlp`: n is the inner width, k the hidden one."""
    for name in wanted.schemes or SCHEMES:
        scheme = parse_scheme(name)
        for n, k in wanted.shapes or MLP_SHAPES:
            space, parts = Space(arena), gated_weights(scheme, n, k)
            size = 2 * weight_bytes(parts[0]) + weight_bytes(parts[1])
            blocks = [gated(space, parts, wanted.threads) for _ in range(max(1, arena.size // (size + 4096)))]
            calls = [mlp.bind(b.gate, b.up, b.down, b.limit) for b in blocks]
            yield [_mlp(wanted, calls, scheme, m, n, k, size) for m in wanted.ms or LINEAR_M]


def _mlp(wanted: Wanted, calls: list[Call], scheme: QuantizationScheme, m: int, n: int, k: int, size: int) -> Case:
    x = activations(m, k)
    return Case(
        "mlp", scheme.name, m, n, k, "cpu", size / 1e9, 6 * m * n * k / 1e9,
        lambda turn: calls[turn % len(calls)](x), peak=wanted.peak(scheme),
        warm=(lambda turn: calls[0](x)) if m == 1 else None,
    )  # fmt: skip


def moe_groups(wanted: Wanted, arena: Arena) -> Iterator[list[Case]]:
    """`moe`: n is the inner width of an expert, k the hidden one. M = 1 takes other experts every time."""
    for name in wanted.schemes or MOE_SCHEMES:
        scheme = parse_scheme(name)
        for n, k in wanted.shapes or MOE_SHAPES:
            space, parts = Space(arena), gated_weights(scheme, n, k)
            size = 2 * weight_bytes(parts[0]) + weight_bytes(parts[1])
            experts = min(wanted.experts, arena.size // (size + 4096))
            call = moe.bind([gated(space, parts, wanted.threads) for _ in range(experts)], None)
            yield [_moe(wanted, call, scheme, m, n, k, experts, size) for m in wanted.ms or MOE_M]


def _moe(
    wanted: Wanted, call: Call, scheme: QuantizationScheme, m: int, n: int, k: int, experts: int, size: int
) -> Case:
    x, top_k = activations(m, k), min(TOP_K, experts)
    weights = torch.full((m, top_k), 1 / top_k)
    choices = [choose(m, experts, top_k, turn) for turn in range(max(1, experts // top_k) if m == 1 else 1)]
    touched = len(torch.unique(choices[0]))
    return Case(
        "moe", scheme.name, m, n, k, "cpu", touched * size / 1e9, 6 * m * top_k * n * k / 1e9,
        lambda turn: call(x, choices[turn % len(choices)], weights), peak=wanted.peak(scheme),
        shape=f"{experts} experts, top {top_k}",
    )  # fmt: skip


def choose(m: int, experts: int, top_k: int, turn: int) -> torch.Tensor:
    """Ids of experts, ascending, int64 [m, top_k]: at random for several tokens; one token takes the next ones."""
    if m == 1:
        return (torch.arange(top_k) + turn * top_k).remainder(experts).sort().values.view(1, top_k)
    random = torch.Generator().manual_seed(turn)
    return torch.rand(m, experts, generator=random).topk(top_k).indices.sort(dim=1).values


def activations(m: int, k: int) -> torch.Tensor:
    """float32 [m, k], normal."""
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m))


def moe_bytes(wanted: Wanted) -> int:
    """Bytes of the largest layer of experts asked for, with what separates them."""
    need = 0
    for name in wanted.schemes or MOE_SCHEMES:
        bits = parse_scheme(name).bits + (0.5 if parse_scheme(name).columns in (16, 32) else 0.05)
        for n, k in wanted.shapes or MOE_SHAPES:
            need = max(need, int(wanted.experts * (3 * n * k * bits / 8 * 1.01 + 4096)))
    return need
