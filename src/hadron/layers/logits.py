"""`Logits`: rows of logits that stay where the head computed them; one asks for what is needed of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hadron.errors import NumericsError
from hadron.kernels.provider import Provider


class Best(NamedTuple):
    """The likeliest tokens of each of n rows.

    ids int64, logits float32 [n, count], best first, on a tie the lowest id; log_sum float64 [n], the logarithm of how
    likely all tokens of the row are together where the likeliest counts as 1, or [0] where no temperature was given;
    faults int64 [n], how many of its logits are not finite (then nothing else is defined).
    """

    ids: NDArray[np.int64]
    logits: NDArray[np.float32]
    log_sum: NDArray[np.float64]
    faults: NDArray[np.int64]

    def rows(self, first: int, end: int) -> Best:
        """Those of some of the rows."""
        return Best(self.ids[first:end], self.logits[first:end], self.log_sum[first:end], self.faults[first:end])


class Logits:
    """Rows of logits."""

    __slots__ = ("_best", "_end", "_first", "_held", "_ranks")

    def __init__(
        self, held: torch.Tensor, best: Callable[..., Any], ranks: Callable[..., Any], rows: range | None = None
    ) -> None:
        """held: float32 [n, vocabulary], not checked. rows: which of them, by default all."""
        self._held = held
        self._best = best
        self._ranks = ranks
        self._first, self._end = (0, held.shape[0]) if rows is None else (rows.start, rows.stop)

    @classmethod
    def of(cls, values: torch.Tensor, kernels: Provider) -> Logits:
        """Rows that came from elsewhere than a head."""
        return cls(values, kernels.function("lm_head", "best"), kernels.function("lm_head", "ranks"))

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
        return Logits(self._held, self._best, self._ranks, range(self._first + first, self._first + end))

    def changed(self, values: torch.Tensor) -> Logits:
        """Other rows in place of these."""
        return Logits(values.to(self._held.device), self._best, self._ranks)

    def best(self, count: int, *, rows: Sequence[int] | None = None, temperature: float | None = None) -> Best:
        """The `count` likeliest tokens of each row; all of a smaller vocabulary.

        rows: numbers of those that are asked about, instead of all. temperature: that of `Best.log_sum`.
        """
        asked = range(self._first, self._end) if rows is None else [self._first + row for row in rows]
        return Best(
            *(part.cpu().numpy() for part in self._best(self._held, count, rows=asked, temperature=temperature))
        )

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
