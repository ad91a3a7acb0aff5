"""Native `router`: float32 scores from the gate in whatever scheme it is stored, then the choice of experts.

Activations are not rounded, and no expanded gate is kept: plain rows are read where they lie, others are
expanded a few at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from hadron.kernels.cpu.linear import Product
from hadron.kernels.cpu.native import extension
from hadron.kernels.cpu.plain import numbers
from hadron.kernels.sizes import RouterSizes


class _Gate(Protocol):
    """A layer's product; `run` is what its kernel bound."""

    @property
    def run(self) -> Callable[[torch.Tensor], torch.Tensor]: ...


def bind(
    gate: _Gate, bias: torch.Tensor, dims: RouterSizes, *, threads: int = 1, level: Any = None
) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """x [tokens, hidden] -> (ids int64 ascending, weights float32), both [tokens, top_k]."""
    product = gate.run
    assert isinstance(product, Product), f"{product!r} is not a native product"
    used = product.level if level is None else level
    call = extension().route
    sizes = (dims.top_k, dims.groups, dims.topk_groups, dims.normalize, dims.scaling)

    # `product` is held, and with it the bytes that its native weight points to.
    def route(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = x.float().contiguous()
        ids = torch.empty(wide.shape[0], dims.top_k, dtype=torch.int64)
        weights = torch.empty(wide.shape[0], dims.top_k)
        call(
            used, product.native, *numbers(bias), *sizes, wide.data_ptr(), wide.shape[0], ids.data_ptr(),
            weights.data_ptr(), threads,
        )  # fmt: skip
        return ids, weights

    return route
