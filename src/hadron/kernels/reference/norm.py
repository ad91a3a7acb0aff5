"""Definition of `norm`: RMS norm, its gated form, and layer norm. float32 inside, any dtype outside."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis, times weight where there is one, in `dtype`."""
    x = x.float()
    x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return (x if weight is None else x * weight.float()).to(dtype)


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    """RMS norm of x, times sigmoid(gate), in `dtype`. x and gate have the same shape."""
    return (rms_norm(x, weight, eps, torch.float32) * gate.float().sigmoid()).to(dtype)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    """(x - mean) / sqrt(variance + eps) over the last axis, times weight plus bias, in `dtype`."""
    x = x.float()
    x = x - x.mean(dim=-1, keepdim=True)
    x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return (x * weight.float() + bias.float()).to(dtype)


def norms(
    those: Sequence[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, float, torch.dtype]],
) -> list[torch.Tensor]:
    """Of each (x, weight, bias, eps, dtype): `layer_norm` where there is a bias, which has a weight too, else
    `rms_norm`."""
    out = []
    for x, weight, bias, eps, dtype in those:
        if bias is None:
            out.append(rms_norm(x, weight, eps, dtype))
        else:
            assert weight is not None
            out.append(layer_norm(x, weight, bias, eps, dtype))
    return out
