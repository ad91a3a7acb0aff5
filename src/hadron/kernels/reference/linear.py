"""Definition of `linear`: y = x @ weight.T + bias, weights dequantized on the fly, sums in float32.

The weight is expanded in row ranges, so that a large one never exists whole in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from hadron.kernels.reference.dequantize import dequantize
from hadron.kernels.stored import StoredWeight

#: elements of the weight expanded at a time (64 MiB of float32)
_EXPANDED = 1 << 24


def linear(x: torch.Tensor, weight: StoredWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., in] of any float dtype, weight [out, in], bias [out] -> float32 [..., out]."""
    out, columns = weight.shape
    step = max(1, _EXPANDED // columns)
    wide = x.float()
    parts = [
        functional.linear(wide, dequantize(weight.rows(start, min(start + step, out)))) for start in range(0, out, step)
    ]
    y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    return y if bias is None else y + bias.float()


def bind(weight: StoredWeight, bias: torch.Tensor | None, threads: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """`linear` for one weight, as a layer keeps it: x [tokens, in] -> float32 [tokens, out].

    threads is that of native kernels; torch has its own.
    """
    del threads
    return partial(linear, weight=weight, bias=bias)
