"""Definition of `moe`: every token through its experts, weighted, plus the shared expert.

Summed in float32, experts in ascending order of their id and the shared expert last: the order for a
token is the same whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

Expert = Callable[[torch.Tensor], torch.Tensor]


def moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: Sequence[Expert],
    shared: Expert | None,
) -> torch.Tensor:
    """x [tokens, hidden], ids int64 and weights float32 [tokens, top_k] -> [tokens, hidden] in x's dtype."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in torch.unique(ids).tolist():
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        total[tokens] += experts[expert](x[tokens]).float() * weights[tokens, slots].unsqueeze(1)
    if shared is not None:
        total += shared(x).float()
    return total.to(x.dtype)


def bind(
    experts: Sequence[Expert], shared: Expert | None
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """`moe` of these experts, as a layer keeps it: (x, ids, weights) -> [tokens, hidden]."""
    return partial(moe, experts=experts, shared=shared)
