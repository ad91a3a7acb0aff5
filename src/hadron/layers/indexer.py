"""Sparse-attention indexer: writes its keys (each token's, or one for every pool of tokens) and selects
the positions each query attends to.

A pool is visible to a query when its last token is. Keys and gates of the pool that is still open wait
in the request's state slot, in float32, so that it makes no difference which step closes a pool.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hadron.attention.backend import AttentionMetadata
from hadron.batch import ForwardBatch
from hadron.kernels.provider import Provider
from hadron.layers.dimensions import IndexerDimensions
from hadron.layers.norm import LayerNorm
from hadron.layers.rope import Rope
from hadron.layers.weights import Weights


class Indexer:
    """`self_attn.indexer` of a full layer."""

    def __init__(self, prefix: str, layer: int, dims: IndexerDimensions, weights: Weights, kernels: Provider) -> None:
        self.layer = layer
        self.dims = dims
        self.wq_b = weights.linear(f"{prefix}.wq_b")
        self.wk = weights.linear(f"{prefix}.wk")
        self.k_norm = LayerNorm(f"{prefix}.k_norm", dims.norm_eps, weights, kernels)
        self.weights_proj = weights.linear(f"{prefix}.weights_proj")
        self.gate = weights.tensor(f"{prefix}.index_kpool_compress_gate") if dims.pooled else None
        self.table = weights.tensor(f"{prefix}.index_kpool_compress_ape") if dims.pooled else None
        self.rope = Rope(dims.rope_theta, dims.rope_interleave, kernels)
        self._pool_keys = kernels.function("indexer", "pool_keys")
        self._select = kernels.function("indexer", "select")
        self._expand_pools = kernels.function("indexer", "expand_pools")

    def __call__(
        self, x: torch.Tensor, low_rank: torch.Tensor, batch: ForwardBatch, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """x [tokens, hidden], low_rank [tokens, q_rank] (the normed query latent)
        -> int64 [tokens, width]: positions, ascending, -1 beyond."""
        d, positions = self.dims, metadata.positions
        query = self.wq_b(low_rank).reshape(-1, d.heads, d.head_dim)
        query = self.rope.first(query, d.rope, positions)
        keys = self.rope.first(self.k_norm(self.wk(x), torch.float32), d.rope, positions)
        # Widened first: head weights are float32 whatever the activations are.
        head_weights = self.weights_proj(x.float())
        self._write(keys, x, batch, metadata)
        selections = []
        for i, (first, end) in enumerate(batch.ranges):
            visible = (positions[first:end] + 1) // d.pool
            context = self._context(batch, metadata, i)
            pools = self._select(query[first:end], head_weights[first:end], context, visible, d.topk // d.pool)
            selections.append(self._expand_pools(pools, d.pool, positions[first:end], d.always_select_tail))
        width = max(selection.shape[1] for selection in selections)
        return torch.cat([F.pad(selection, (0, width - selection.shape[1]), value=-1) for selection in selections])

    def _context(self, batch: ForwardBatch, metadata: AttentionMetadata, request: int) -> torch.Tensor:
        """The stored keys of a request, read back after rounding: [pools, head_dim]."""
        count = metadata.sequence_lens[request] // self.dims.pool
        rows_per_page = metadata.page_size // self.dims.pool
        table = metadata.block_tables[request, : -(-count // rows_per_page)]
        pages = batch.pages.index_keys[self.layer]
        assert pages is not None
        return pages[table].flatten(0, 1)[:count]

    def _write(self, keys: torch.Tensor, x: torch.Tensor, batch: ForwardBatch, metadata: AttentionMetadata) -> None:
        if self.gate is None:
            written = batch.pages.write_index_keys(self.layer, metadata.slots, keys)
            assert written == batch.tokens
            return
        gates = x.float() @ self.gate.float().T
        for i, (first, end) in enumerate(batch.ranges):
            self._write_pools(keys[first:end], gates[first:end], metadata.slots[first:end], batch, i)

    def _write_pools(
        self, keys: torch.Tensor, gates: torch.Tensor, slots: torch.Tensor, batch: ForwardBatch, request: int
    ) -> None:
        """Close the pools that the request's new tokens fill; keep the rest for later."""
        pool, context = self.dims.pool, batch.context_lens[request]
        waiting = context % pool
        tails = batch.states.tails[self.layer]
        both = torch.stack([keys, gates])
        if tails is not None:
            both = torch.cat([tails[batch.state_slots[request], :, :waiting], both], dim=1)
        closed = both.shape[1] // pool
        if closed:
            pooled = self._pool_keys(*both[:, : closed * pool].reshape(2, closed, pool, -1), self.table)
            last = slots[torch.arange(1, closed + 1, device=slots.device) * pool - 1 - waiting]
            written = batch.pages.write_index_keys(self.layer, last // pool, pooled)
            assert written == batch.sequence_lens[request] // pool - context // pool
        if tails is not None:
            rest = both[:, closed * pool :]
            tails[batch.state_slots[request], :, : rest.shape[1]] = rest
