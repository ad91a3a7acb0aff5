"""What each step does: its stage, learning rates, weight of the MTP loss, step of the load balance."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """A training of `steps`, the first stage dense, then the indexer alone, then both under the real selection."""

    steps: int
    peak: float = 2e-3
    indexer_peak: float = 3e-3
    warmup: int = 60
    floor: float = 0.05
    indexer_share: float = 0.06
    sparse_share: float = 0.2

    @property
    def first_indexer(self) -> int:
        """First step of stage B."""
        return self.first_sparse - max(1, round(self.indexer_share * self.steps))

    @property
    def first_sparse(self) -> int:
        """First step of stage C."""
        return self.steps - max(1, round(self.sparse_share * self.steps))

    def stage(self, step: int) -> str:
        """A, B or C."""
        return "A" if step < self.first_indexer else "B" if step < self.first_sparse else "C"

    def progress(self, step: int) -> float:
        """Share of the trunk's steps done, which stand still in stage B."""
        done = min(step, self.first_indexer) + max(0, step - self.first_sparse)
        return done / (self.steps - (self.first_sparse - self.first_indexer))

    def rate(self, step: int) -> float:
        """Learning rate of the trunk: warm-up, then a cosine to the floor."""
        if self.stage(step) == "B":
            return 0.0
        cosine = 0.5 * (1 + math.cos(math.pi * self.progress(step)))
        return self.peak * min(1.0, (step + 1) / self.warmup) * (self.floor + (1 - self.floor) * cosine)

    def indexer_rate(self, step: int) -> float:
        """Learning rate of the indexers: a cosine to a tenth in stage B, and that tenth falling to 0 in stage C."""
        if self.stage(step) == "A":
            return 0.0
        if self.stage(step) == "B":
            part = (step - self.first_indexer) / (self.first_sparse - self.first_indexer)
            return self.indexer_peak * (0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * part)))
        return 0.2 * self.indexer_peak * (1 - 0.9 * (step - self.first_sparse) / (self.steps - self.first_sparse))

    def mtp_weight(self, step: int) -> float:
        """0.3 falling to 0.1."""
        return 0.3 - 0.2 * self.progress(step)

    def guide_weight(self, step: int) -> float:
        """That of what attention is shown: none once the indexers select."""
        return 0.3 if self.stage(step) == "A" else 0.0

    def balance_step(self, step: int) -> float:
        """Step of the correction bias, 0.01 falling to 0.001; none in stage B."""
        return 0.0 if self.stage(step) == "B" else 0.01 - 0.009 * self.progress(step)
