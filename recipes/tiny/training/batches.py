"""Batches of a fixed number of tokens: one length a batch, drawn anew for each step from the seed and the step alone.

Since nothing but the step decides a batch, a resumed training sees what an unbroken one would have seen.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .guide import sources

LENGTHS = (64, 96, 128, 192, 256, 384, 512, 768)
KINDS = ("problem", "tool", "retrieval", "talk")
# Share of each kind among the samples drawn, up to a progress. Of the tokens, problems have a third and at last half,
# retrieval two fifths and at last a quarter: attention takes longest to form, so it has more at first.
MIXES = (
    (0.33, {"problem": 0.63, "tool": 0.15, "retrieval": 0.16, "talk": 0.06}),
    (0.60, {"problem": 0.71, "tool": 0.13, "retrieval": 0.11, "talk": 0.05}),
    (1.00, {"problem": 0.74, "tool": 0.15, "retrieval": 0.08, "talk": 0.03}),
)
# Progress at which each level enters.
LEVEL_FROM = (0.0, 0.04, 0.08, 0.12)


@dataclass
class Batch:
    """One rank's share of a step; `kind` is [B], the rest [B, S]."""

    ids: Tensor
    weights: Tensor  # loss weight of each token as a target, 0 to 1
    padding: Tensor  # True where there is no token
    source: Tensor  # where the next token of an answer stands already, or -1
    kind: Tensor


class Batches:
    """Draws batches of `tokens` from a `train.npz`."""

    def __init__(self, path: Path, tokens: int, seed: int, pad: int):
        with np.load(path) as arrays:
            self.ids, self.weights = arrays["ids"], arrays["weights"]
            self.offsets, kind, level = arrays["offsets"], arrays["kind"], arrays["level"]
        self.kind, self.tokens, self.seed, self.pad = kind, tokens, seed, pad
        bucket = np.searchsorted(LENGTHS, np.diff(self.offsets))
        self.lengths = [length for length in LENGTHS if tokens % length == 0]
        if len(self.lengths) != len(LENGTHS):
            raise ValueError(f"{tokens} tokens a batch are not a multiple of each length {LENGTHS}: take n * 1536")
        # Samples of each (bucket, kind, level); those too long for every bucket are left out.
        self.cells = {
            (b, k, v): np.flatnonzero((bucket == b) & (kind == k) & (level == v))
            for b in range(len(LENGTHS))
            for k in range(len(KINDS))
            for v in range(int(level.max()) + 1)
        }
        self.cells = {key: found for key, found in self.cells.items() if found.size}

    def _shares(self, progress: float) -> dict[tuple[int, int, int], float]:
        """Probability of a sample of each cell: the mix over kinds, even over the open levels, then by size."""
        total: dict[tuple[int, int], int] = {}
        for (_, k, v), found in self.cells.items():
            total[k, v] = total.get((k, v), 0) + found.size
        mix = next(mix for until, mix in MIXES if progress <= until)
        opened = {k: [v for (kk, v) in total if kk == k and LEVEL_FROM[v] <= progress] for k, _ in total}
        shares = {
            (b, k, v): mix[KINDS[k]] / len(opened[k]) * found.size / total[k, v]
            for (b, k, v), found in self.cells.items()
            if v in opened[k]
        }
        whole = sum(shares.values())
        return {key: share / whole for key, share in shares.items()}

    def draw(self, step: int, progress: float, rank: int) -> Batch:
        """The batch of `rank` at `step`; both ranks of a step have the same length."""
        shares = self._shares(progress)
        # Longer buckets hold fewer samples a batch, so they come up more often than their share of samples.
        mass = np.zeros(len(LENGTHS))
        for (b, _, _), share in shares.items():
            mass[b] += share * LENGTHS[b]
        b = int(np.random.default_rng((self.seed, step)).choice(len(LENGTHS), p=mass / mass.sum()))
        random = np.random.default_rng((self.seed, step, rank + 1))
        keys = [key for key in shares if key[0] == b]
        p = np.array([shares[key] for key in keys])
        rows = self.tokens // LENGTHS[b]
        picked = [int(random.choice(self.cells[keys[i]])) for i in random.choice(len(keys), size=rows, p=p / p.sum())]
        return self.collate(picked, LENGTHS[b])

    def collate(self, samples: list[int], length: int) -> Batch:
        """Rows of `samples`, padded on the right to `length`."""
        ids = np.full((len(samples), length), self.pad, dtype=np.int64)
        weights = np.zeros((len(samples), length), dtype=np.float32)
        padding = np.ones((len(samples), length), dtype=bool)
        source = np.full((len(samples), length), -1)
        for row, sample in enumerate(samples):
            first, last = self.offsets[sample], self.offsets[sample + 1]
            ids[row, : last - first] = self.ids[first:last]
            weights[row, : last - first] = self.weights[first:last] / 10
            padding[row, : last - first] = False
            wanted = np.append(weights[row, 1 : last - first] > 0.5, False)
            source[row, : last - first] = sources(ids[row, : last - first], wanted)
        kind = torch.from_numpy(self.kind[samples].astype(np.int64))
        return Batch(*map(torch.from_numpy, (ids, weights, padding, source)), kind)
