"""Definition of `mlp`: down(silu(min(gate(x), limit)) * clamp(up(x), -limit, limit)).

gate, up and down are whatever multiplies by a weight: each has its own scheme, scales and activation
emulation, so halves that differ cannot be mixed up. Source: transformers 5.23 `glm5_next` (clamp),
`glm_moe_dsa` (none).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

Product = Callable[[torch.Tensor], torch.Tensor]


def mlp(x: torch.Tensor, gate: Product, up: Product, down: Product, limit: float | None) -> torch.Tensor:
    """x [tokens, hidden] -> [tokens, hidden] in x's dtype; the nonlinearity in float32."""
    gated, raised = gate(x).float(), up(x).float()
    if limit is not None:
        gated, raised = gated.clamp(max=limit), raised.clamp(-limit, limit)
    return down((functional.silu(gated) * raised).to(x.dtype))


def bind(gate: Product, up: Product, down: Product, limit: float | None) -> Product:
    """`mlp` of three products, as a layer keeps it."""
    return partial(mlp, gate=gate, up=up, down=down, limit=limit)
