"""Native `lm_head`: logits from a table of rows that head and embedding share, what changes them, and what is asked of
them.

A head of its own is a `linear`. The bits of a sum depend on its row and temperature alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import Struct
from typing import Any

import torch

from hadron.kernels.cpu.linear import Product
from hadron.kernels.cpu.native import extension
from hadron.kernels.cpu.native import level as current_level
from hadron.kernels.rules import RowRules
from hadron.kernels.stored import stored_weight
from hadron.quantization.dtypes import PLAIN
from hadron.quantization.scheme import PLAIN_STORAGE, parse_scheme

_RULES = Struct("=3f4x10q")
_SCHEMES = {torch.float32: PLAIN["F32"], torch.float16: PLAIN["F16"], torch.bfloat16: PLAIN["BF16"]}


def bind(table: torch.Tensor, *, threads: int = 1) -> Product:
    """The logits of a table [vocabulary, hidden]: hidden [n, hidden] -> float32 [n, vocabulary]."""
    scheme = parse_scheme(_SCHEMES[table.dtype])
    shape = (table.shape[0], table.shape[1])
    weight = stored_weight("lm_head", scheme, PLAIN_STORAGE, shape, {"weight": table})
    return Product(weight, None, threads)


def best(
    logits: torch.Tensor,
    count: int,
    *,
    rows: Sequence[int] | None = None,
    temperature: float | None = None,
    threads: int = 1,
    level: Any = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids int64 and logits float32 [n, count] of the largest, log-sum float64 [n], faults int64 [n]; see the
    definition. Rows are read where they lie."""
    held, size = logits.shape
    count = min(count, size)
    numbers = None if rows is None else array("q", rows)
    n = held if numbers is None else len(numbers)
    ids, values = torch.empty(n, count, dtype=torch.int64), torch.empty(n, count)
    totals, faults = (
        torch.empty(0 if temperature is None else n, dtype=torch.float64),
        torch.empty(n, dtype=torch.int64),
    )
    extension().best_logits(
        level or current_level(), _address(logits), held, numbers.buffer_info()[0] if numbers else 0, n, size, count,
        ids.data_ptr(), values.data_ptr(), temperature or 1.0, 0 if temperature is None else totals.data_ptr(),
        faults.data_ptr(), threads,
    )  # fmt: skip
    return ids, values, totals, faults


def rule(logits: torch.Tensor, rows: Sequence[int], rules: Sequence[RowRules], *, threads: int = 1) -> None:
    """Change rows by their rules, where they lie; see the definition."""
    held, size = logits.shape
    numbers = array("q", rows)
    last, packed, parts = None, b"", []
    for own in rules:
        if own is not last:  # neighbours are often one object
            last, packed = own, _packed(own, size)
        parts.append(packed)
    extension().rule_logits(
        _address(logits), held, numbers.buffer_info()[0], len(numbers), size, b"".join(parts), threads
    )  # fmt: skip


def _packed(rules: RowRules, size: int) -> bytes:
    """As the extension reads them. size: of a row."""
    seen, seen_count = rules.seen.buffer_info()
    biased, biased_count = rules.biased.buffer_info()
    banned, banned_count = rules.banned.buffer_info()
    allowed, only = rules.allowed, rules.only
    assert len(rules.counts) == seen_count and len(rules.bias) == biased_count and (only is None or only >= 0)
    if allowed is not None:
        assert allowed.dtype is torch.int32 and allowed.is_contiguous() and 32 * len(allowed) >= size
    return _RULES.pack(
        rules.repetition, rules.frequency, rules.presence, seen, rules.counts.buffer_info()[0], seen_count,
        biased, rules.bias.buffer_info()[0], biased_count, banned, banned_count,
        0 if allowed is None else allowed.data_ptr(), -1 if only is None else only,
    )  # fmt: skip


def draw(
    logits: torch.Tensor,
    rows: Sequence[int],
    likeliest: tuple[torch.Tensor, torch.Tensor],
    chances: torch.Tensor,
    log_sum: torch.Tensor | None = None,
    *,
    threads: int = 1,
    level: Any = None,
) -> torch.Tensor:
    """A token of each row by chance: int64 [n]; see the definition."""
    held, size = logits.shape
    ids, values = (part.contiguous() for part in likeliest)
    numbers = array("q", rows)
    assert ids.shape == values.shape and chances.shape == (ids.shape[0], 4) and ids.shape[0] == len(numbers)
    assert log_sum is None or log_sum.shape == ids.shape[:1]
    tokens = torch.empty(len(numbers), dtype=torch.int64)
    extension().draw_logits(
        level or current_level(), _address(logits), held, numbers.buffer_info()[0], len(numbers), size,
        ids.data_ptr(), values.data_ptr(), ids.shape[1], chances.data_ptr(),
        0 if log_sum is None else log_sum.data_ptr(), tokens.data_ptr(), threads,
    )  # fmt: skip
    return tokens


def ranks(logits: torch.Tensor, ids: torch.Tensor, *, threads: int = 1) -> torch.Tensor:
    """Where ids int64 [n, m] stand in the order of `best`, 1 the first: int64 [n, m]."""
    asked = ids.contiguous()
    assert asked.shape[0] == logits.shape[0] and asked.dtype is torch.int64, "a row of ids for each row"
    out = torch.empty_like(asked)
    extension().rank_logits(
        _address(logits), *logits.shape, asked.data_ptr(), asked.shape[1], out.data_ptr(), threads
    )  # fmt: skip
    return out


def _address(logits: torch.Tensor) -> int:
    assert logits.is_contiguous() and logits.dtype is torch.float32, "logits are float32 rows side by side"
    return logits.data_ptr()
