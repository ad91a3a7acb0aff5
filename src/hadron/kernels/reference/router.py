"""Definition of `router`: sigmoid scores, a correction bias that only picks, group limits, top-k, weights.

Everything is float32 whatever the storage. Ties go to the lowest expert; experts are returned in
ascending order, the order in which they are summed. The scaling factor is applied here and nowhere
else. Source: transformers 5.23 `glm_moe_dsa`, `glm5_next`; DeepSeek-V3, section 2.1.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from hadron.kernels.sizes import RouterSizes


class _Gate(Protocol):
    """The product whose weight [experts, hidden] makes the scores."""

    def dequantized(self) -> torch.Tensor: ...


def bind(
    gate: _Gate, bias: torch.Tensor, dims: RouterSizes
) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """`route` for one layer: x [tokens, hidden] -> (ids, weights)."""

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Expanded for every step: the routers of a large model in float32 would be the largest copy made at load.
        return route(x, gate.dequantized(), bias, dims)

    return run


def route(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dims: RouterSizes
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [tokens, hidden], weight [experts, hidden], bias float32 [experts] -> (ids, weights).

    ids: int64 [tokens, top_k], ascending. weights: float32 [tokens, top_k], normalised (with 1e-20
    beside the sum) where `dims.normalize`, times `dims.scaling`.
    """
    scores = (x.float() @ weight.float().T).sigmoid()
    choice = scores + bias.float()
    tokens, experts = choice.shape
    if dims.topk_groups < dims.groups:
        grouped = choice.view(tokens, dims.groups, experts // dims.groups)
        best_two = grouped.topk(2, dim=-1).values.sum(dim=-1)
        kept = _mask_of_best(best_two, dims.topk_groups)
        choice = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).view(tokens, experts)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : dims.top_k].sort(dim=-1).values
    return ids, _weights(scores, ids, dims)


def weigh(x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, dims: RouterSizes) -> torch.Tensor:
    """The weights of experts that were chosen otherwise: ids int64 [tokens, top_k] -> float32 [tokens, top_k]."""
    return _weights((x.float() @ weight.float().T).sigmoid(), ids, dims)


def _weights(scores: torch.Tensor, ids: torch.Tensor, dims: RouterSizes) -> torch.Tensor:
    weights = scores.gather(1, ids)
    if dims.normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * dims.scaling


def _mask_of_best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """True at the `count` largest of each row; ties to the lowest index."""
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True)
