"""`Logits`: rows of logits that stay where the head computed them; one asks for what is needed of them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from hadron.errors import NumericsError
from hadron.kernels.provider import Provider
from hadron.kernels.rules import RowRules


class Best(NamedTuple):
    """The likeliest tokens of each of n rows, in this machine's memory.

    ids int64, logits float32 [n, count], best first, on a tie the lowest id; log_sum float64 [n], the logarithm of how
    likely all tokens of the row are together at `temperature` where the likeliest counts as 1, or [0] where there is
    none; faults int64 [n], how many of its logits are not finite (then nothing else is defined).
    """

    ids: torch.Tensor
    logits: torch.Tensor
    log_sum: torch.Tensor
    faults: torch.Tensor
    temperature: float | None

    def rows(self, first: int, end: int) -> Best:
        """Those of some of the rows."""
        ids, logits, log_sum, faults = (part[first:end] for part in self[:4])
        return Best(ids, logits, log_sum, faults, self.temperature)


class Questions(NamedTuple):
    """The functions of `lm_head` that answer them, and the one that changes rows."""

    best: Callable[..., Any]
    rule: Callable[..., Any]
    draw: Callable[..., Any]
    ranks: Callable[..., Any]

    @classmethod
    def of(cls, kernels: Provider) -> Questions:
        """Those of a provider."""
        return cls(*(kernels.function("lm_head", name) for name in cls._fields))


class Logits:
    """Rows of logits."""

    __slots__ = ("_end", "_first", "_held", "_questions")

    def __init__(self, held: torch.Tensor, questions: Questions, rows: range | None = None) -> None:
        """held: float32 [n, vocabulary], not checked. rows: which of them, by default all."""
        self._held = held
        self._questions = questions
        self._first, self._end = (0, held.shape[0]) if rows is None else (rows.start, rows.stop)

    @classmethod
    def of(cls, values: torch.Tensor, kernels: Provider) -> Logits:
        """Rows that came from elsewhere than a head."""
        return cls(values, Questions.of(kernels))

    def __len__(self) -> int:
        return self._end - self._first

    @property
    def values(self) -> torch.Tensor:
        """float32 [n, vocabulary], not checked."""
        return self._held[self._first : self._end]

    @property
    def vocabulary(self) -> int:
        """Logits of a row."""
        return self._held.shape[1]

    def rows(self, first: int, end: int) -> Logits:
        """Some of the rows, not copied."""
        return Logits(self._held, self._questions, range(self._first + first, self._first + end))

    def copy(self, rows: Sequence[int]) -> Logits:
        """A copy of some of the rows, by their numbers."""
        return Logits(self._held[self._numbers(rows)], self._questions)

    def rule(self, rows: Sequence[int], rules: Sequence[RowRules]) -> None:
        """Change rows, by their numbers, each by its own rules: nobody sees what they were before."""
        self._questions.rule(self._held, self._numbers(rows), rules)

    def best(
        self,
        count: int,
        *,
        rows: Sequence[int] | None = None,
        temperature: float | None = None,
    ) -> Best:
        """The `count` likeliest tokens of each row; all of a smaller vocabulary.

        rows: numbers of those that are asked about, instead of all. temperature: that of `Best.log_sum`.
        """
        asked = range(self._first, self._end) if rows is None else self._numbers(rows)
        found = self._questions.best(self._held, count, rows=asked, temperature=temperature)
        ids, values, log_sum, faults = (part.cpu() for part in found)
        return Best(ids, values, log_sum, faults, temperature)

    def draw(
        self, found: Best, count: int, chances: array[float], *, rows: Sequence[int], among_all: bool
    ) -> list[int]:
        """A token of each row that was asked about by chance.

        found: of `best`. count: of the likeliest tokens that are drawn from. chances: temperature, top_p, min_p and the
        number that decides, of one row after another. rows: their numbers. among_all: whether tokens behind the
        likeliest may come (`found` has their `log_sum`).
        """
        ids, values = found.ids, found.logits
        if ids.shape[1] > count:
            ids, values = ids[:, :count], values[:, :count]
        decide = torch.frombuffer(chances, dtype=torch.float64).view(-1, 4)
        log_sum = found.log_sum if among_all else None
        drawn: torch.Tensor = self._questions.draw(self._held, self._numbers(rows), (ids, values), decide, log_sum)
        return drawn.tolist()

    def ranks(self, ids: torch.Tensor) -> torch.Tensor:
        """Where ids int64 [n, m] stand among all tokens of their row, 1 the likeliest: int64 [n, m]."""
        found: torch.Tensor = self._questions.ranks(self.values, ids.to(self.values.device))
        return found.cpu()

    def _numbers(self, rows: Sequence[int]) -> Sequence[int]:
        """Of some of these rows, among those that are held."""
        return [self._first + row for row in rows] if self._first else rows

    def checked(self) -> torch.Tensor:
        """`values`; `NumericsError` where one is not finite."""
        finite = torch.isfinite(self.values)
        if not bool(finite.all()):
            rows = (~finite.all(dim=-1)).nonzero().flatten().tolist()
            raise NumericsError(
                "Logits are not finite", where=f"rows {rows[:8]} of {self.values.shape[0]}",
                found=f"{int((~finite).sum())} NaN or infinite values", accepted="finite values",
                hint="run `hadron check --data` to find broken weights; try --dtype float32",
            )  # fmt: skip
        return self.values
