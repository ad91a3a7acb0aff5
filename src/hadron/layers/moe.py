"""Mixture of experts: router, routed experts, shared expert.

Every expert is an MLP of its own, in whatever scheme it is stored: banks whose members differ, and a
shared expert unlike the routed ones, need no special case.
"""

from __future__ import annotations

import torch

from hadron.batch import Selections
from hadron.kernels.provider import Provider
from hadron.kernels.reference.router import weigh
from hadron.layers.dimensions import MlpDimensions, MoeDimensions
from hadron.layers.mlp import Mlp
from hadron.layers.weights import Weights


class Moe:
    """Sigmoid-routed experts and a shared one. prefix: `layers.3.mlp`."""

    def __init__(self, prefix: str, dims: MoeDimensions, weights: Weights, kernels: Provider | None = None) -> None:
        kernels = kernels or Provider()
        self.dims = dims
        self._prefix = prefix
        gate, bias = weights.linear(f"{prefix}.gate"), weights.tensor(f"{prefix}.gate.e_score_correction_bias")
        expert = MlpDimensions(dims.hidden, dims.intermediate, dims.limit)
        self._experts = [Mlp(f"{prefix}.experts.{e}", expert, weights, kernels) for e in range(dims.experts)]
        self._shared: Mlp | None = None
        if dims.shared_intermediate:
            shared = MlpDimensions(dims.hidden, dims.shared_intermediate, dims.limit)
            self._shared = Mlp(f"{prefix}.shared_experts", shared, weights, kernels)
        self._gate = gate
        self._route = kernels.function("router", "bind")(gate, bias, dims)
        self._moe = kernels.function("moe", "bind")(self._experts, self._shared)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [tokens, hidden] -> ids int64 ascending and weights float32, both [tokens, top_k]; float32 inside."""
        ids, weights = self._route(x)
        return ids, weights

    def __call__(self, x: torch.Tensor, selections: Selections | None = None) -> torch.Tensor:
        """x [tokens, hidden] -> [tokens, hidden] in x's dtype."""
        ids, weights = self.route(x)
        if selections is not None:
            ids = selections.take(selections.experts, self._prefix, ids)
            if selections.imposed:
                weights = weigh(x, self._gate.dequantized(), ids, self.dims)
        y: torch.Tensor = self._moe(x, ids, weights)
        return y.to(x.dtype)
