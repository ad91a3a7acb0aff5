"""Rotary embedding of a part of a vector; a part of 0 elements is left alone."""

from __future__ import annotations

import torch

from hadron.kernels.provider import Provider


class Rope:
    """theta: base of the frequencies. interleave: pairs (2i, 2i+1) rather than half-split."""

    def __init__(self, theta: float, interleave: bool, kernels: Provider) -> None:
        self.theta = theta
        self.interleave = interleave
        self._rotate = kernels.function("rope", "rotate_part")

    def first(self, x: torch.Tensor, size: int, positions: torch.Tensor) -> torch.Tensor:
        """x [tokens, ..., n] with its first `size` elements rotated by positions int64 [tokens]."""
        return self._part(x, 0, size, positions)

    def last(self, x: torch.Tensor, size: int, positions: torch.Tensor) -> torch.Tensor:
        """x [tokens, ..., n] with its last `size` elements rotated by positions int64 [tokens]."""
        return self._part(x, x.shape[-1] - size, size, positions)

    def _part(self, x: torch.Tensor, start: int, size: int, positions: torch.Tensor) -> torch.Tensor:
        if not size:
            return x
        out: torch.Tensor = self._rotate(x, start, size, positions, self.theta, self.interleave)
        return out
