"""Logits to tokens and log-probabilities: the only place where either is made.

The likeliest tokens are asked of the head, for all requests of a step at once, and are enough unless any token
may be drawn or a request's rules change its logits: only then the whole row is taken, and a changed row is asked in
the same way.
Log-probabilities are the model's, before rules and temperature, in float64. A token depends on its row of logits, its
own text, the seed and the position, never on the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from hadron.engine.draw import Chance, drawn, limit
from hadron.engine.logit_rules import LogitRules
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
    count = limit(params, vocabulary) if params.temperature and not ruled else 1
    return max(1, count, params.logprobs or 0), params.logprobs is not None


class Asked(NamedTuple):
    """Rows of the logits of one request, the first of which decides the token at `position`. ruled: see `needs`."""

    rows: range
    params: SamplingParams
    seed: int
    position: int
    ruled: bool


class Likeliest(NamedTuple):
    """Of one row, as `needs` says; the token is given too where it takes no more than that."""

    best: Best
    token: int | None


def likeliest(logits: Logits, asked: Mapping[int, Asked]) -> dict[int, list[Likeliest]]:
    """What each request's rows are asked for, under its key, by as few questions as there are kinds of them."""
    kinds: dict[tuple[int, bool], list[int]] = {}
    for key, own in asked.items():
        kinds.setdefault(needs(own.params, logits.vocabulary, ruled=own.ruled), []).append(key)
    found: dict[int, list[Likeliest]] = {}
    for (count, sums), keys in kinds.items():
        best = logits.best(count, rows=[row for key in keys for row in asked[key].rows], sums=sums)
        tokens = _tokens(best, [asked[key] for key in keys], logits.vocabulary)
        first = 0
        for key in keys:
            end = first + len(asked[key].rows)
            found[key] = [Likeliest(best.rows(row, row + 1), tokens[row]) for row in range(first, end)]
            first = end
    return found


def _tokens(best: Best, asked: Sequence[Asked], vocabulary: int) -> list[int | None]:
    """The tokens of rows that no rule changes and that `best` is enough for."""
    tokens: list[int | None] = best.ids[:, 0].tolist()
    groups: dict[tuple[int, bool], tuple[list[int], list[Chance]]] = {}
    row = 0
    for own in asked:
        for turn in range(len(own.rows)):
            chance = Chance(own.params, own.seed, own.position + turn)
            kind = chance.kind(vocabulary)
            if own.ruled or (own.params.temperature and (not kind[0] or best.faults[row])):
                tokens[row] = None
            elif own.params.temperature:
                rows, chances = groups.setdefault(kind, ([], []))
                rows.append(row)
                chances.append(chance)
            row += 1
    for (count, _), (rows, chances) in groups.items():
        some = drawn(best.ids[rows, :count], best.logits[rows, :count], chances, limited=True)
        for row, token in zip(rows, some, strict=True):
            tokens[row] = token
    return tokens


def choose(
    logits: Logits,
    params: SamplingParams,
    *,
    seed: int,
    position: int,
    rules: LogitRules | None = None,
    known: Likeliest | None = None,
    also: Sequence[int] = (),
) -> Choice:
    """The token at `position`, from one row of logits. params must have its defaults filled in.

    rules: what the request changes about its logits. known: what `likeliest` found, where it was asked.
    also: tokens whose log-probabilities are given too.
    `NumericsError` when a logit is not finite.
    """
    asked = Asked(range(1), params, seed, position, rules is not None)
    known = known or likeliest(logits, {0: asked})[0][0]
    best, token = known
    if best.faults[0]:
        check_finite(logits, best, position)
    left = logits
    if rules is not None:
        row = logits.values[0].cpu().numpy().copy()
        rules.apply(row)
        left = logits.changed(torch.from_numpy(row)[None])
        changed, token = likeliest(left, {0: asked._replace(ruled=False)})[0][0]
        check_finite(left, changed, position)
    if token is None:
        values = left.values.cpu().numpy()
        ids = np.arange(values.shape[1])[None]
        (token,) = drawn(ids, values, [Chance(params, seed, position)], limited=False)
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
