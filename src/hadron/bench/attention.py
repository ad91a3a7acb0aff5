"""Operations between the products: the recurrence of `kda` at the released sizes.

Whatever provider has the operation natively runs it; the row says which.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hadron.bench.kernels import Wanted
from hadron.bench.limits import Arena
from hadron.bench.measure import Case
from hadron.kernels.provider import Provider
from hadron.kernels.select import KernelChoice, select
from hadron.layers.dimensions import KdaDimensions

KDA = KdaDimensions(hidden=4096, heads=64, head_dim=128, conv_kernel=4, lower_bound=-5.0, norm_eps=1e-5)
KDA_M = (1, 64)
_KDA_FLOPS = 8  # for each element of the state: decay, read by k, add, read by q


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
