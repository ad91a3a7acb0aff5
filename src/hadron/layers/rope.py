"""Rotary embedding of a part of a vector; a part of 0 elements is left alone."""

from __future__ import annotations

import torch

from hadron.kernels.provider import Provider


class Rope:
    """size: elements that turn. theta: base of the frequencies. interleave: pairs (2i, 2i+1) rather than half-split."""

    def __init__(self, size: int, theta: float, interleave: bool, kernels: Provider) -> None:
        self.how = size, theta, interleave
        self.run = kernels.function("rope", "rotate_parts")


def turned(*parts: tuple[Rope, torch.Tensor, int], positions: torch.Tensor) -> list[torch.Tensor]:
    """Each x [tokens, ..., n] with its elements from start on turned by positions int64 [tokens], in one call of the
    first one's kernel."""
    out: list[torch.Tensor] = parts[0][0].run([(x, start, *rope.how) for rope, x, start in parts], positions)
    return out
