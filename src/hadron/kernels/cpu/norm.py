"""Native `norm`: RMS norm, its gated form, and layer norm, row by row, float32 inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hadron.kernels.cpu.native import extension
from hadron.kernels.cpu.native import level as current_level
from hadron.kernels.cpu.plain import activations, number_type, numbers

#: x [..., size], weight or None, bias or None, eps, dtype of the result
Norm = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, float, torch.dtype]
_ABSENT = (0, 0)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype,
    *,
    threads: int = 1,
    level: Any = None,
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis, times weight where there is one, in `dtype`."""
    return norms([(x, weight, None, eps, dtype)], threads=threads, level=level)[0]


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    threads: int = 1,
    level: Any = None,
) -> torch.Tensor:
    """RMS norm of x, times sigmoid(gate), in `dtype`. x and gate have the same shape."""
    return _norms([(x, weight, None, eps, dtype)], [activations(gate)], threads, level)[0]


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    threads: int = 1,
    level: Any = None,
) -> torch.Tensor:
    """(x - mean) / sqrt(variance + eps) over the last axis, times weight plus bias, in `dtype`."""
    return norms([(x, weight, bias, eps, dtype)], threads=threads, level=level)[0]


def norms(those: Sequence[Norm], *, threads: int = 1, level: Any = None) -> list[torch.Tensor]:
    """Of each (x, weight, bias, eps, dtype), in one call: `layer_norm` where there is a bias, else `rms_norm`."""
    return _norms(those, [None] * len(those), threads, level)


def _norms(those: Sequence[Norm], gates: Sequence[torch.Tensor | None], threads: int, level: Any) -> list[torch.Tensor]:
    calls, outs, kept = [], [], []
    for (x, weight, bias, eps, dtype), gate in zip(those, gates, strict=True):
        rows, stride = _rows(x)
        out = _output(x.shape, dtype)
        parameters = [part for t in (gate, weight, bias) for part in (_ABSENT if t is None else numbers(t))]
        calls.append((*_address(rows), stride, *parameters, x.numel() // x.shape[-1], x.shape[-1], eps, *numbers(out)))
        outs.append(out)
        kept.append(rows)  # may be copies, whose addresses the call takes
    extension().norms(level or current_level(), calls, threads)
    return [out.to(one[-1]) for one, out in zip(those, outs, strict=True)]


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """x, copied only where its rows are not evenly spaced, and the bytes from one row to the next."""
    if x.dim() != 2 or x.stride(1) != 1 or x.dtype not in (torch.float32, torch.bfloat16):
        x = activations(x)
        return x, x.shape[-1] * x.element_size()
    return x, x.stride(0) * x.element_size()


def _address(rows: torch.Tensor) -> tuple[int, int]:
    """(address, code) of activations whose rows may lie apart."""
    return rows.data_ptr(), number_type(rows.dtype)


def _output(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype if dtype is torch.bfloat16 else torch.float32)
