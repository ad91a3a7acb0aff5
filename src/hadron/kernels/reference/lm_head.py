"""Definition of `lm_head`: logits from a table of rows, one a token of the vocabulary.

Used where head and embedding are one table; a head of its own is a `linear`.
"""

from __future__ import annotations

import torch

ROWS = 8192
"""Rows of the table that are widened to float32 at a time."""


def logits(hidden: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """hidden [n, hidden], table [vocabulary, hidden] -> float32 [n, vocabulary]."""
    x = hidden.float()
    return torch.cat([x @ part.float().T for part in torch.split(table, ROWS)], dim=-1)
