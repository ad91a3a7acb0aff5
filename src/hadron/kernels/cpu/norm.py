"""Native `norm`: RMS norm, its gated form, and layer norm, row by row, float32 inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hadron.kernels.cpu.native import extension
from hadron.kernels.cpu.native import level as current_level
from hadron.kernels.cpu.plain import activations, number_type, numbers

#: x [..., size], weight or None, eps, dtype of the result
RmsNorm = tuple[torch.Tensor, torch.Tensor | None, float, torch.dtype]
_Norm = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, float, torch.dtype]
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
    return _rms_norms([(x, None, weight, eps, dtype)], threads, level)[0]


def rms_norms(norms: Sequence[RmsNorm], *, threads: int = 1, level: Any = None) -> list[torch.Tensor]:
    """`rms_norm` of each (x, weight, eps, dtype), in one call."""
    return _rms_norms([(x, None, weight, eps, dtype) for x, weight, eps, dtype in norms], threads, level)


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
    return _rms_norms([(x, activations(gate), weight, eps, dtype)], threads, level)[0]


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
    rows, stride = _rows(x)
    out = _output(x.shape, dtype)
    extension().layer_norm(
        level or current_level(), *_address(rows), stride, *numbers(weight), *numbers(bias),
        x.numel() // x.shape[-1], x.shape[-1], eps, *numbers(out), threads,
    )  # fmt: skip
    return out.to(dtype)


def _rms_norms(norms: Sequence[_Norm], threads: int, level: Any) -> list[torch.Tensor]:
    calls, outs, kept = [], [], []
    for x, gate, weight, eps, dtype in norms:
        rows, stride = _rows(x)
        out = _output(x.shape, dtype)
        gates, weights = (_ABSENT if t is None else numbers(t) for t in (gate, weight))
        shape = (x.numel() // x.shape[-1], x.shape[-1])
        calls.append((*_address(rows), stride, *gates, *weights, *shape, eps, *numbers(out)))
        outs.append(out)
        kept.append(rows)  # may be copies, whose addresses the call takes
    extension().rms_norms(level or current_level(), calls, threads)
    return [out.to(norm[4]) for norm, out in zip(norms, outs, strict=True)]


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
