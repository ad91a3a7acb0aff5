"""Native `indexer`: pools and stores keys in one call, scores and selects in another.

Where the cache is bfloat16 and the level has bfloat16 dots, queries are rounded to bfloat16; sums, head
weights and pooling are float32. Selection is exact, ties go to the lowest index, and no more scores exist at a
time than a block of keys has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hadron.errors import NumericsError
from hadron.kernels.cpu.native import extension

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def store(
    keys: torch.Tensor,
    gates: torch.Tensor | None,
    table: torch.Tensor | None,
    slots: torch.Tensor,
    query_lens: Sequence[int],
    lengths: Sequence[int],
    pages: torch.Tensor,
    tails: torch.Tensor | None,
    state_slots: Sequence[int],
    pool: int,
    level: Any = None,
) -> None:
    """As `reference.indexer.store`."""
    keys, slots = keys.float().contiguous(), slots.contiguous()
    gates = None if gates is None else gates.float().contiguous()
    table = None if table is None else table.float().contiguous()
    lens, ends, states = torch.tensor(query_lens), torch.tensor(lengths), torch.tensor(state_slots)
    blocks, rows, size = pages.shape
    assert pages.is_contiguous() and keys.shape == (slots.shape[0], size) and sum(query_lens) == slots.shape[0]
    if gates is not None:
        assert gates.shape == keys.shape and table is not None and table.shape == (pool, size)
        assert pool == 1 or (tails is not None and tails.is_contiguous() and tails.shape[1:] == (2, pool - 1, size))
        assert tails is None or tails.dtype == torch.float32
        assert tails is None or 0 <= min(state_slots) <= max(state_slots) < tails.shape[0]
    extension().index_store(
        level, pages.data_ptr(), _TYPES[pages.dtype], blocks, rows, size, pool, lens.data_ptr(), ends.data_ptr(),
        len(lens), slots.shape[0], slots.data_ptr(), keys.data_ptr(), _address(gates), _address(table),
        _address(tails), states.data_ptr(),
    )  # fmt: skip


def choose(
    query: torch.Tensor,
    weights: torch.Tensor,
    pages: torch.Tensor,
    tables: torch.Tensor,
    positions: torch.Tensor,
    query_lens: Sequence[int],
    lengths: Sequence[int],
    topk: int,
    pool: int,
    tail: bool,
    threads: int = 1,
    level: Any = None,
) -> torch.Tensor:
    """As `reference.indexer.choose`."""
    count = topk // pool
    longest = max(lengths) // pool
    width = min(count, longest) * pool + (pool - 1 if tail else 0)
    tokens, heads, size = query.shape
    out = torch.empty(tokens, width, dtype=torch.int64)
    query, weights = query.contiguous(), weights.float().contiguous()
    tables, positions = tables.contiguous(), positions.contiguous()
    lens, ends = torch.tensor(query_lens), torch.tensor(lengths)
    assert count > 0 and pages.is_contiguous() and pages.shape[2] == size and weights.shape == (tokens, heads)
    assert sum(query_lens) == tokens == positions.shape[0] and tables.shape[0] == len(lens) == len(ends)
    bad = extension().index_select(
        level, pages.data_ptr(), _TYPES[pages.dtype], pages.shape[0], pages.shape[1], size, pool, lens.data_ptr(),
        ends.data_ptr(), len(lens), tables.data_ptr(), tables.shape[1], tokens, query.data_ptr(),
        _TYPES[query.dtype], weights.data_ptr(), positions.data_ptr(), heads, count, tail, out.data_ptr(), width,
        threads,
    )  # fmt: skip
    if bad is not None:
        token, key, score = bad
        raise NumericsError(
            "Indexer scores are not finite", where=f"query row {_row(token, query_lens)}, key {key}",
            found=str(score), accepted="finite scores",
            hint="run `hadron check --data` to find broken weights; try --dtype float32",
        )  # fmt: skip
    return out


def _row(token: int, query_lens: Sequence[int]) -> int:
    """The place of a token within its request's."""
    for length in query_lens:
        if token < length:
            break
        token -= length
    return token


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
