"""Definition of `indexer`: pool keys, score them, select the best, exactly.

score(t, j) = sum over heads of w_th / sqrt(heads) * relu(q_th . k_j / sqrt(head_dim)), float32, no
softmax. The k largest win, ties (zeros are common behind a ReLU) go to the lowest index, and what is
selected ascends. No intermediate exceeds `bound` elements, whatever the context.
Source: DeepSeek-V3.2; transformers 5.23 `glm_moe_dsa`, `glm5_next`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from hadron.errors import NumericsError

BOUND = 1 << 24
"""Largest intermediate, in elements."""


def pool_keys(keys: torch.Tensor, gates: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """keys, gates [pools, pool, head_dim], table [pool, head_dim] of positions within a pool
    -> float32 [pools, head_dim]: for each channel, keys weighted by softmax(gates + table) over the pool."""
    weights = (gates.float() + table.float()).softmax(dim=1)
    return (weights * keys.float()).sum(dim=1)


def scores(query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, bound: int = BOUND) -> torch.Tensor:
    """query [tokens, heads, head_dim], weights float32 [tokens, heads], keys [n, head_dim]
    -> float32 [tokens, n]."""
    tokens, heads, size = query.shape
    q = query.float() * size**-0.5
    w = weights.float() * heads**-0.5
    step = max(1, bound // (tokens * heads))
    parts = [
        torch.einsum("th,thn->tn", w, torch.einsum("thd,nd->thn", q, part.float()).relu())
        for part in torch.split(keys, step)
    ]  # fmt: skip
    return torch.cat(parts, dim=-1)


def select(
    query: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    visible: torch.Tensor,
    count: int,
    bound: int = BOUND,
) -> torch.Tensor:
    """The `count` best of the first visible[t] keys, for each token t.

    query, weights, keys: as in `scores`; visible int64 [tokens] -> int64 [tokens, min(count, n)], ascending,
    -1 beyond. `NumericsError` for a score that is not finite.
    """
    n = keys.shape[0]
    width = min(count, n)
    out = torch.full((query.shape[0], width), -1, dtype=torch.int64, device=query.device)
    if not width:
        return out
    index = torch.arange(n, device=query.device)
    step = max(1, bound // max(n, query.shape[1]))
    for first in range(0, query.shape[0], step):
        part = slice(first, first + step)
        scored = scores(query[part], weights[part], keys, bound)
        seen = index < visible[part].unsqueeze(1)
        _check_finite(scored, seen, first)
        chosen = _best(scored.masked_fill(~seen, float("-inf")), width) & seen
        rows, columns = chosen.nonzero(as_tuple=True)
        out[part][rows, chosen.cumsum(dim=1)[rows, columns] - 1] = columns
    return out


def _best(values: torch.Tensor, count: int) -> torch.Tensor:
    """True at the `count` largest of each row; ties to the lowest index."""
    least = values.topk(count, dim=1).values[:, -1:]
    above = values > least
    equal = values == least
    room = count - above.sum(dim=1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=1) <= room))


def _check_finite(scored: torch.Tensor, seen: torch.Tensor, first: int) -> None:
    bad = seen & ~torch.isfinite(scored)
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        raise NumericsError(
            "Indexer scores are not finite", where=f"query row {first + row}, key {column}",
            found=str(float(scored[row, column])), accepted="finite scores",
            hint="run `hadron check --data` to find broken weights; try --dtype float32",
        )  # fmt: skip


def expand_pools(pools: torch.Tensor, pool: int, positions: torch.Tensor, tail: bool) -> torch.Tensor:
    """Positions of selected pools, and of the open pool where `tail`.

    pools int64 [tokens, width] (-1: none), positions int64 [tokens] of the queries
    -> int64 [tokens, width * pool (+ pool - 1)], ascending, -1 beyond.
    """
    if pool == 1:
        return pools
    offsets = torch.arange(pool, device=pools.device)
    expanded = torch.where(pools.unsqueeze(-1) >= 0, pools.unsqueeze(-1) * pool + offsets, -1).flatten(1)
    if tail:
        # The open pool ends at the query itself; it is empty when the query closes one.
        start = (positions + 1) // pool * pool
        last = start.unsqueeze(1) + offsets[:-1]
        expanded = torch.cat([expanded, torch.where(last <= positions.unsqueeze(1), last, -1)], dim=1)
    beyond = torch.iinfo(torch.int64).max
    ordered = torch.where(expanded < 0, beyond, expanded).sort(dim=1).values
    return torch.where(ordered == beyond, -1, ordered)


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
) -> None:
    """Write a step's keys: each token's (gates None), or one for every pool that the step closes.

    keys, gates float32 [tokens, head_dim]; table [pool, head_dim]; slots int64 [tokens]; query_lens, lengths:
    new and total tokens of each request; pages [blocks, rows, head_dim]; tails float32 [state slots, 2,
    pool - 1, head_dim]: keys and gates of the open pool, row = position modulo pool. `IndexError` for a slot
    outside the pages.
    """
    rows = pages.view(-1, pages.shape[-1])
    if gates is None:
        _write(rows, slots, keys)
        return
    assert table is not None
    first = 0
    for count, length, state in zip(query_lens, lengths, state_slots, strict=True):
        waiting = (length - count) % pool
        both = torch.stack([keys[first : first + count], gates[first : first + count]])
        if tails is not None:
            both = torch.cat([tails[state, :, :waiting], both], dim=1)
        closed = both.shape[1] // pool
        if closed:
            whole = both[:, : closed * pool].reshape(2, closed, pool, -1)
            pooled = pool_keys(whole[0], whole[1], table)
            last = torch.arange(1, closed + 1, device=slots.device) * pool - 1 - waiting
            _write(rows, slots[first + last] // pool, pooled)
        if tails is not None:
            rest = both[:, closed * pool :]
            tails[state, :, : rest.shape[1]] = rest
        first += count


def _write(rows: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    low, high = int(slots.min()), int(slots.max())
    if low < 0 or high >= rows.shape[0]:
        raise IndexError(f"rows {low} to {high}: the cache has 0 to {rows.shape[0] - 1}")
    rows[slots] = values.to(rows.dtype)


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
) -> torch.Tensor:
    """Positions that each token of a step attends to, from keys read back from the pages.

    query [tokens, heads, head_dim], weights float32 [tokens, heads], pages as in `store`, tables int64
    [requests, pages], positions int64 [tokens]; topk counts tokens; tail: the open pool is attended
    -> int64 [tokens, width], ascending, -1 beyond. `NumericsError` for a score that is not finite.
    """
    selections, first = [], 0
    for request, (count, length) in enumerate(zip(query_lens, lengths, strict=True)):
        end = first + count
        pools = length // pool
        table = tables[request, : -(-pools // pages.shape[1])]
        context = pages[table].flatten(0, 1)[:pools]
        seen = (positions[first:end] + 1) // pool
        best = select(query[first:end], weights[first:end], context, seen, topk // pool)
        selections.append(expand_pools(best, pool, positions[first:end], tail))
        first = end
    width = max(selection.shape[1] for selection in selections)
    return torch.cat([F.pad(selection, (0, width - selection.shape[1]), value=-1) for selection in selections])
