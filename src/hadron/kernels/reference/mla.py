"""Definition of `mla`: absorb the query, attend over selected latents, expand; and the dense form.

A cached row is a normed latent of kv_rank elements, then the rotated shared key (0 elements where
there is no rotary part). With k = W_k c and v = W_v c for a latent c, q.k = (W_k^T q).c and the output
is W_v of the mix of latents, so that keys and values need never be expanded. float32 throughout;
tiled over queries, so that no intermediate exceeds `BOUND` elements.
"""

from __future__ import annotations

from typing import Protocol

import torch

BOUND = 1 << 24
"""Largest intermediate, in elements."""


class _Expansion(Protocol):
    """key: float32 [heads, nope, kv_rank]; value: float32 [heads, v, kv_rank]; scale multiplies q.k."""

    @property
    def key(self) -> torch.Tensor: ...
    @property
    def value(self) -> torch.Tensor: ...
    @property
    def scale(self) -> float: ...


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
    """query float32 [tokens, heads, width], rows [slots, width], slots [tokens, k] (-1: none)
    -> float32 [tokens, heads, kv_rank]; zeros for a query that selects nothing."""
    rank = expansion.key.shape[-1]
    tokens, heads, width = query.shape
    out = torch.zeros(tokens, heads, rank, device=query.device)
    step = max(1, BOUND // max(1, slots.shape[1] * max(width, heads)))
    for first in range(0, tokens, step):
        part = slots[first : first + step]
        chosen = rows[part.clamp(min=0)].float()
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

    query [n, heads, nope + rope] at positions start .. start+n-1; context [length, kv_rank + rope]
    -> float32 [n, heads, v].
    """
    rank, nope = expansion.key.shape[-1], expansion.key.shape[1]
    rows, q = context.float(), query.float()
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
