"""Definition of `mla`: absorb the query, attend over selected latents, expand; and the dense form.

A cached row is a normed latent of kv_rank elements, then the rotated shared key (0 elements where
there is no rotary part). With k = W_k c and v = W_v c for a latent c, q.k = (W_k^T q).c and the output
is W_v of the mix of latents, so that keys and values need never be expanded. float32 throughout;
tiled over queries, so that no intermediate exceeds `BOUND` elements. Rows of an FP8 cache are bytes:
kv_rank E4M3 codes, their float32 scale, then the key in bfloat16.
"""

from __future__ import annotations

from typing import Protocol

import torch

BOUND = 1 << 24
"""Largest intermediate, in elements."""

_LARGEST = 448.0  # of E4M3
_FP8_PARTS = (torch.float8_e4m3fn, torch.float32, torch.bfloat16)  # codes, scale, key


class _Expansion(Protocol):
    """key: float32 [heads, nope, kv_rank]; value: float32 [heads, v, kv_rank]; scale multiplies q.k."""

    @property
    def key(self) -> torch.Tensor: ...
    @property
    def value(self) -> torch.Tensor: ...
    @property
    def scale(self) -> float: ...


def encode_rows(rows: torch.Tensor, kv_rank: int) -> torch.Tensor:
    """rows [n, kv_rank + rope] -> uint8 [n, kv_rank + 4 + 2 rope]: codes, their scale, the key.

    The scale is the latent's largest magnitude over 448, or 1 where that is 0, so that zeros stay zeros. Codes
    are to nearest, ties to even. A latent that holds NaN or an infinity becomes NaN.
    """
    latent = rows[:, :kv_rank].float()
    scale = latent.abs().amax(dim=-1, keepdim=True) / _LARGEST
    scale = torch.where(scale == 0, 1.0, scale)
    codes = (latent / scale).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    parts = (codes, scale, rows[:, kv_rank:].to(torch.bfloat16).contiguous())
    return torch.cat([part.view(torch.uint8) for part in parts], dim=-1)


def row_values(rows: torch.Tensor, kv_rank: int) -> torch.Tensor:
    """Cached rows of any dtype [..., width], uint8 being those of `encode_rows` -> float32 [..., kv_rank + rope]."""
    if rows.dtype is not torch.uint8:
        return rows.float()
    sizes = [kv_rank, 4, rows.shape[-1] - kv_rank - 4]
    # Copies: a scale may lie at any address, which torch does not read from.
    parts = (part.clone(memory_format=torch.contiguous_format).flatten() for part in rows.split_with_sizes(sizes, -1))
    codes, scale, key = (
        part.view(dtype).float().reshape(*rows.shape[:-1], size // dtype.itemsize)
        for part, size, dtype in zip(parts, sizes, _FP8_PARTS, strict=True)
    )
    return torch.cat([codes * scale, key], dim=-1)


def absorb(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """query [tokens, heads, nope + rope], key [heads, nope, kv_rank] -> float32 [tokens, heads, kv_rank + rope]."""
    nope = key.shape[1]
    latent = torch.einsum("thn,hnr->thr", query[..., :nope].float(), key)
    return torch.cat([latent, query[..., nope:].float()], dim=-1)


def selected_slots(selection: torch.Tensor, tables: torch.Tensor, page_size: int, blocks: int) -> torch.Tensor:
    """selection [tokens, width] of positions, tables [tokens, pages] -> slots int64 [tokens, width], -1 kept.

    `IndexError` where a position lies outside its table or a block outside the cache.
    """
    page = selection.clamp(min=0) // page_size
    if selection.numel() and int(page.max()) >= tables.shape[1]:
        raise IndexError(f"position {int(selection.max())} lies outside a table of {tables.shape[1]} pages")
    block = tables.gather(1, page)
    chosen = selection >= 0
    if bool(((block < 0) | (block >= blocks))[chosen].any()):
        raise IndexError(f"a selected position lies in a block outside 0 .. {blocks - 1}")
    return torch.where(chosen, block * page_size + selection % page_size, -1)


def sparse_attend(query: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, expansion: _Expansion) -> torch.Tensor:
    """query float32 [tokens, heads, width], rows [slots, width] (or FP8 rows), slots [tokens, k] (-1: none)
    -> float32 [tokens, heads, kv_rank]; zeros for a query that selects nothing."""
    rank = expansion.key.shape[-1]
    tokens, heads, width = query.shape
    out = torch.zeros(tokens, heads, rank, device=query.device)
    step = max(1, BOUND // max(1, slots.shape[1] * max(width, heads)))
    for first in range(0, tokens, step):
        part = slots[first : first + step]
        chosen = row_values(rows[part.clamp(min=0)], rank)
        # A slot that was not chosen may hold anything, NaN included.
        chosen = chosen.masked_fill((part < 0).unsqueeze(-1), 0.0)
        scores = torch.einsum("thw,tkw->thk", query[first : first + step], chosen) * expansion.scale
        scores = scores.masked_fill((part < 0).unsqueeze(1), float("-inf"))
        weights = scores.softmax(dim=-1).masked_fill((part < 0).all(dim=-1)[:, None, None], 0.0)
        out[first : first + step] = torch.einsum("thk,tkr->thr", weights, chosen[..., :rank])
    return out


def expand(mixed: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """mixed [tokens, heads, kv_rank], value [heads, v, kv_rank] -> float32 [tokens, heads, v]."""
    return torch.einsum("thr,hvr->thv", mixed, value)


def dense_attend(query: torch.Tensor, context: torch.Tensor, start: int, expansion: _Expansion) -> torch.Tensor:
    """Causal attention with keys and values expanded from all rows of one sequence.

    query [n, heads, nope + rope] at positions start .. start+n-1; context [length, kv_rank + rope] (or
    FP8 rows) -> float32 [n, heads, v].
    """
    rank, nope = expansion.key.shape[-1], expansion.key.shape[1]
    rows, q = row_values(context, rank), query.float()
    keys = torch.einsum("lr,hnr->hln", rows[:, :rank], expansion.key)
    values = torch.einsum("lr,hvr->hlv", rows[:, :rank], expansion.value)
    positions = torch.arange(rows.shape[0], device=rows.device)
    out = torch.empty(q.shape[0], q.shape[1], values.shape[-1], device=q.device)
    step = max(1, BOUND // max(1, q.shape[1] * rows.shape[0]))
    for first in range(0, q.shape[0], step):
        part = q[first : first + step]
        scores = torch.einsum("thn,hln->htl", part[..., :nope], keys)
        scores += torch.einsum("thr,lr->htl", part[..., nope:], rows[:, rank:])
        visible = positions <= start + first + torch.arange(part.shape[0], device=rows.device)[:, None]
        weights = (scores * expansion.scale).masked_fill(~visible, float("-inf")).softmax(dim=-1)
        out[first : first + step] = torch.einsum("htl,hlv->thv", weights, values)
    return out
