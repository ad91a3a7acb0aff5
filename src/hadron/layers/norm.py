"""Norm layers: a weight by name and an eps; the arithmetic is the provider's."""

from __future__ import annotations

import torch

from hadron.kernels.provider import Provider
from hadron.layers.weights import Weights


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, name: str, eps: float, weights: Weights, kernels: Provider) -> None:
        self.weight = weights.tensor(name)
        self.eps = eps
        self.run = kernels.function("norm", "rms_norms")

    def __call__(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """x [..., size] -> the same shape in `dtype`."""
        return rms_norms((self, x, dtype))[0]


def rms_norms(*norms: tuple[RmsNorm, torch.Tensor, torch.dtype]) -> list[torch.Tensor]:
    """Each norm of its x in its dtype, in one call of the first one's kernel."""
    out: list[torch.Tensor] = norms[0][0].run([(x, norm.weight, norm.eps, dtype) for norm, x, dtype in norms])
    return out


class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * weight + bias."""

    def __init__(self, name: str, eps: float, weights: Weights, kernels: Provider) -> None:
        self.weight = weights.tensor(name)
        self.bias = weights.tensor(name + ".bias")
        self.eps = eps
        self._norm = kernels.function("norm", "layer_norm")

    def __call__(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """x [..., size] -> the same shape in `dtype`."""
        out: torch.Tensor = self._norm(x, self.weight, self.bias, self.eps, dtype)
        return out
