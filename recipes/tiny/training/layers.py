"""Pieces both families share: a linear layer in the dtype of its input, RMSNorm, SwiGLU, and when to compile.

Master weights are float32; a layer casts its weight to the dtype of what it is given, so one model runs in bfloat16
for speed and in float32 for comparison with the stock modules.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

COMPILE = os.environ.get("TINY_COMPILE", "1") == "1"


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` through `torch.compile` for any shape, or as it is where TINY_COMPILE=0."""
    return torch.compile(function, dynamic=True) if COMPILE else function


class Linear(nn.Linear):
    """A linear layer without bias that computes in the dtype of its input; initialised by fan-in times `gain`."""

    def __init__(self, in_features: int, out_features: int, gain: float = 1.0):
        super().__init__(in_features, out_features, bias=False)
        nn.init.normal_(self.weight, std=gain * in_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., in] to [..., out]."""
        return F.linear(x, self.weight.to(x.dtype))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis, in float32, back in the dtype of `x`."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight.to(x.dtype) * wide.to(x.dtype)


_rms_norm = compiled(rms_norm)


class RMSNorm(nn.Module):
    """RMSNorm with a weight, epsilon `eps`."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalised over the last axis."""
        return _rms_norm(x, self.weight, self.eps)


def swiglu(gate_up: Tensor, limit: float | None) -> Tensor:
    """silu(gate) * up of [..., 2M], clamped to `limit` where there is one; [..., M]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if limit is not None:
        gate = gate.clamp(max=limit)
        up = up.clamp(-limit, limit)
    return F.silu(gate) * up


swiglu_c = compiled(swiglu)


class MLP(nn.Module):
    """A dense SwiGLU layer."""

    def __init__(self, hidden: int, intermediate: int, limit: float | None):
        super().__init__()
        self.gate_proj = Linear(hidden, intermediate)
        self.up_proj = Linear(hidden, intermediate)
        self.down_proj = Linear(intermediate, hidden)
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] to [T, H]."""
        weight = torch.cat([self.gate_proj.weight, self.up_proj.weight])
        return self.down_proj(swiglu_c(F.linear(x, weight.to(x.dtype)), self.limit))
