"""KL between what attention looks at and what the indexers score."""

import torch
from torch import Tensor

from .attention import Group, Selection


def _target(group: Group) -> Tensor:
    """Attention mass of each pool or token, mean over the layers of the group, [B, S, P]."""
    mass = torch.stack(group.probabilities).mean(0)
    if group.pool == 1:
        return mass
    pools = group.scores.shape[-1]
    return mass[..., : pools * group.pool].unflatten(-1, (pools, group.pool)).sum(-1)


def group_loss(group: Group, rows: Tensor) -> Tensor:
    """Mean KL of a group over `rows` [B, S] that have at least two candidates.

    Candidates are the visible complete pools or tokens, or of these the selected ones where there is a selection.
    """
    candidates = group.scores > float("-inf") if group.chosen is None else group.chosen
    rows = rows & (candidates.sum(-1) > 1)
    if not rows.any():
        return group.scores.new_zeros(())
    candidates = candidates[rows]
    target = _target(group)[rows].masked_fill(~candidates, 0.0) + 1e-9 * candidates
    target = target / target.sum(-1, keepdim=True)
    log_scores = group.scores[rows].masked_fill(~candidates, float("-inf")).log_softmax(-1)
    log_scores = log_scores.masked_fill(~candidates, 0.0)
    log_target = target.clamp_min(1e-30).log()
    return (target * (log_target - log_scores)).sum(-1).mean()


def indexer_loss(selection: Selection, rows: Tensor) -> Tensor:
    """Sum over the groups of a forward pass; `rows` [B, S] are the tokens that are no padding."""
    return torch.stack([group_loss(group, rows) for group in selection.groups]).sum()
