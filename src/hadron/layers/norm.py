"""Norm layers: parameters by name and an eps; the arithmetic is the provider's."""

from __future__ import annotations

import torch

from hadron.kernels.provider import Provider
from hadron.layers.weights import Weights


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight."""

    bias: torch.Tensor | None = None

    def __init__(self, name: str, eps: float, weights: Weights, kernels: Provider) -> None:
        self.weight = weights.tensor(name)
        self.eps = eps
        self.run = kernels.function("norm", "norms")

    def __call__(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """x [..., size] -> the same shape in `dtype`."""
        return norms((self, x, dtype))[0]


class LayerNorm(RmsNorm):
    """(x - mean) / sqrt(variance + eps) * weight + bias."""

    def __init__(self, name: str, eps: float, weights: Weights, kernels: Provider) -> None:
        super().__init__(name, eps, weights, kernels)
        self.bias = weights.tensor(name + ".bias")


def norms(*those: tuple[RmsNorm, torch.Tensor, torch.dtype]) -> list[torch.Tensor]:
    """Each norm of its x in its dtype, in one call of the first one's kernel."""
    out: list[torch.Tensor] = those[0][0].run(
        [(x, norm.weight, norm.bias, norm.eps, dtype) for norm, x, dtype in those]
    )
    return out
