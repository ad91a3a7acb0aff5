"""Logits to tokens and log-probabilities: the only place where either is made.

The likeliest tokens are asked of the head, for all requests of a step at once, and are nearly always enough. Only
where a request's rules change its logits the whole row is taken, and the changed row is asked in the same way.
Log-probabilities are the model's, before rules and temperature, in float64. A token depends on its row of logits, its
own text, the seed and the position, never on the batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count as count_from
from itertools import islice, repeat
from typing import NamedTuple

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


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """What a request asks of each row that decides one of its tokens. draw: what a draw begins with, see `Needs`.
    ruled: whether the request changes its logits. never: the ids that may not come where it does not, as answers in
    conversations have them. Two of the same content are nearly always one object."""

    needs: Needs
    draw: Needs | None
    ruled: bool
    never: tuple[int, ...]

    @classmethod
    def of(cls, params: SamplingParams, vocabulary: int, *, ruled: bool, never: tuple[int, ...] = ()) -> Kind:
        """The same for all tokens of a request. params must have its defaults filled in."""
        draw = Needs.to_draw(params, vocabulary, ruled=ruled)
        if never and not ruled:  # log-probabilities are those of all tokens: a question of their own
            return _kind(draw or Needs(1, None), draw, ruled, never)
        return _kind(Needs.of(params, draw), draw, ruled, ())


_kind = lru_cache(maxsize=1024)(Kind)


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


class Asked:
    """Rows of logits that decide tokens of requests: those of one kind are asked about together."""

    def __init__(self) -> None:
        self._groups: dict[Kind, _Group] = {}

    def add(self, key: int, rows: range, kind: Kind, params: SamplingParams, *, seed: int, position: int) -> Asked:
        """Rows of one request, called `key`; the first of them decides the token at `position`."""
        group = self._groups.get(kind)
        if group is None:
            group = self._groups[kind] = _Group()
        group.keys.append(key)
        group.counts.append(len(rows))
        group.rows += rows
        if kind.draw is not None:
            for at in range(position, position + len(rows)):
                group.chances.extend(chances(params, seed, at))
        return self

    def answers(self, logits: Logits) -> dict[int, Sequence[Likeliest]]:
        """What is known of each request's rows, under its key, by as few questions as there are kinds of them."""
        given: dict[int, Sequence[Likeliest]] = {}
        for kind, group in self._groups.items():
            each = iter(group.ask(logits, kind))
            if len(group.keys) == len(group.rows):
                given.update(zip(group.keys, zip(each, strict=True), strict=True))
            else:
                given.update((key, list(islice(each, n))) for key, n in zip(group.keys, group.counts, strict=True))
        return given


class _Group:
    """Requests of a kind. chances: as `Logits.draw` takes them, where something is drawn."""

    __slots__ = ("chances", "counts", "keys", "rows")

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.counts: list[int] = []
        self.rows: list[int] = []
        self.chances = array("d")

    def ask(self, logits: Logits, kind: Kind) -> Iterable[Likeliest]:
        """Of its rows, one after another."""
        count, temperature = kind.needs
        found = logits.best(count, rows=self.rows, temperature=temperature, without=kind.never)
        tokens: list[int | None]
        if kind.draw is None:
            tokens = found.ids[:, 0].tolist()
        else:
            among_all = kind.draw.temperature is not None
            picked = logits.draw(found, kind.draw.likeliest, self.chances, among_all=among_all)
            tokens = [token if token >= 0 else None for token in picked]
        faults = found.faults.tolist()
        if kind.ruled or any(faults):  # what came of faults is not defined
            tokens = [None if kind.ruled or fault else token for token, fault in zip(tokens, faults, strict=True)]
        return map(Likeliest, repeat(found), count_from(0), tokens)


def chances(params: SamplingParams, seed: int, position: int) -> tuple[float, float, float, float]:
    """What decides the token at `position` besides its logits, as `Logits.draw` takes it. params: with a
    temperature."""
    assert params.temperature is not None and params.top_p is not None and params.min_p is not None
    return params.temperature, params.top_p, params.min_p, uniform(seed, position)


def choose(
    logits: Logits,
    params: SamplingParams,
    *,
    seed: int,
    position: int,
    rules: LogitRules | None = None,
    never: tuple[int, ...] = (),
    known: Likeliest | None = None,
    also: Sequence[int] = (),
) -> Choice:
    """The token at `position`, from one row of logits. params must have its defaults filled in.

    rules: what the request changes about its logits. never: where there are none, ids that may not come. known: what
    `Asked` found, where it was asked.
    also: tokens whose log-probabilities are given too.
    `NumericsError` when a logit is not finite.
    """
    kind = Kind.of(params, logits.vocabulary, ruled=rules is not None, never=never)
    known = known or _ask(logits, kind, params, seed, position)
    token = known.token
    if known.found.faults[known.row]:
        check_finite(logits, known.best, position)
    left = logits
    if rules is not None:
        row = logits.values[0].cpu().numpy().copy()
        rules.apply(row)
        left = logits.changed(torch.from_numpy(row)[None])
        changed = _ask(left, Kind.of(params, left.vocabulary, ruled=False), params, seed, position)
        check_finite(left, changed.best, position)
        token = changed.token
    count = FIRST
    while token is None:
        count *= FURTHER
        more = left.best(count, temperature=params.temperature, without=kind.never)
        decides = array("d", chances(params, seed, position))
        (drawn,) = left.draw(more, count, decides, among_all=count < left.vocabulary)
        token = drawn if drawn >= 0 else None
    if params.logprobs is None:
        return Choice(token, None)
    if kind.needs.temperature == 1.0 and not kind.never:
        best = known.best
    else:
        best = logits.best(max(1, params.logprobs), temperature=1.0)
    return Choice(token, logprobs(logits, best, (token, *also), params.logprobs))


def _ask(logits: Logits, kind: Kind, params: SamplingParams, seed: int, position: int) -> Likeliest:
    return Asked().add(0, range(1), kind, params, seed=seed, position=position).answers(logits)[0][0]


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
    failed = best.faults.nonzero().flatten().tolist()
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
