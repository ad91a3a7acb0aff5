"""Native `mlp`: gate, up, clamp, SiLU, product and down in one call, each weight in its own scheme."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch

from hadron.kernels.cpu.linear import Product
from hadron.kernels.cpu.native import extension


class Bound(Protocol):
    """A layer's product; `run` is what its kernel bound."""

    @property
    def run(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """x [tokens, in] -> float32 [tokens, out]."""


def native_product(linear: Bound) -> Product:
    """The native product of a layer: mixing providers inside one block is our own bug."""
    assert isinstance(linear.run, Product), f"{linear.run!r} is not a native product"
    return linear.run


def bind(gate: Bound, up: Bound, down: Bound, limit: float | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """x [tokens, hidden] -> float32 [tokens, hidden]; limit None: no clamp."""
    products = tuple(native_product(part) for part in (gate, up, down))
    level, threads, hidden = products[0].level, products[0].threads, products[2].rows
    clamp = math.inf if limit is None else limit
    call = extension().mlp

    def mlp(x: torch.Tensor) -> torch.Tensor:
        a, b, c = products  # the addresses in a native weight are those of tensors that its product keeps
        wide = x.float().contiguous()
        y = torch.empty(wide.shape[0], hidden)
        call(level, a.native, b.native, c.native, clamp, wide.data_ptr(), wide.shape[0], y.data_ptr(), threads)
        return y

    return mlp
