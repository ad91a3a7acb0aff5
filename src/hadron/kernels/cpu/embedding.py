"""Native `embedding`: rows of a table at any address."""

from __future__ import annotations

from typing import Any

import torch

from hadron.kernels.cpu.native import extension
from hadron.kernels.cpu.native import level as current_level
from hadron.kernels.cpu.plain import numbers


def rows(table: torch.Tensor, ids: torch.Tensor, *, threads: int = 1, level: Any = None) -> torch.Tensor:
    """table [vocabulary, hidden], float32, bfloat16 or float16; ids int64 [tokens] -> float32 [tokens, hidden].

    `IndexError` for an id that is not a row.
    """
    vocabulary, hidden = table.shape
    ids = ids.contiguous()
    out = torch.empty(ids.shape[0], hidden)
    extension().embedding(
        level or current_level(), *numbers(table), vocabulary, hidden, ids.data_ptr(), ids.shape[0], out.data_ptr(),
        threads,
    )  # fmt: skip
    return out
