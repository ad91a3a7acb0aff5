"""Definition of `embedding`: rows of a table."""

from __future__ import annotations

import torch


def rows(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """table [vocabulary, hidden] in any dtype, ids int64 [tokens] in range -> float32 [tokens, hidden]."""
    return table[ids].float()
