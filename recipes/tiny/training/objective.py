"""Losses of a step and what is logged of it."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import Selection
from .batches import KINDS, Batch
from .indexer_loss import indexer_loss
from .model import TinyModel

# Logged sums: loss, weight, MTP loss, MTP weight, KL, steps; drafts, accepted; the guide's loss; then for each kind
# the answer tokens, their loss, how many were right, samples, samples right throughout.
HEAD = 9


@dataclass
class Outcome:
    """Loss to differentiate, and sums to log."""

    loss: Tensor
    sums: Tensor


def _targets(batch: Batch, shift: int) -> tuple[Tensor, Tensor]:
    """Targets and weights [B, S] of the token `shift` ahead; weight 0 at the end of a row."""
    ids = torch.roll(batch.ids, -shift, dims=1)
    weights = torch.roll(batch.weights, -shift, dims=1).clone()
    weights[:, -shift:] = 0
    return ids, weights


def _weighted(model: TinyModel, hidden: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted mean loss, losses [B, S] and predictions [B, S]."""
    logits = model.lm_head(hidden)
    losses = F.cross_entropy(logits.float(), ids.flatten(), reduction="none").view_as(weights)
    return (losses * weights).sum() / weights.sum().clamp_min(1.0), losses.detach(), logits.detach().argmax(-1)


@dataclass(frozen=True)
class Weights:
    """Of the losses beside the language loss."""

    mtp: float
    guide: float


def language(model: TinyModel, batch: Batch, dtype: torch.dtype, of: Weights, sparse: bool) -> Outcome:
    """Stages A and C: language loss, MTP loss and the guide's, in C also the indexers' KL on what was selected."""
    selection = Selection(select=sparse, observe=sparse, source=batch.source if of.guide else None)
    hidden = model.trunk(batch.ids, dtype, selection, batch.padding)
    drafted = model.draft(batch.ids, hidden, selection, batch.padding)
    ids, weights = _targets(batch, 1)
    loss, losses, predicted = _weighted(model, hidden, ids, weights)
    ids2, weights2 = _targets(batch, 2)
    mtp_loss, _, drafts = _weighted(model, drafted, ids2, weights2)
    predicted, drafts = predicted.view_as(ids), drafts.view_as(ids)
    kl = indexer_loss(selection, ~batch.padding) if sparse else loss.new_zeros(())
    answer = weights > 0.5
    sums = torch.zeros(HEAD + 5 * len(KINDS))
    sums[:6] = torch.stack([loss, loss.new_ones(()), mtp_loss, loss.new_ones(()), kl, loss.new_ones(())]).detach()
    drafted_at = weights2 > 0.5
    sums[6] = drafted_at.sum()
    sums[7] = (drafted_at & (drafts == torch.roll(predicted, -1, dims=1))).sum()
    right = (predicted == ids) & answer
    for kind in range(len(KINDS)):
        rows = batch.kind == kind
        whole = right[rows].sum(1) == answer[rows].sum(1)
        per = [answer[rows].sum(), losses[rows][answer[rows]].sum(), right[rows].sum(), rows.sum(), whole.sum()]
        sums[HEAD + 5 * kind : HEAD + 5 * kind + 5] = torch.stack([p.float() for p in per])
    guided = torch.stack(selection.guides).mean() if selection.guides else loss.new_zeros(())
    sums[8] = guided.detach()
    return Outcome(loss + of.mtp * mtp_loss + of.guide * guided + kl, sums)


def indexers(model: TinyModel, batch: Batch, dtype: torch.dtype) -> Outcome:
    """Stage B: the indexers' KL against dense attention, nothing else learns."""
    selection = Selection(observe=True)
    with torch.no_grad():
        hidden = model.trunk(batch.ids, dtype, selection, batch.padding)
        model.draft(batch.ids, hidden, selection, batch.padding)
    kl = indexer_loss(selection, ~batch.padding)
    sums = torch.zeros(HEAD + 5 * len(KINDS))
    sums[4:6] = torch.stack([kl.detach(), kl.new_ones(())])
    return Outcome(kl, sums)


def summary(sums: Tensor) -> dict[str, float]:
    """Means of the logged sums."""
    values = sums.tolist()
    out: dict[str, float] = {}
    if values[1]:
        out |= {"loss": values[0] / values[1], "mtp_loss": values[2] / values[3]}
    if values[5] and values[4]:
        out["indexer_kl"] = values[4] / values[5]
    if values[6]:
        out["mtp_acceptance"] = values[7] / values[6]
    if values[8]:
        out["guide"] = values[8] / values[5]
    for i, kind in enumerate(KINDS):
        tokens, loss, right, samples, whole = values[HEAD + 5 * i : HEAD + 5 * i + 5]
        if tokens:
            out |= {f"{kind}_loss": loss / tokens, f"{kind}_accuracy": right / tokens, f"{kind}_exact": whole / samples}
    return {name: round(value, 5) for name, value in out.items()}
