"""Definition of `lm_head`: logits from a table of rows, one a token, and what is asked of rows of logits.

`bind` is used where head and embedding are one table; a head of its own is a `linear`. `best` and
`ranks` take what either computed, so that nobody needs the whole row to choose the likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

ROWS = 8192
"""Rows of the table that are widened to float32 at a time."""


def bind(table: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """The logits of a table [vocabulary, hidden]: hidden [n, hidden] -> float32 [n, vocabulary]."""

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        x = hidden.float()
        return torch.cat([x @ part.float().T for part in torch.split(table, ROWS)], dim=-1)

    return logits


def best(
    logits: torch.Tensor,
    count: int,
    *,
    rows: Sequence[int] | None = None,
    temperature: float | None = None,
    without: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `count` largest of each row of float32 [n, vocabulary], best first, the lowest id first on a tie.

    rows: numbers of the rows that are asked about, instead of all. without: ids whose logits count as the lowest finite
    number. -> ids int64 and logits float32 [n, count] (all
    of a smaller vocabulary), the log-sum-exp of the whole row's distances from its largest, divided by the temperature,
    float64 [n] (of no row without one), and int64 [n]: how many of its logits are not finite. Where some are not, only
    that number is defined; those of `without` are among them.
    """
    if rows is not None:
        logits = logits[list(rows)]
    faults = (~torch.isfinite(logits)).sum(dim=-1)
    if len(without):
        logits = logits.clone()
        logits[:, list(without)] = torch.finfo(torch.float32).min
    values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    summed = logits[:0] if temperature is None else logits
    totals = torch.logsumexp((summed.double() - summed.amax(-1, keepdim=True)) / (temperature or 1.0), dim=-1)
    return ids[:, :count], values[:, :count], totals, faults


def draw(
    ids: torch.Tensor, values: torch.Tensor, chances: torch.Tensor, log_sum: torch.Tensor | None = None
) -> torch.Tensor:
    """A token of each row by chance, -1 where it may be one that is not given: int64 [n].

    ids int64, values float32 [n, m]: the likeliest tokens of each row and their logits, as of `best`. chances float64
    [n, 4]: temperature, top_p, min_p, and the number in [0, 1) that picks among the tokens in their order. log_sum
    float64 [n], of whole rows at their own temperature (`best`), where there are others that may come. Of a row that is
    not finite, any.
    """
    temperature, top_p, min_p, number = chances.T[:, :, None]
    scaled = values.double()
    weights = ((scaled - scaled[:, :1]) / temperature).exp()
    passed = weights.cumsum(dim=1)
    total = passed[:, -1:] if log_sum is None else torch.maximum(log_sum.exp()[:, None], passed[:, -1:])
    # the likeliest always, and those after it while the ones before have not reached top_p
    last = ((passed[:, :-1] < top_p * total) & (weights[:, 1:] >= min_p)).sum(dim=1, keepdim=True)
    kept = passed.gather(1, last)
    all_may = (top_p == 1) & (min_p == 0) if log_sum is not None else torch.zeros_like(last, dtype=torch.bool)
    at = (passed <= number * torch.where(all_may, total, kept)).sum(dim=1, keepdim=True)
    tokens = ids.gather(1, torch.minimum(at, last))
    if log_sum is not None:
        most = ids.shape[1]
        tokens[(at == most) | (~all_may & (last + 1 == most))] = -1
    return tokens[:, 0]


def ranks(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Where ids int64 [n, m] stand in the order of `best`, 1 the first: int64 [n, m]. logits: finite."""
    own = logits.gather(1, ids)[..., None]
    ties = (logits[:, None] == own) & (torch.arange(logits.shape[1], device=ids.device) < ids[..., None])
    return ((logits[:, None] > own) | ties).sum(dim=-1) + 1
