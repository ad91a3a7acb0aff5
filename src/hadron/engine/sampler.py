"""Logits to tokens and log-probabilities: the only place where either is made.

Requests' rules change their rows where they lie; then the likeliest tokens are asked of the head, for all requests of a
step at once, and are nearly always enough. Log-probabilities are the model's, before rules and temperature, in
float64. A token depends on its row of logits, its own text, the seed and the position, never on the batch.
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

from hadron.engine.draw import FIRST, limit, uniform
from hadron.engine.request import Logprob
from hadron.errors import NumericsError
from hadron.kernels.rules import RowRules
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
    def to_draw(cls, params: SamplingParams, vocabulary: int) -> Needs | None:
        """What a draw begins with: everything that may come where `top_k` leaves few, else the likeliest. None where
        the likeliest is taken."""
        if not params.temperature:
            return None
        most = limit(params, vocabulary)
        if most == vocabulary > FIRST:
            return cls(FIRST, params.temperature)
        return cls(most, None)


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """What a request asks of each row that decides one of its tokens. draw: what a draw begins with, see `Needs`. kept:
    whether the row is kept as it was before any rules, for its log-probabilities. Two of the same content are nearly
    always one object."""

    needs: Needs
    draw: Needs | None
    kept: bool

    @classmethod
    def of(cls, params: SamplingParams, vocabulary: int, *, ruled: bool) -> Kind:
        """The same for all tokens of a request. params must have its defaults filled in. ruled: whether rules change
        its rows."""
        draw = Needs.to_draw(params, vocabulary)
        needs = draw or Needs(1, None)
        if params.logprobs is not None and not ruled:
            needs = Needs(max(needs.likeliest, params.logprobs), needs.temperature or 1.0)
        return _kind(needs, draw, ruled and params.logprobs is not None)


_kind = lru_cache(maxsize=1024)(Kind)


class Likeliest(NamedTuple):
    """Of the row `row` of `found`, as `Needs` says; the token that it decides, None where it has faults. kept: the row
    as it was, where its `Kind` has it kept."""

    found: Best
    row: int
    token: int | None
    kept: Logits | None = None

    @property
    def best(self) -> Best:
        """Of this row alone."""
        return self.found.rows(self.row, self.row + 1)


class Asked:
    """Rows of logits that decide tokens of requests: those of one kind are asked about together."""

    def __init__(self) -> None:
        self._groups: dict[Kind, _Group] = {}
        self._ruled: list[int] = []
        self._rules: list[RowRules] = []

    def add(
        self,
        key: int,
        rows: range,
        kind: Kind,
        params: SamplingParams,
        *,
        seed: int,
        position: int,
        rules: RowRules | None = None,
    ) -> Asked:
        """Rows of one request, called `key`, none of which anybody has asked about; the first of them decides the token
        at `position`. rules: what changes each of them, where it lies."""
        if rules is not None:
            self._ruled += rows
            self._rules += (rules,) * len(rows)
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
            if kind.kept:
                group.kept = logits.copy(group.rows)
        if self._rules:
            logits.rule(self._ruled, self._rules)
        for kind, group in self._groups.items():
            each = iter(group.ask(logits, kind))
            if len(group.keys) == len(group.rows):
                given.update(zip(group.keys, zip(each, strict=True), strict=True))
            else:
                given.update((key, list(islice(each, n))) for key, n in zip(group.keys, group.counts, strict=True))
        return given


class _Group:
    """Requests of a kind. chances: as `Logits.draw` takes them, where something is drawn. kept: the rows as they were,
    where the kind has them kept."""

    __slots__ = ("chances", "counts", "kept", "keys", "rows")

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.counts: list[int] = []
        self.rows: list[int] = []
        self.chances = array("d")
        self.kept: Logits | None = None

    def ask(self, logits: Logits, kind: Kind) -> Iterable[Likeliest]:
        """Of its rows, one after another."""
        count, temperature = kind.needs
        found = logits.best(count, rows=self.rows, temperature=temperature)
        tokens: list[int | None]
        if kind.draw is None:
            tokens = found.ids[:, 0].tolist()
        else:
            open_ended = kind.draw.temperature is not None
            tokens = [*logits.draw(found, kind.draw.likeliest, self.chances, rows=self.rows, among_all=open_ended)]
        faults = found.faults.tolist()
        if any(faults):  # what came of them is not defined
            tokens = [None if fault else token for token, fault in zip(tokens, faults, strict=True)]
        kept = repeat(None) if self.kept is None else (self.kept.rows(i, i + 1) for i in range(len(self.rows)))
        return map(Likeliest, repeat(found), count_from(0), tokens, kept)


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
    rules: RowRules | None = None,
    known: Likeliest | None = None,
    also: Sequence[int] = (),
) -> Choice:
    """The token at `position`, from one row of logits. params must have its defaults filled in.

    rules: what changes the row, where it lies. known: what `Asked` found, where it was asked: the row is changed then.
    also: tokens whose log-probabilities are given too.
    `NumericsError` when a logit is not finite.
    """
    if known is None:
        kind = Kind.of(params, logits.vocabulary, ruled=rules is not None)
        asked = Asked().add(0, range(1), kind, params, seed=seed, position=position, rules=rules)
        (known,) = asked.answers(logits)[0]
    if known.found.faults[known.row]:
        check_finite(logits, known.best, position)
    token = known.token
    assert token is not None, "a row without faults decides a token"
    if params.logprobs is None:
        return Choice(token, None)
    model, best = logits if known.kept is None else known.kept, known.best
    if known.kept is not None or best.temperature != 1.0:
        best = model.best(max(1, params.logprobs), temperature=1.0)
    return Choice(token, logprobs(model, best, (token, *also), params.logprobs))


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
