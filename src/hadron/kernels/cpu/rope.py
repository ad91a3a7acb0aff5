"""Native `rope`: rotary position embedding, interleaved or half-split. Angles are float32, as defined."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from hadron.kernels.cpu.native import extension
from hadron.kernels.cpu.native import level as current_level
from hadron.kernels.cpu.plain import number_type

#: x [tokens, n] or [tokens, heads, n], start, size, theta, interleave
Part = tuple[torch.Tensor, int, int, float, bool]


def rotate(
    x: torch.Tensor,
    positions: torch.Tensor,
    theta: float,
    interleave: bool,
    *,
    threads: int = 1,
    level: Any = None,
) -> torch.Tensor:
    """x [tokens, n] or [tokens, heads, n], positions int64 [tokens] -> the same shape and dtype."""
    return rotate_part(x, 0, x.shape[-1], positions, theta, interleave, threads=threads, level=level)


def rotate_part(
    x: torch.Tensor,
    start: int,
    size: int,
    positions: torch.Tensor,
    theta: float,
    interleave: bool,
    *,
    threads: int = 1,
    level: Any = None,
) -> torch.Tensor:
    """As `rotate`, of elements start .. start + size - 1; the others are copied."""
    return rotate_parts([(x, start, size, theta, interleave)], positions, threads=threads, level=level)[0]


def rotate_parts(
    parts: Sequence[Part], positions: torch.Tensor, *, threads: int = 1, level: Any = None
) -> list[torch.Tensor]:
    """`rotate_part` of each (x, start, size, theta, interleave), in one call."""
    calls, outs, kept = [], [], []
    for x, start, size, theta, interleave in parts:
        if not size:
            outs.append(x)
            continue
        wide = x if x.dtype in (torch.float32, torch.bfloat16) else x.float()
        if wide.stride(-1) != 1:
            wide = wide.contiguous()
        heads, head_stride = (wide.shape[1], wide.stride(1)) if wide.dim() == 3 else (1, 0)
        out = torch.empty(wide.shape, dtype=wide.dtype)
        calls.append(
            (wide.data_ptr(), number_type(wide.dtype), heads, wide.shape[-1], wide.stride(0), head_stride, start,
             size, _frequencies(theta, size).data_ptr(), interleave, out.data_ptr())
        )  # fmt: skip
        outs.append(out)
        kept.append(wide)  # may be copies, whose addresses the call takes
    if calls:
        positions = positions.contiguous()
        extension().rotate(level or current_level(), calls, positions.shape[0], positions.data_ptr(), threads)
    return [out.to(part[0].dtype) for part, out in zip(parts, outs, strict=True)]


@cache
def _frequencies(theta: float, size: int) -> torch.Tensor:
    """theta^(-2i/size) float32 [size/2], rounded as the definition rounds it: a position multiplies its error."""
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    return torch.as_tensor(1.0 / theta**exponents)
