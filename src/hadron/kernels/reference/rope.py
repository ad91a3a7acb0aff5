"""Definition of `rope`: rotary position embedding, interleaved or half-split.

Pair i of a vector of n elements turns by position * theta^(-2i/n). Interleaved pairs are elements
(2i, 2i+1), half-split ones (i, i + n/2). Both stay where they were, so that a half-split embedding of
permuted elements is the permuted interleaved one. Angles are float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float, interleave: bool) -> torch.Tensor:
    """x [tokens, n] or [tokens, heads, n], positions int64 [tokens] -> the same shape and dtype."""
    size = x.shape[-1]
    if not size:
        return x
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=x.device) / size
    angles = positions.float()[:, None] * (1.0 / theta**exponents)
    if x.dim() == 3:
        angles = angles.unsqueeze(1)
    cos, sin = angles.cos(), angles.sin()
    values = x.float()
    if interleave:
        first, second = values[..., 0::2], values[..., 1::2]
    else:
        first, second = values.chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    out = torch.stack(turned, dim=-1).flatten(-2) if interleave else torch.cat(turned, dim=-1)
    return out.to(x.dtype)


def rotate_part(
    x: torch.Tensor, start: int, size: int, positions: torch.Tensor, theta: float, interleave: bool
) -> torch.Tensor:
    """As `rotate`, of elements start .. start + size - 1; the others stay as they are."""
    if not size:
        return x
    end = start + size
    turned = rotate(x[..., start:end], positions, theta, interleave)
    return torch.cat([x[..., :start], turned, x[..., end:]], dim=-1)


def rotate_parts(
    parts: Sequence[tuple[torch.Tensor, int, int, float, bool]], positions: torch.Tensor
) -> list[torch.Tensor]:
    """`rotate_part` of each (x, start, size, theta, interleave)."""
    return [rotate_part(x, start, size, positions, theta, interleave) for x, start, size, theta, interleave in parts]
