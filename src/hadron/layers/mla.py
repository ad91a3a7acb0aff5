"""Multi-head latent attention: low-rank query, one cached latent row a token, an optional rotary part.

Writes the step's latent rows to the pages, gets a selection (its own indexer's, or the one handed on)
and leaves the attending to the backend, which also gets `kv_b_proj`: absorbed attention uses its halves on
either side of the softmax.
"""

from __future__ import annotations

import torch

from hadron.attention.backend import AttentionBackend, AttentionInput, AttentionMetadata
from hadron.batch import ForwardBatch
from hadron.kernels.provider import Provider
from hadron.layers.dimensions import IndexerDimensions, MlaDimensions
from hadron.layers.indexer import Indexer
from hadron.layers.linear import Linears
from hadron.layers.norm import RmsNorm, norms
from hadron.layers.rope import Rope, turned
from hadron.layers.weights import Weights


class Mla:
    """`self_attn` of a layer; `indexer` gives the sizes of its own indexer, None for a shared one."""

    def __init__(
        self,
        prefix: str,
        layer: int,
        dims: MlaDimensions,
        indexer: IndexerDimensions | None,
        weights: Weights,
        attention: AttentionBackend,
        kernels: Provider,
    ) -> None:
        self.layer = layer
        self.dims = dims
        self.q_a_proj = weights.linear(f"{prefix}.q_a_proj")
        self.q_a_layernorm = RmsNorm(f"{prefix}.q_a_layernorm", dims.latent_norm_eps, weights, kernels)
        self.q_b_proj = weights.linear(f"{prefix}.q_b_proj")
        self.kv_a_proj_with_mqa = weights.linear(f"{prefix}.kv_a_proj_with_mqa")
        self.kv_a_layernorm = RmsNorm(f"{prefix}.kv_a_layernorm", dims.latent_norm_eps, weights, kernels)
        self.kv_b_proj = weights.linear(f"{prefix}.kv_b_proj")
        self.o_proj = weights.linear(f"{prefix}.o_proj")
        self.indexer = Indexer(f"{prefix}.indexer", layer, indexer, weights, kernels) if indexer else None
        own = self.indexer
        self._of_input = Linears([self.q_a_proj, self.kv_a_proj_with_mqa, *(own.of_input if own else ())])
        self._of_low_rank = Linears([self.q_b_proj, *([own.wq_b] if own else ())])
        self.rope = Rope(dims.rope, dims.rope_theta, dims.rope_interleave, kernels)
        self.attention = attention
        self._expansion = attention.bind_expansion(self.kv_b_proj, dims)

    def __call__(
        self,
        x: torch.Tensor,
        batch: ForwardBatch,
        metadata: AttentionMetadata,
        selection: torch.Tensor | None,
        *,
        fixed: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [tokens, hidden], selection of the last full indexer -> ([tokens, hidden], the selection used).

        fixed: that selection is used although this layer has an indexer, whose keys are then not written.
        """
        d = self.dims
        # Widened first: what norms, the indexer and the cache read is rounded once, by them.
        low_rank, joint, *projected = self._of_input(x.float())
        # bfloat16 on the way to an FP8 or float32 cache would lose for nothing.
        rows = torch.bfloat16 if batch.pages.spec.latents == "bfloat16" else torch.float32
        indexer = None if fixed else self.indexer
        normed = [(self.q_a_layernorm, low_rank, x.dtype), (self.kv_a_layernorm, joint[:, : d.kv_rank], rows)]
        if indexer is not None:
            normed.append((indexer.k_norm, projected[0], torch.float32))
        low_rank, latent, *index_keys = norms(*normed)
        query, *index_query = self._of_low_rank(low_rank)
        key = joint[:, d.kv_rank :].to(torch.promote_types(x.dtype, rows))
        query = query.reshape(-1, d.heads, d.nope + d.rope)
        parts = [(self.rope, query, d.nope), (self.rope, key, 0)]
        if indexer is not None:
            parts += indexer.parts(*index_query, *index_keys)
        query, key, *index = turned(*parts, positions=metadata.positions)
        written = self.attention.write(self.layer, latent, key, metadata, batch.pages)
        assert written == batch.tokens
        if indexer is not None:
            selection = indexer(index, projected[1:], batch, metadata)
            if (kept := batch.selections) is not None:
                selection = kept.take(kept.positions, f"layers.{self.layer}", selection)
        assert selection is not None, "a shared layer before the first full indexer"
        step = AttentionInput(self.layer, query, selection, self._expansion())
        return self.o_proj(self.attention.attend(step, metadata, batch.pages).flatten(1)), selection
