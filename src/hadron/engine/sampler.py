"""Logits to tokens and log-probabilities: the only place where either is made.

The likeliest tokens are asked of the head, for all requests of a step at once, and are nearly always enough. Only
where a request's rules change its logits the whole row is taken, and the changed row is asked in the same way.
Log-probabilities are the model's, before rules and temperature, in float64. A token depends on its row of logits, its
own text, the seed and the position, never on the batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count as count_from
from itertools import repeat
from typing import NamedTuple

import numpy as np
import torch

from hadron.engine.draw import FIRST, FURTHER, limit, uniform
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


class Needs(NamedTuple):
    """Of a row: how many of its tokens, and the temperature of its `log_sum`, None where that is not needed."""

    likeliest: int
    temperature: float | None

    @classmethod
    def to_draw(cls, params: SamplingParams, vocabulary: int, *, ruled: bool) -> Needs | None:
        """What a draw begins with: everything that may come where `top_k` leaves few, else the likeliest. None where
        nothing is drawn from the row: the likeliest is taken, or the request changes its logits (ruled)."""
        if not params.temperature or ruled:
            return None
        most = limit(params, vocabulary)
        if most == vocabulary > FIRST:
            return cls(FIRST, params.temperature)
        return cls(most, None)

    @classmethod
    def of(cls, params: SamplingParams, draw: Needs | None) -> Needs:
        """What `choose` takes. draw: what `to_draw` says."""
        begin = draw or cls(1, None)
        if params.logprobs is None:
            return begin
        return cls(max(begin.likeliest, params.logprobs), 1.0 if begin.temperature is None else begin.temperature)


class Kind(NamedTuple):
    """What a request asks of each row that decides one of its tokens. draw: what a draw begins with, see `Needs`.
    ruled: whether the request changes its logits."""

    needs: Needs
    draw: Needs | None
    ruled: bool

    @classmethod
    def of(cls, params: SamplingParams, vocabulary: int, *, ruled: bool) -> Kind:
        """The same for all tokens of a request. params must have its defaults filled in."""
        draw = Needs.to_draw(params, vocabulary, ruled=ruled)
        return cls(Needs.of(params, draw), draw, ruled)


class Asked(NamedTuple):
    """Rows of the logits of one request, the first of which decides the token at `position`."""

    rows: range
    params: SamplingParams
    seed: int
    position: int
    kind: Kind


class Likeliest(NamedTuple):
    """Of the row `row` of `found`, as `Needs` says; the token too, where no rule, no fault and no further token has a
    say in it."""

    found: Best
    row: int
    token: int | None

    @property
    def best(self) -> Best:
        """Of this row alone."""
        return self.found.rows(self.row, self.row + 1)


def likeliest(logits: Logits, asked: Mapping[int, Asked]) -> dict[int, list[Likeliest]]:
    """What each request's rows are asked for, under its key, by as few questions as there are kinds of them."""
    kinds: dict[Kind, list[int]] = {}
    for key, own in asked.items():
        kinds.setdefault(own.kind, []).append(key)
    given: dict[int, list[Likeliest]] = {}
    for kind, keys in kinds.items():
        owners = [asked[key] for key in keys]
        (count, temperature), draw, ruled = kind
        drawn = None if draw is None else chances(owners)  # before the search drives what it reads out of the caches
        found = logits.best(count, rows=[row for own in owners for row in own.rows], temperature=temperature)
        tokens: list[int | None]
        if draw is None or drawn is None:
            tokens = found.ids[:, 0].tolist()
        else:
            picked = logits.draw(found, draw.likeliest, drawn, among_all=draw.temperature is not None)
            tokens = [token if token >= 0 else None for token in picked]
        faults = found.faults.tolist()
        if ruled or any(faults):  # what came of faults is not defined
            tokens = [None if ruled or fault else token for token, fault in zip(tokens, faults, strict=True)]
        each, row = list(map(Likeliest, repeat(found), count_from(0), tokens)), 0
        for key, own in zip(keys, owners, strict=True):
            given[key] = each[row : row + len(own.rows)]
            row += len(own.rows)
    return given


def chances(owners: Iterable[Asked]) -> array[float]:
    """What decides their rows besides the logits, as `Logits.draw` takes it; they have a temperature."""
    found = array("d")
    for own in owners:
        params = own.params
        assert params.temperature is not None and params.top_p is not None and params.min_p is not None
        for position in range(own.position, own.position + len(own.rows)):
            found.extend((params.temperature, params.top_p, params.min_p, uniform(own.seed, position)))
    return found


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
    kind = Kind.of(params, logits.vocabulary, ruled=rules is not None)
    asked = Asked(range(1), params, seed, position, kind)
    known = known or likeliest(logits, {0: asked})[0][0]
    token = known.token
    if known.found.faults[known.row]:
        check_finite(logits, known.best, position)
    left = logits
    if rules is not None:
        row = logits.values[0].cpu().numpy().copy()
        rules.apply(row)
        left = logits.changed(torch.from_numpy(row)[None])
        changed = likeliest(left, {0: asked._replace(kind=Kind.of(params, left.vocabulary, ruled=False))})[0][0]
        check_finite(left, changed.best, position)
        token = changed.token
    count = FIRST
    while token is None:
        count *= FURTHER
        more = left.best(count, temperature=params.temperature)
        (drawn,) = left.draw(more, count, chances([asked]), among_all=count < left.vocabulary)
        token = drawn if drawn >= 0 else None
    if params.logprobs is None:
        return Choice(token, None)
    best = known.best if kind.needs.temperature == 1.0 else logits.best(max(1, params.logprobs), temperature=1.0)
    return Choice(token, logprobs(logits, best, (token, *also), params.logprobs))


def prompt_logprobs(
    logits: Logits, expected: Sequence[int], most: int, *, position: int
) -> Iterator[dict[int, Logprob]]:
    """`logprobs` of each token of a prompt, the first at `position`, from the rows they were expected with."""
    best = logits.best(max(1, most), temperature=1.0)
    for i, token in enumerate(expected):
        row, own = logits.rows(i, i + 1), best.rows(i, i + 1)
        check_finite(row, own, position + i)
        yield logprobs(row, own, (token,), most)


def logprobs(logits: Logits, best: Best, chosen: Sequence[int], most: int) -> dict[int, Logprob]:
    """Log-probabilities of the `most` likeliest tokens of a row, best first, and of the chosen. best: at least
    one, with their `log_sum` at a temperature of 1."""
    total = float(best.logits[0, 0]) + float(best.log_sum[0])
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
