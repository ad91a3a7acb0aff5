"""Definition of `lm_head`: logits from a table of rows, one a token, what changes rows, and what is asked of them.

`bind` is used where head and embedding are one table; a head of its own is a `linear`. `best` and
`ranks` take what either computed, so that nobody needs the whole row to choose the likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch

from hadron.kernels.rules import RowRules

ROWS = 8192
"""Rows of the table that are widened to float32 at a time."""
FURTHER = 16
"""Times as many tokens as before are looked at where a draw needs more."""


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `count` largest of each row of float32 [n, vocabulary], best first, the lowest id first on a tie.

    rows: numbers of the rows that are asked about, instead of all. -> ids int64 and logits float32 [n, count] (all
    of a smaller vocabulary), the log-sum-exp of the whole row's distances from its largest, divided by the temperature,
    float64 [n] (of no row without one), and int64 [n]: how many of its logits are not finite. Where some are not, only
    that number is defined.
    """
    if rows is not None:
        logits = logits[list(rows)]
    faults = (~torch.isfinite(logits)).sum(dim=-1)
    values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    summed = logits[:0] if temperature is None else logits
    totals = torch.logsumexp((summed.double() - summed.amax(-1, keepdim=True)) / (temperature or 1.0), dim=-1)
    return ids[:, :count], values[:, :count], totals, faults


def rule(logits: torch.Tensor, rows: Sequence[int], rules: Sequence[RowRules]) -> None:
    """Change rows of float32 [n, vocabulary] by their rules, where they lie. rows: their numbers, each once.

    What may not come gets the lowest finite number, which no draw and no maximum takes while anything else is left.
    """
    with torch.inference_mode():  # rows that a model computed are inference tensors
        for _, several in groupby(zip(rows, rules, strict=True), lambda pair: id(pair[1])):
            numbers, (own, *_) = zip(*several, strict=True)
            logits[list(numbers)] = _ruled(logits[list(numbers)], own)


def _ruled(rows: torch.Tensor, rules: RowRules) -> torch.Tensor:
    """rows [n, vocabulary], changed."""
    seen, counts = _on(rows, rules.seen, torch.int64), _on(rows, rules.counts, torch.float32).double()
    repetition, frequency, presence = _on(
        rows, [rules.repetition, rules.frequency, rules.presence], torch.float32
    ).double()
    values = rows[:, seen].double()
    values = torch.where(values > 0, values / repetition, values * repetition)
    fines = torch.where(counts > 0, counts * frequency + presence, 0.0)
    changed = rows.clone()
    changed[:, seen] = (values - fines).float()
    changed[:, _on(rows, rules.biased, torch.int64)] += _on(rows, rules.bias, torch.float32)
    banned = torch.zeros_like(rows[0], dtype=torch.bool)
    banned[_on(rows, rules.banned, torch.int64)] = True
    if rules.only is not None:
        banned[:] = True
        banned[rules.only] = False
    elif rules.allowed is not None:
        words = rules.allowed.to(rows.device)[:, None]
        allowed = (words >> torch.arange(32, device=rows.device) & 1).flatten()[: rows.shape[1]].bool()
        left = allowed & ~banned
        banned = ~(left if bool(left.any()) else allowed)
    changed = changed.masked_fill(banned & changed.isfinite(), torch.finfo(torch.float32).min)
    return torch.where(rows.isfinite(), changed, rows)


def _on(rows: torch.Tensor, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=rows.device)


def draw(
    logits: torch.Tensor,
    rows: Sequence[int],
    likeliest: tuple[torch.Tensor, torch.Tensor],
    chances: torch.Tensor,
    log_sum: torch.Tensor | None = None,
) -> torch.Tensor:
    """A token of some rows of float32 [., vocabulary] by chance: int64 [n].

    A row's tokens stand in the order of their likelihood, on a tie by id, and a number in [0, 1) picks among those that
    top_p and min_p leave. rows: numbers of the rows. likeliest: ids int64, values float32 [n, m], of `best`, which are
    nearly always enough. chances float64 [n, 4]: temperature, top_p, min_p, and the number, of each row. log_sum
    float64 [n], of whole rows at their own temperature (`best`), where tokens behind the likeliest may come. Of a row
    that is not finite, any.
    """
    ids, values = (part.to(chances.device) for part in likeliest)
    tokens, count = _among(ids, values, chances, log_sum), ids.shape[1]
    while log_sum is not None and len(left := (tokens < 0).nonzero().flatten()):
        count *= FURTHER
        ids, values, _, _ = best(logits, count, rows=[rows[i] for i in left.tolist()])
        total = log_sum[left] if count < logits.shape[1] else None
        tokens[left] = _among(ids.to(chances.device), values.to(chances.device), chances[left], total)
    return tokens


def _among(
    ids: torch.Tensor, values: torch.Tensor, chances: torch.Tensor, log_sum: torch.Tensor | None
) -> torch.Tensor:
    """As `draw`, -1 where the token may be one behind these."""
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
