"""Sparse-attention indexer: writes its keys (each token's, or one for every pool of tokens) and selects
the positions each query attends to.

A pool is visible to a query when its last token is. Keys and gates of the pool that is still open wait
in the request's state slot, in float32, so that it makes no difference which step closes a pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from hadron.attention.backend import AttentionMetadata
from hadron.batch import ForwardBatch
from hadron.kernels.provider import Provider
from hadron.layers.dimensions import IndexerDimensions
from hadron.layers.linear import exact
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
        self.of_input = [self.wk, exact(self.weights_proj)]
        self.table = None
        if dims.pooled:
            self.of_input.append(weights.linear(f"{prefix}.index_kpool_compress_gate"))
            self.table = weights.tensor(f"{prefix}.index_kpool_compress_ape")
        self.rope = Rope(dims.rope, dims.rope_theta, dims.rope_interleave, kernels)
        self._store = kernels.function("indexer", "store")
        self._choose = kernels.function("indexer", "choose")

    def parts(self, query: torch.Tensor, keys: torch.Tensor) -> list[tuple[Rope, torch.Tensor, int]]:
        """What `turned` shall turn. query: what `wq_b` makes of the normed query latent; keys: what `wk` makes of the
        layer's input, normed by `k_norm`."""
        return [(self.rope, query.reshape(-1, self.dims.heads, self.dims.head_dim), 0), (self.rope, keys, 0)]

    def __call__(
        self,
        parts: Sequence[torch.Tensor],
        projected: Sequence[torch.Tensor],
        batch: ForwardBatch,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """parts: those of `parts`, turned; projected: what `of_input` but `wk` makes of the layer's input; float32
        [tokens, ...] each -> int64 [tokens, width]: positions, ascending, -1 beyond."""
        d, positions = self.dims, metadata.positions
        (query, keys), (head_weights, *pooling) = parts, projected
        gates = pooling[0] if pooling else None
        pages = batch.pages.index_keys[self.layer]
        assert pages is not None, f"layer {self.layer} keeps no indexer keys"
        lengths, tails = metadata.sequence_lens, batch.states.tails[self.layer]
        if gates is None or tails is None:
            self._store(
                keys, gates, self.table, metadata.slots, batch.query_lens, lengths, pages, tails, batch.state_slots,
                d.pool,
            )  # fmt: skip
        else:
            batch.move_states(partial(self._pool, pages), (keys, gates, metadata.slots), (tails,))
        selection: torch.Tensor = self._choose(
            query, head_weights, pages, metadata.block_tables, positions, batch.query_lens, lengths, d.topk, d.pool,
            d.always_select_tail,
        )  # fmt: skip
        return selection

    def _pool(
        self,
        pages: torch.Tensor,
        rows: Sequence[torch.Tensor],
        states: Sequence[torch.Tensor],
        state_slots: Sequence[int],
        lens: Sequence[int],
        ends: Sequence[int],
    ) -> None:
        """Keep keys and gates of the open pool, and write the key of every pool that closes."""
        (keys, gates, slots), (tails,) = rows, states
        self._store(keys, gates, self.table, slots, lens, ends, pages, tails, state_slots, self.dims.pool)
