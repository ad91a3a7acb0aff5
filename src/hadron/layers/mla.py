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
from hadron.layers.norm import RmsNorm
from hadron.layers.rope import Rope
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
        self.rope = Rope(dims.rope_theta, dims.rope_interleave, kernels)
        self.attention = attention
        self._expansion = attention.bind_expansion(self.kv_b_proj, dims)

    def __call__(
        self, x: torch.Tensor, batch: ForwardBatch, metadata: AttentionMetadata, selection: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [tokens, hidden], selection of the last full indexer -> ([tokens, hidden], the selection used)."""
        d = self.dims
        low_rank = self.q_a_layernorm(self.q_a_proj(x), x.dtype)
        query = self.q_b_proj(low_rank).reshape(-1, d.heads, d.nope + d.rope)
        query = self.rope.last(query, d.rope, metadata.positions)
        joint = self.kv_a_proj_with_mqa(x)
        # Rounded once, to what the cache keeps: bfloat16 on the way to FP8 or float32 would lose for nothing.
        rows = torch.bfloat16 if batch.pages.spec.latents == "bfloat16" else torch.float32
        latent = self.kv_a_layernorm(joint[:, : d.kv_rank], rows)
        key = joint[:, d.kv_rank :].to(torch.promote_types(x.dtype, rows))
        key = self.rope.last(key, d.rope, metadata.positions)
        written = self.attention.write(self.layer, latent, key, metadata, batch.pages)
        assert written == batch.tokens
        if self.indexer is not None:
            selection = self.indexer(x, low_rank, batch, metadata)
            if (kept := batch.selections) is not None:
                selection = kept.take(kept.positions, f"layers.{self.layer}", selection)
        assert selection is not None, "a shared layer before the first full indexer"
        step = AttentionInput(self.layer, query, selection, self._expansion())
        return self.o_proj(self.attention.attend(step, metadata, batch.pages).flatten(1)), selection
