"""Gated MLP: `gate_proj`, `up_proj` and `down_proj`, each in its own scheme."""

from __future__ import annotations

import torch

from hadron.kernels.provider import Provider
from hadron.layers.dimensions import MlpDimensions
from hadron.layers.weights import Weights


class Mlp:
    """down(silu(gate(x)) * up(x)) with the clamp of its dimensions. prefix: `layers.0.mlp`."""

    __slots__ = ("_mlp", "down", "gate", "limit", "up")

    def __init__(self, prefix: str, dims: MlpDimensions, weights: Weights, kernels: Provider | None = None) -> None:
        self.gate = weights.linear(f"{prefix}.gate_proj")
        self.up = weights.linear(f"{prefix}.up_proj")
        self.down = weights.linear(f"{prefix}.down_proj")
        self.limit = dims.limit
        self._mlp = (kernels or Provider()).function("mlp", "bind")(self.gate, self.up, self.down, self.limit)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden] -> [tokens, hidden] in x's dtype."""
        y: torch.Tensor = self._mlp(x)
        return y.to(x.dtype)
