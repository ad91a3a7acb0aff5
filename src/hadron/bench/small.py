"""Operations around the products at the released sizes: `router`, `hyper_connection`, `norm`, `rope`, `embedding`,
`lm_head`, `quantize`.

Their weights lie in no cache. Their activations do, as in a model, where another operation has just written them; both
are counted, so that the fraction of the memory's bandwidth can be above 1 where activations are most of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from hadron.bench.attention import provider_of, random_bf16
from hadron.bench.kernels import Bound, Wanted, activations
from hadron.bench.limits import Arena
from hadron.bench.measure import Case
from hadron.bench.weights import Space, random_weight, weight_bytes
from hadron.kernels.cpu import linear
from hadron.kernels.provider import Provider
from hadron.layers.dimensions import HyperConnectionDimensions, MoeDimensions
from hadron.quantization.dtypes import Element
from hadron.quantization.scheme import BF16, ActivationScheme, Granularity

M = (1, 64)
HIDDEN, VOCABULARY, BEST = 4096, 154_880, 40
HEADS, HEAD, TURNED, THETA = 64, 256, 64, 8e6
EXPERTS = MoeDimensions(
    HIDDEN, experts=288, top_k=8, intermediate=2048, shared_intermediate=2048, groups=1, topk_groups=1, normalize=True,
    scaling=2.5, limit=10.0,
)  # fmt: skip
STREAMS = HyperConnectionDimensions(HIDDEN, streams=4, sinkhorn_iterations=20, eps=1e-6, norm_eps=1e-5)
ACTIVATIONS = (
    ActivationScheme(Element.E4M3, Granularity.CHANNEL, scale="float", dynamic=True),
    ActivationScheme(Element.E2M1, Granularity.GROUP, 32, "e8m0", dynamic=True),
    ActivationScheme(Element.E2M1, Granularity.GROUP, 16, "e4m3", dynamic=True),
)


def _function(wanted: Wanted, operation: str, name: str) -> Callable[..., Any]:
    return Provider({operation: provider_of(operation)}, threads=wanted.threads).function(operation, name)


def router_groups(wanted: Wanted, arena: Arena) -> Iterator[list[Case]]:
    """`router`: the gate's product and the choice. n: experts; k: hidden width."""
    gate, bias = random_weight(BF16, EXPERTS.experts, HIDDEN), torch.rand(EXPERTS.experts)
    bind = _function(wanted, "router", "bind")
    routes = [bind(Bound(linear.bind(copy, None, wanted.threads)), bias, EXPERTS) for copy in Space(arena).copies(gate)]

    def case(m: int) -> Case:
        x = activations(m, HIDDEN)
        size = weight_bytes(gate) + 4 * x.numel()
        return Case(
            "router", "bf16", m, EXPERTS.experts, HIDDEN, provider_of("router"), size / 1e9,
            2 * m * EXPERTS.experts * HIDDEN / 1e9, lambda turn: routes[turn % len(routes)](x), peak="fp32_gflops",
            shape=f"{EXPERTS.experts} experts, top {EXPERTS.top_k}",
        )  # fmt: skip

    yield [case(m) for m in wanted.ms or M]


def hyper_connection_groups(wanted: Wanted, arena: Arena) -> Iterator[list[Case]]:
    """`hyper_connection`: a site, before its block and after it. n: mixes; k: width of all streams."""
    width = STREAMS.streams * HIDDEN
    weight = random_weight(BF16, STREAMS.mixes, width)
    sites = [copy.weight for copy in Space(arena).copies(weight)]
    base, scale, norm = torch.randn(STREAMS.mixes), torch.ones(3), torch.ones(HIDDEN)
    enter, spread = (_function(wanted, "hyper_connection", name) for name in ("enter", "spread"))

    def case(m: int) -> Case:
        streams = activations(m, width).view(m, STREAMS.streams, HIDDEN)

        def call(turn: int) -> torch.Tensor:
            inner, post, comb = enter(
                streams, sites[turn % len(sites)], base, scale, STREAMS, norm, 1e-5, torch.bfloat16
            )
            out: torch.Tensor = spread(inner, post, comb, streams)
            return out

        # enter reads the streams and writes its block's input; spread reads both and writes the streams
        moved = weight_bytes(weight) + 3 * 4 * streams.numel() + 2 * 2 * m * HIDDEN
        return Case(
            "hyper_connection", "bf16", m, STREAMS.mixes, width, provider_of("hyper_connection"), moved / 1e9,
            2 * m * width * (STREAMS.mixes + STREAMS.streams + 1) / 1e9, call, peak="fp32_gflops",
            shape=f"{STREAMS.streams} streams of {HIDDEN}",
        )  # fmt: skip

    yield [case(m) for m in wanted.ms or M]


def norm_groups(wanted: Wanted, arena: Arena) -> Iterator[list[Case]]:
    """`norm`: an RMS norm of float32 rows to bfloat16. n, k: their width."""
    norm, weight = _function(wanted, "norm", "rms_norm"), torch.ones(HIDDEN)

    def case(m: int) -> Case:
        x = activations(m, HIDDEN)
        return Case(
            "norm", "f32", m, HIDDEN, HIDDEN, provider_of("norm"), 6 * x.numel() / 1e9, 4 * x.numel() / 1e9,
            lambda turn: norm(x, weight, 1e-5, torch.bfloat16), peak="fp32_gflops",
        )  # fmt: skip

    yield [case(m) for m in wanted.ms or M]


def rope_groups(wanted: Wanted, arena: Arena) -> Iterator[list[Case]]:
    """`rope`: the rotary part of every head of a bfloat16 query. n: width of a head; k: elements that turn."""
    rotate = _function(wanted, "rope", "rotate_part")

    def case(m: int) -> Case:
        x, positions = activations(m, HEADS * HEAD).bfloat16().view(m, HEADS, HEAD), torch.arange(m) + 100_000
        return Case(
            "rope", "bf16", m, HEAD, TURNED, provider_of("rope"), 4 * x.numel() / 1e9, 3 * m * HEADS * TURNED / 1e9,
            lambda turn: rotate(x, HEAD - TURNED, TURNED, positions, THETA, True), peak="fp32_gflops",
            shape=f"{HEADS} heads",
        )  # fmt: skip

    yield [case(m) for m in wanted.ms or M]


def embedding_groups(wanted: Wanted, arena: Arena) -> Iterator[list[Case]]:
    """`embedding`: rows of a bfloat16 table, others every time. n: its rows; k: their width."""
    table = random_bf16(arena).view(-1, HIDDEN)[:VOCABULARY]
    rows = _function(wanted, "embedding", "rows")
    random = torch.Generator().manual_seed(0)

    def case(m: int) -> Case:
        ids = torch.randint(0, len(table), (256, m), generator=random)
        return Case(
            "embedding", "bf16", m, len(table), HIDDEN, provider_of("embedding"), 6 * m * HIDDEN / 1e9, 0.0,
            lambda turn: rows(table, ids[turn % 256]), peak="fp32_gflops",
        )  # fmt: skip

    yield [case(m) for m in wanted.ms or M]


def lm_head_groups(wanted: Wanted, arena: Arena) -> Iterator[list[Case]]:
    """`lm_head`: logits of a bfloat16 table and their best 40. n: its rows, as many as the arena holds; k: their
    width."""
    table = random_bf16(arena).view(-1, HIDDEN)[:VOCABULARY]
    logits, best = _function(wanted, "lm_head", "bind")(table), _function(wanted, "lm_head", "best")

    def case(m: int) -> Case:
        x = activations(m, HIDDEN)
        return Case(
            "lm_head", "bf16", m, len(table), HIDDEN, provider_of("lm_head"), 2 * table.numel() / 1e9,
            2 * m * table.numel() / 1e9, lambda turn: best(logits(x), BEST), peak=wanted.peak(BF16),
            shape=f"best {BEST}",
        )  # fmt: skip

    yield [case(m) for m in wanted.ms or M]


def quantize_groups(wanted: Wanted, arena: Arena) -> Iterator[list[Case]]:
    """`quantize`: what emulation makes of float32 rows. n, k: their width."""
    bind = _function(wanted, "quantize", "bind")
    for scheme in ACTIVATIONS:
        quantize = bind(scheme, None)

        def case(m: int, scheme: ActivationScheme = scheme, quantize: Any = quantize) -> Case:
            x = activations(m, HIDDEN)
            return Case(
                "quantize", scheme.name, m, HIDDEN, HIDDEN, provider_of("quantize"), 8 * x.numel() / 1e9, 0.0,
                lambda turn: quantize(x), peak="fp32_gflops",
            )  # fmt: skip

        yield [case(m) for m in wanted.ms or M]
