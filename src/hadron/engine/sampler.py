"""Logits to tokens and log-probabilities: the only place where either is made.

The likeliest tokens are asked of the head, for all requests of a step at once, and are enough unless any token
may be drawn or a request's rules change its logits: only then the whole row is taken, and a changed row is asked in
the same way.
Log-probabilities are the model's, before rules and temperature. numpy in float64, random numbers from a
counter-based generator keyed by (seed, position): a token depends on its row of logits, its own text, the
seed and the position, never on the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hadron.engine.logit_rules import LogitRules
from hadron.engine.philox import uniform
from hadron.engine.request import Logprob
from hadron.errors import NumericsError
from hadron.layers.logits import Best, Logits
from hadron.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Choice:
    """A token, and where they were asked for the log-probabilities of it and the likeliest, best first."""

    token: int
    logprobs: dict[int, Logprob] | None


def needs(params: SamplingParams, vocabulary: int, *, ruled: bool) -> tuple[int, bool]:
    """How many of a row's likeliest tokens `choose` takes, and whether it takes the log-sum-exp too. ruled: the
    request changes its logits."""
    assert params.top_k is not None
    count = params.top_k if params.temperature and 0 < params.top_k < vocabulary and not ruled else 1
    return max(count, params.logprobs or 0), params.logprobs is not None


def best_of(logits: Logits, asked: Mapping[int, tuple[tuple[int, bool], range]]) -> dict[int, Best]:
    """The likeliest tokens of the rows of each request, by as few questions as there are kinds of them.

    asked: a key for each request -> what `needs` says, and its rows.
    """
    kinds: dict[tuple[int, bool], list[int]] = {}
    for key, (kind, _) in asked.items():
        kinds.setdefault(kind, []).append(key)
    found = {}
    for (count, sums), keys in kinds.items():
        best = logits.best(count, rows=[row for key in keys for row in asked[key][1]], sums=sums)
        first = 0
        for key in keys:
            end = first + len(asked[key][1])
            found[key] = best.rows(first, end)
            first = end
    return found


def choose(
    logits: Logits,
    params: SamplingParams,
    *,
    seed: int,
    position: int,
    rules: LogitRules | None = None,
    best: Best | None = None,
    also: Sequence[int] = (),
) -> Choice:
    """The token at `position`, from one row of logits. params must have its defaults filled in.

    rules: what the request changes about its logits. best: of the row, as `needs` says, where it is known.
    also: tokens whose log-probabilities are given too.
    `NumericsError` when a logit is not finite.
    """
    if best is None:
        count, sums = needs(params, logits.vocabulary, ruled=rules is not None)
        best = logits.best(count, sums=sums)
    if best.faults[0]:
        check_finite(logits, best, position)
    left, likeliest = logits, best
    if rules is not None:
        row = logits.values[0].cpu().numpy().copy()
        rules.apply(row)
        left = logits.changed(torch.from_numpy(row)[None])
        likeliest = left.best(needs(params, logits.vocabulary, ruled=False)[0])
        check_finite(left, likeliest, position)
    token = int(likeliest.ids[0, 0]) if not params.temperature else _drawn(left, likeliest, params, seed, position)
    return Choice(token, None if params.logprobs is None else logprobs(logits, best, (token, *also), params.logprobs))


def prompt_logprobs(
    logits: Logits, expected: Sequence[int], most: int, *, position: int
) -> Iterator[dict[int, Logprob]]:
    """`logprobs` of each token of a prompt, the first at `position`, from the rows they were expected with."""
    best = logits.best(most, sums=True)
    for i, token in enumerate(expected):
        row, own = logits.rows(i, i + 1), best.rows(i, i + 1)
        check_finite(row, own, position + i)
        yield logprobs(row, own, (token,), most)


def _drawn(logits: Logits, best: Best, params: SamplingParams, seed: int, position: int) -> int:
    ids, weights = candidates(logits, best, params)
    cumulative = weights.cumsum()
    drawn = uniform(seed, position) * cumulative[-1]
    return int(ids[min(int(cumulative.searchsorted(drawn, side="right")), len(ids) - 1)])


def candidates(logits: Logits, best: Best, params: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Tokens that may be drawn and their unnormalized probabilities (> 0), in an order fixed by the arguments.

    best: of the row, the `top_k` likeliest or more where `top_k` leaves some out. Of equally likely tokens at an
    edge, those with the lowest ids stay. The order is what a seed means: by id, where `top_k` leaves some out
    with those that equal its last at the end; the likeliest first with a `top_p`.
    """
    assert params.temperature is not None
    assert params.top_p is not None
    assert params.top_k is not None
    if 0 < params.top_k < logits.vocabulary:
        values, ids = best.logits[0, : params.top_k], best.ids[0, : params.top_k]
        order = np.lexsort((ids, values == values[-1]))
        values, ids = values[order], ids[order]
    else:
        values = logits.values[0].cpu().numpy()
        ids = np.arange(len(values))
    scaled = values.astype(np.float64)
    scaled -= scaled.max()
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the likeliest to minus infinity
        scaled /= params.temperature
    weights = np.exp(scaled)
    possible = weights > 0
    ids, weights = ids[possible], weights[possible]
    if params.top_p < 1:
        total = float(weights.sum())
        # those left out here hold less than 1 - top_p together: a cheap way to have few to sort
        kept = weights >= (1 - params.top_p) * total / len(ids)
        ids, weights = ids[kept], weights[kept]
        order = np.lexsort((ids, -weights))
        ids, weights = ids[order], weights[order]
        before = np.cumsum(weights) - weights
        end = max(1, int(np.searchsorted(before, params.top_p * total)))
        ids, weights = ids[:end], weights[:end]
    if params.min_p > 0:
        likely = weights >= params.min_p  # the likeliest weighs 1
        ids, weights = ids[likely], weights[likely]
    return ids, weights


def logprobs(logits: Logits, best: Best, chosen: Sequence[int], most: int) -> dict[int, Logprob]:
    """Log-probabilities of the `most` likeliest tokens of a row, best first, and of the chosen. best: with sums."""
    total = float(best.log_sum_exp[0])
    listed = zip(best.ids[0].tolist(), best.logits[0].tolist(), strict=True)
    known = {token: Logprob(value - total, rank) for rank, (token, value) in enumerate(listed, 1)}
    unknown = [token for token in dict.fromkeys(chosen) if token not in known]
    if unknown:
        ranks = logits.ranks(torch.tensor([unknown], device="cpu"))[0].tolist()
        for token, rank in zip(unknown, ranks, strict=True):
            known[token] = Logprob(float(logits.values[0, token]) - total, rank)
    return {token: entry for token, entry in known.items() if entry.rank <= most or token in chosen}


def check_finite(logits: Logits, best: Best, position: int) -> None:
    """`NumericsError` when a logit is NaN or infinite: nothing is clamped to hide it. position: of the first row."""
    failed = np.flatnonzero(best.faults).tolist()
    if failed:
        row = logits.values[failed[0]].cpu()
        first = int((~torch.isfinite(row)).nonzero()[0])
        raise NumericsError(
            "the model computed logits that are not finite",
            where=f"position {position + failed[0]}, token {first}",
            found=f"{float(row[first])} ({int(best.faults[failed[0]])} of {len(row)} logits)",
            accepted="finite logits",
            hint="run `hadron check MODEL --data`: it names tensors with NaN or infinite values",
        )
