"""Operations between the products at the released sizes: `kda`, `mla` over selected latents, `indexer`.

Whatever provider has the operation natively runs it; the row says which.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hadron.bench.kernels import Wanted
from hadron.bench.limits import Arena
from hadron.bench.measure import Case
from hadron.bench.weights import random_weight, weight_bytes
from hadron.kernels.provider import Provider
from hadron.kernels.select import KernelChoice, select
from hadron.layers.dimensions import KdaDimensions
from hadron.quantization.scheme import BF16

KDA = KdaDimensions(hidden=4096, heads=64, head_dim=128, conv_kernel=4, lower_bound=-5.0, norm_eps=1e-5)
KDA_M = (1, 64)
_KDA_FLOPS = 8  # for each element of the state: decay, read by k, add, read by q

HEADS, RANK, PAGE = 64, 512, 64  # of latent attention
SELECTED, CONTEXT = 2048, 16384
MLA_M = (1, 64)
#: (nope, v): what a head has, and so little that only the attention over latents counts
MLA_SIZES = ((256, 256), (16, 16))
INDEX_HEADS, INDEX_SIZE, POOL, POOLS = 32, 128, 4, 1 << 18
INDEXER_M = (1, 8)


def provider_of(operation: str) -> str:
    """Who runs an operation: `cpu` where it is native, else `reference`."""
    choice = select(operation, providers=("cpu", "reference"))
    assert isinstance(choice, KernelChoice)
    return choice.provider


def kda_groups(wanted: Wanted, arena: Arena) -> Iterator[list[Case]]:
    """`kda`: one request of m tokens, another request's state every time. n: width; k: size of a head."""
    provider = provider_of("kda")
    width, kernel = KDA.width, KDA.conv_kernel
    state = KDA.heads * KDA.head_dim**2
    slots = max(1, arena.size // (4 * state))
    arena.tensor.zero_()
    matrices = arena.tensor[: slots * 4 * state].view(torch.float32).view(slots, KDA.heads, KDA.head_dim, KDA.head_dim)
    windows = torch.zeros(slots, 3 * width, kernel - 1, dtype=torch.bfloat16)
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    bind = Provider({"kda": provider}, threads=wanted.threads).function("kda", "bind")
    block = bind([normal(width, kernel) for _ in range(3)], normal(KDA.heads), normal(width), normal(KDA.head_dim), KDA)

    def case(m: int) -> Case:
        q, k, v, forget, gate = (normal(m, width).bfloat16() for _ in range(5))
        beta = normal(m, KDA.heads).bfloat16()
        return Case(
            "kda", "f32", m, width, KDA.head_dim, provider, 2 * 4 * state / 1e9, _KDA_FLOPS * m * state / 1e9,
            lambda turn: block(q, k, v, forget, beta, gate, matrices, windows, [turn % slots], [m]),
            peak="fp32_gflops", bandwidth="update_gbps", shape=f"{KDA.heads} heads of {KDA.head_dim} x {KDA.head_dim}",
        )  # fmt: skip

    yield [case(m) for m in wanted.ms or KDA_M]


def mla_groups(wanted: Wanted, arena: Arena) -> Iterator[list[Case]]:
    """`mla`: absorb, attend over 2048 latents of a context of 16 k, expand; bf16 cache and `kv_b_proj`.

    n: values of a head; k: width of a latent. Each call is of another request.
    """
    provider = provider_of("mla")
    pages = random_bf16(arena).view(-1, PAGE, RANK)
    blocks = CONTEXT // PAGE
    requests = max(1, len(pages) // blocks)
    random = torch.Generator().manual_seed(0)
    for nope, v in MLA_SIZES:
        weight = random_weight(BF16, HEADS * (nope + v), RANK)
        bind = Provider({"mla": provider}, threads=wanted.threads).function("mla", "bind")
        bound = bind(weight, HEADS, nope, 0, v, nope**-0.5)

        def case(m: int, nope: int = nope, v: int = v, bound: Any = bound, size: int = weight_bytes(weight)) -> Case:
            query = torch.randn(m, HEADS, nope, generator=random).bfloat16()
            chosen = torch.rand(m, CONTEXT, generator=random).topk(SELECTED).indices.sort(dim=1).values
            owners = torch.zeros(m, dtype=torch.int64)
            tables = [torch.arange(r * blocks, (r + 1) * blocks).view(1, -1) for r in range(requests)]
            flops = 2 * m * HEADS * (2 * SELECTED * RANK + (nope + v) * RANK)
            return Case(
                "mla", "bf16", m, v, RANK, provider, (size + m * SELECTED * RANK * 2) / 1e9, flops / 1e9,
                lambda turn: bound.sparse(query, chosen, pages, tables[turn % requests], owners),
                peak=wanted.peak(BF16), shape=f"{HEADS} heads of {nope}, {SELECTED} latents",
            )  # fmt: skip

        yield [case(m) for m in wanted.ms or MLA_M]


def indexer_groups(wanted: Wanted, arena: Arena) -> Iterator[list[Case]]:
    """`indexer`: scores of 32 heads against 262144 pooled keys, and the best 512 pools.

    n: keys; k: size of a head. Each call is of another request, as far as the arena holds them.
    """
    provider = provider_of("indexer")
    rows = PAGE // POOL
    pages = random_bf16(arena).view(-1, rows, INDEX_SIZE)
    pools = min(POOLS, len(pages) * rows)
    blocks = pools // rows
    requests = max(1, len(pages) // blocks)
    random = torch.Generator().manual_seed(0)
    choose = Provider({"indexer": provider}, threads=wanted.threads).function("indexer", "choose")

    def case(m: int) -> Case:
        query = torch.randn(m, INDEX_HEADS, INDEX_SIZE, generator=random).bfloat16()
        weights = torch.randn(m, INDEX_HEADS, generator=random)
        length = pools * POOL
        positions = torch.arange(length - m, length)
        tables = [torch.arange(r * blocks, (r + 1) * blocks).view(1, -1) for r in range(requests)]
        return Case(
            "indexer", "bf16", m, pools, INDEX_SIZE, provider, pools * INDEX_SIZE * 2 / 1e9,
            2 * m * pools * INDEX_HEADS * INDEX_SIZE / 1e9,
            lambda turn: choose(
                query, weights, pages, tables[turn % requests], positions, [m], [length], SELECTED, POOL, True
            ),
            peak=wanted.peak(BF16), shape=f"{INDEX_HEADS} heads, {pools} keys",
        )  # fmt: skip

    yield [case(m) for m in wanted.ms or INDEXER_M]


def random_bf16(arena: Arena) -> torch.Tensor:
    """The whole arena as bfloat16, normal: a block of random numbers over and over."""
    values = arena.tensor[: arena.size // (1 << 16) * (1 << 16)].view(torch.bfloat16)
    block = torch.randn(min(len(values), 1 << 20), generator=torch.Generator().manual_seed(1)).bfloat16()
    for start in range(0, len(values), len(block)):
        part = values[start : start + len(block)]
        part.copy_(block[: len(part)])
    return values
