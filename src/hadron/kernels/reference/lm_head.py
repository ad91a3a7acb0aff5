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
    logits: torch.Tensor, count: int, *, rows: Sequence[int] | None = None, temperature: float | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `count` largest of each row of float32 [n, vocabulary], best first, the lowest id first on a tie.

    rows: numbers of the rows that are asked about, instead of all. -> ids int64 and logits float32 [n, count] (all
    of a smaller vocabulary), the log-sum-exp of the whole row's distances from its largest, divided by the temperature,
    float64 [n] (of no row without one), and int64 [n]: how many of its logits are not finite. Where some are not, only
    that number is defined.
    """
    if rows is not None:
        logits = logits[list(rows)]
    values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    summed = logits[:0] if temperature is None else logits
    totals = torch.logsumexp((summed.double() - summed.amax(-1, keepdim=True)) / (temperature or 1.0), dim=-1)
    return ids[:, :count], values[:, :count], totals, (~torch.isfinite(logits)).sum(dim=-1)


def ranks(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Where ids int64 [n, m] stand in the order of `best`, 1 the first: int64 [n, m]. logits: finite."""
    own = logits.gather(1, ids)[..., None]
    ties = (logits[:, None] == own) & (torch.arange(logits.shape[1], device=ids.device) < ids[..., None])
    return ((logits[:, None] > own) | ties).sum(dim=-1) + 1
