"""Rotary embedding of a part of a vector; a part of 0 elements is left alone."""

from __future__ import annotations

import torch

from hadron.kernels.provider import Provider


class Rope:
    """theta: base of the frequencies. interleave: pairs (2i, 2i+1) rather than half-split."""

    def __init__(self, theta: float, interleave: bool, kernels: Provider) -> None:
        self.theta = theta
        self.interleave = interleave
        self._rotate = kernels.function("rope", "rotate_parts")

    def turned(self, *parts: tuple[torch.Tensor, int], size: int, positions: torch.Tensor) -> list[torch.Tensor]:
        """Each x [tokens, ..., n] with its elements from start to start + size rotated by positions int64 [tokens]."""
        if not size:
            return [x for x, _ in parts]
        out: list[torch.Tensor] = self._rotate(parts, size, positions, self.theta, self.interleave)
        return out
