"""The reference backend against attention written out in numpy, over scattered pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hadron.attention.backend import AttentionInput, LatentExpansion
from hadron.attention.reference import ReferenceBackend
from hadron.batch import RequestStep, make_batch
from hadron.cache.blocks import BlockPool
from hadron.cache.manager import CacheManager
from hadron.cache.pages import Pages
from hadron.cache.spec import CacheSpec, LayerCache
from hadron.cache.states import States

HEADS, NOPE, ROPE, V, RANK, PAGE = 3, 5, 4, 6, 7, 4


def attend(query: np.ndarray, rows: np.ndarray, chosen: list[int], key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """query [heads, nope + rope], rows [length, rank + rope] -> [heads, v], keys and values expanded."""
    out = np.zeros((HEADS, V))
    for h in range(HEADS):
        if not chosen:
            continue
        keys = np.concatenate([rows[chosen, :RANK] @ key[h].T, rows[chosen, RANK:]], axis=1)
        scores = keys @ query[h] * (NOPE + ROPE) ** -0.5
        weights = np.exp(scores - scores.max())
        out[h] = (weights / weights.sum()) @ (rows[chosen, :RANK] @ value[h].T)
    return out


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("path", ["mqa", "dense_mha"])
@pytest.mark.parametrize(
    ("contexts", "queries"), [((9, 0), (1, 6)), ((3, 6, 0, 2), (1, 1, 8, 5)), ((11,), (1,)), ((0,), (13,))]
)
def test_mixed_batches(
    contexts: tuple[int, ...], queries: tuple[int, ...], path: str, dtype: torch.dtype, tolerance: float
) -> None:
    rng = np.random.default_rng(len(contexts))
    spec = CacheSpec((LayerCache(), LayerCache(latent_width=RANK + ROPE)), 1, str(dtype)[6:], PAGE, str(dtype)[6:])
    pages, states = Pages(spec, 32), States(spec, 8)
    manager = CacheManager(spec, BlockPool(32, PAGE), pages, states)
    rows = [rng.normal(size=(c + q, RANK + ROPE)).astype(np.float32) for c, q in zip(contexts, queries, strict=True)]
    key, value = rng.normal(size=(HEADS, NOPE, RANK)), rng.normal(size=(HEADS, V, RANK))
    steps = []
    caches = [manager.admit() for _ in contexts]
    for length in range(1, 16):  # pages of different requests interleave
        for cache, part in zip(caches, rows, strict=True):
            manager.grow(cache, min(length, len(part)))
    for cache, context, part in zip(caches, contexts, rows, strict=True):
        states.advance([cache.state_slot], [context])
        manager.commit([cache], [[0] * context])
        slots = torch.tensor([cache.block_table[p // PAGE] * PAGE + p % PAGE for p in range(len(part))])
        pages.write_latents(1, slots, torch.from_numpy(part))
        steps.append(RequestStep(cache, [0] * (len(part) - context)))
    batch = make_batch(steps, pages, states)
    backend = ReferenceBackend(path, selection_budget=100)
    metadata = backend.build_metadata(batch)
    assert (metadata.prefill is not None) == (path == "dense_mha" and max(queries) > 1)
    query = rng.normal(size=(batch.tokens, HEADS, NOPE + ROPE)).astype(np.float32)
    width = max(len(part) for part in rows)
    selection = np.full((batch.tokens, width), -1)
    expected = np.zeros((batch.tokens, HEADS, V))
    at = 0
    for context, part in zip(contexts, rows, strict=True):
        for position in range(context, len(part)):
            dense = metadata.prefill is not None and at >= metadata.num_decode_tokens
            some = sorted(rng.choice(position + 1, size=(position + 2) // 2, replace=False).tolist())
            chosen = list(range(position + 1)) if dense else some
            selection[at, : len(chosen)] = chosen
            stored = torch.from_numpy(part).to(dtype).float().numpy()
            q = torch.from_numpy(query[at]).to(dtype).float().numpy()
            expected[at] = attend(q, stored, chosen, key, value)
            at += 1
    expansion = LatentExpansion(torch.from_numpy(key).float(), torch.from_numpy(value).float(), (NOPE + ROPE) ** -0.5)
    step = AttentionInput(1, torch.from_numpy(query).to(dtype), torch.from_numpy(selection), expansion)
    found = backend.attend(step, metadata, pages)
    assert found.dtype == dtype
    assert np.abs(found.float().numpy() - expected).max() <= tolerance * np.abs(expected).max()
