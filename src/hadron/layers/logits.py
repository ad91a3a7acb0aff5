"""`Logits`: rows of logits that stay where the head computed them; one asks for what is needed of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hadron.errors import NumericsError
from hadron.kernels.provider import Provider


class Best(NamedTuple):
    """The likeliest tokens of each of n rows, on the CPU.

    ids int64, logits float32 [n, count], best first, on a tie the lowest id; log_sum_exp float64 [n], of
    the whole row; faults int64 [n], how many of its logits are not finite (then nothing else is defined).
    """

    ids: torch.Tensor
    logits: torch.Tensor
    log_sum_exp: torch.Tensor
    faults: torch.Tensor

    def rows(self, first: int, end: int) -> Best:
        """Those of some of the rows."""
        return Best(*(part[first:end] for part in self))


class Logits:
    """Rows of logits. values: float32 [n, vocabulary], not checked."""

    __slots__ = ("_best", "_ranks", "values")

    def __init__(self, values: torch.Tensor, best: Callable[..., Any], ranks: Callable[..., Any]) -> None:
        self.values = values
        self._best = best
        self._ranks = ranks

    @classmethod
    def of(cls, values: torch.Tensor, kernels: Provider) -> Logits:
        """Rows that came from elsewhere than a head."""
        return cls(values, kernels.function("lm_head", "best"), kernels.function("lm_head", "ranks"))

    def __len__(self) -> int:
        return self.values.shape[0]

    @property
    def vocabulary(self) -> int:
        """Logits of a row."""
        return self.values.shape[1]

    def rows(self, first: int, end: int) -> Logits:
        """Some of the rows, not copied."""
        return Logits(self.values[first:end], self._best, self._ranks)

    def changed(self, values: torch.Tensor) -> Logits:
        """Other rows in place of these."""
        return Logits(values.to(self.values.device), self._best, self._ranks)

    def best(self, count: int) -> Best:
        """The `count` likeliest tokens of each row; all of a smaller vocabulary."""
        return Best(*(part.cpu() for part in self._best(self.values, count)))

    def ranks(self, ids: torch.Tensor) -> torch.Tensor:
        """Where ids int64 [n, m] stand among all tokens of their row, 1 the likeliest: int64 [n, m]."""
        found: torch.Tensor = self._ranks(self.values, ids.to(self.values.device))
        return found.cpu()

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
