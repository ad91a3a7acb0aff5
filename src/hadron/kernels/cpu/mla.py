"""Native `mla`: absorb, attend and expand in one call, `kv_b_proj` staying in its stored scheme.

Queries over latents, weights and mixes of latents are rounded to bfloat16 where the cache is bfloat16 and the
level has bfloat16 dots; sums and softmax are float32. FP8 rows are widened, to bfloat16 at that level and to
float32 at others. A token's result depends on its query, its list and its
rows alone. `dense` is outside that promise.
"""

from __future__ import annotations

from typing import Any

import torch

from hadron.kernels.cpu.linear import Product
from hadron.kernels.cpu.native import extension
from hadron.kernels.cpu.native import level as current_level
from hadron.kernels.stored import StoredWeight

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ROW_TYPES = {**_TYPES, torch.uint8: 3}


def encode_rows(rows: torch.Tensor, kv_rank: int, *, threads: int = 1, level: Any = None) -> torch.Tensor:
    """rows [n, kv_rank + rope] -> uint8 [n, kv_rank + 4 + 2 rope]: rows of an FP8 cache, bit for bit as defined."""
    rows = rows.float().contiguous()
    count, rope = rows.shape[0], rows.shape[1] - kv_rank
    out = torch.empty(count, kv_rank + 4 + 2 * rope, dtype=torch.uint8)
    extension().encode_rows(level or current_level(), rows.data_ptr(), count, kv_rank, rope, out.data_ptr(), threads)
    return out


class LatentAttention:
    """`kv_b_proj` [heads * (nope + v), kv_rank] of one layer, bound. scale multiplies q.k."""

    __slots__ = ("_heads", "_kept", "_native", "_query_width", "_v", "_widths")

    def __init__(self, weight: StoredWeight, heads: int, nope: int, rope: int, v: int, scale: float, threads: int):
        rank = weight.shape[1]
        self._kept = Product(weight, None, threads)
        self._heads, self._v, self._query_width = heads, v, nope + rope
        self._widths = {**dict.fromkeys(_TYPES, rank + rope), torch.uint8: rank + 4 + 2 * rope}
        self._native = extension().Mla(
            self._kept.level, self._kept.native, heads, nope, rope, v, rank, scale, threads
        )  # fmt: skip

    def sparse(
        self, query: torch.Tensor, selection: torch.Tensor, pages: torch.Tensor, tables: torch.Tensor,
        owners: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """query [tokens, heads, nope + rope], selection int64 [tokens, k] (ascending, -1: none), pages
        [blocks, page, kv_rank + rope] (or FP8 rows, uint8 [blocks, page, kv_rank + 4 + 2 rope]), tables int64
        [requests, pages], owners int64 [tokens] -> [tokens, heads, v] in the query's dtype; `IndexError`
        outside table or cache."""
        query, out = self._checked(query, pages)
        selection, tables, owners = selection.contiguous(), tables.contiguous(), owners.contiguous()
        assert selection.dtype == tables.dtype == owners.dtype == torch.int64
        assert selection.shape[0] == owners.shape[0] == query.shape[0]
        self._native.sparse_attend(
            query.data_ptr(), _TYPES[query.dtype], query.shape[0], pages.data_ptr(), _ROW_TYPES[pages.dtype],
            pages.shape[0], pages.shape[1], selection.data_ptr(), selection.shape[1], tables.data_ptr(),
            tables.shape[0], tables.shape[1], owners.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out

    def dense(self, query: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
        """The last n of `length` tokens of one request over all before them. query [n, heads, nope + rope],
        table int64 [pages] -> [n, heads, v] in the query's dtype."""
        query, out = self._checked(query, pages)
        table = table.contiguous()
        assert table.dtype == torch.int64 and query.shape[0] <= length
        self._native.dense_attend(
            query.data_ptr(), _TYPES[query.dtype], query.shape[0], pages.data_ptr(), _ROW_TYPES[pages.dtype],
            pages.shape[0], pages.shape[1], table.data_ptr(), table.shape[0], length, out.data_ptr(),
        )  # fmt: skip
        return out

    def _checked(self, query: torch.Tensor, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert query.shape[1:] == (self._heads, self._query_width), tuple(query.shape)
        assert pages.is_contiguous() and pages.shape[2] == self._widths[pages.dtype], tuple(pages.shape)
        return query.contiguous(), torch.empty(query.shape[0], self._heads, self._v, dtype=query.dtype)


def bind(
    weight: StoredWeight, heads: int, nope: int, rope: int, v: int, scale: float, threads: int = 1
) -> LatentAttention:
    """The attention of one layer over its `kv_b_proj` [heads * (nope + v), kv_rank]."""
    return LatentAttention(weight, heads, nope, rope, v, scale, threads)
