"""Rotary embedding of a part of a vector; a part of 0 elements is left alone."""

from __future__ import annotations

import torch

from hadron.kernels.provider import Provider


class Rope:
    """theta: base of the frequencies. interleave: pairs (2i, 2i+1) rather than half-split."""

    def __init__(self, theta: float, interleave: bool, kernels: Provider) -> None:
        self.theta = theta
        self.interleave = interleave
        self._rotate = kernels.function("rope", "rotate")

    def first(self, x: torch.Tensor, size: int, positions: torch.Tensor) -> torch.Tensor:
        """x [tokens, ..., n] with its first `size` elements rotated by positions int64 [tokens]."""
        if not size:
            return x
        return torch.cat([self._rotate(x[..., :size], positions, self.theta, self.interleave), x[..., size:]], dim=-1)

    def last(self, x: torch.Tensor, size: int, positions: torch.Tensor) -> torch.Tensor:
        """x [tokens, ..., n] with its last `size` elements rotated by positions int64 [tokens]."""
        if not size:
            return x
        rotated = self._rotate(x[..., -size:], positions, self.theta, self.interleave)
        return torch.cat([x[..., :-size], rotated], dim=-1)
