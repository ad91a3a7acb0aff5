"""Native `moe`: the chosen experts of a step and the shared one as one pool of work.

Experts are summed in ascending order of their id, then the shared expert, in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from hadron.kernels.cpu.mlp import Bound, native_product
from hadron.kernels.cpu.native import extension


class Expert(Protocol):
    """A gated MLP with its three products."""

    @property
    def gate(self) -> Bound:
        """[intermediate, hidden]."""

    @property
    def up(self) -> Bound:
        """[intermediate, hidden]."""

    @property
    def down(self) -> Bound:
        """[hidden, intermediate]."""

    @property
    def limit(self) -> float | None:
        """Clamp of gate and up, or None."""


def bind(
    experts: Sequence[Expert], shared: Expert | None
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """(x [tokens, hidden], ids int64 ascending, weights float32 [tokens, top_k]) -> float32 [tokens, hidden]."""
    native = extension()
    bank = native.ExpertBank()
    for expert in [*experts, *([shared] if shared else [])]:
        # The bank keeps what it is given: products, which keep the tensors whose addresses it holds.
        triple = [native_product(part) for part in (expert.gate, expert.up, expert.down)]
        bank.add(*(product.native for product in triple), triple, math.inf if expert.limit is None else expert.limit)
    first = native_product(experts[0].down)
    level, threads, hidden = first.level, first.threads, first.rows
    has_shared, call = shared is not None, native.moe

    def moe(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        wide, ids, weights = x.float().contiguous(), ids.contiguous(), weights.float().contiguous()
        y = torch.empty(wide.shape[0], hidden)
        call(
            level, bank, has_shared, wide.data_ptr(), ids.data_ptr(), weights.data_ptr(), wide.shape[0], ids.shape[1],
            hidden, y.data_ptr(), threads,
        )  # fmt: skip
        return y

    return moe
