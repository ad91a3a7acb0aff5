"""Native `lm_head`: logits from a table of rows that head and embedding share.

A head of its own is a `linear`.
"""

from __future__ import annotations

import torch

from hadron.kernels.cpu.linear import Product
from hadron.kernels.stored import stored_weight
from hadron.quantization.dtypes import PLAIN
from hadron.quantization.scheme import PLAIN_STORAGE, parse_scheme

_SCHEMES = {torch.float32: PLAIN["F32"], torch.float16: PLAIN["F16"], torch.bfloat16: PLAIN["BF16"]}


def logits(hidden: torch.Tensor, table: torch.Tensor, threads: int = 1) -> torch.Tensor:
    """hidden [n, hidden], table [vocabulary, hidden] -> float32 [n, vocabulary]."""
    scheme = parse_scheme(_SCHEMES[table.dtype])
    shape = (table.shape[0], table.shape[1])
    weight = stored_weight("lm_head", scheme, PLAIN_STORAGE, shape, {"weight": table})
    return Product(weight, None, threads)(hidden)
