"""GLM-5, 5.1, 5.2, 5.3: the text tower. Pre-norm blocks of sparse MLA and a dense or expert MLP.

A `shared` layer attends over the selection of the last `full` one. The residual stream is float32.
Attribute names are those of the checkpoint. Source: transformers 5.23 `glm_moe_dsa`.
"""

from __future__ import annotations

import torch

from hadron.attention.backend import AttentionMetadata
from hadron.batch import ForwardBatch
from hadron.layers.mla import Mla
from hadron.layers.mlp import Mlp
from hadron.layers.moe import Moe
from hadron.layers.norm import RmsNorm
from hadron.layers.weights import Weights
from hadron.models.glm_moe_dsa.config import GlmMoeDsaConfig
from hadron.models.language_model import Carry, LanguageModel, ModelSettings


class DecoderLayer:
    """One block: attention, then MLP, each added to the residual stream."""

    def __init__(self, config: GlmMoeDsaConfig, index: int, weights: Weights, settings: ModelSettings) -> None:
        prefix, schedule, kernels = f"layers.{index}.", config.layers[index], settings.kernels
        self.input_layernorm = RmsNorm(prefix + "input_layernorm", config.norm_eps, weights, kernels)
        own = config.indexer if schedule.indexer == "full" else None
        self.self_attn = Mla(prefix + "self_attn", index, config.mla, own, weights, settings.attention, kernels)
        self.post_attention_layernorm = RmsNorm(prefix + "post_attention_layernorm", config.norm_eps, weights, kernels)
        self.mlp: Mlp | Moe
        if schedule.mlp == "sparse":
            self.mlp = Moe(prefix + "mlp", config.moe, weights, kernels)
        else:
            self.mlp = Mlp(prefix + "mlp", config.mlp, weights, kernels)
        self.dtype = settings.dtype

    def __call__(self, batch: ForwardBatch, metadata: AttentionMetadata, carry: Carry) -> Carry:
        """The carry after this layer."""
        x = carry.residual
        attended, selection = self.self_attn(self.input_layernorm(x, self.dtype), batch, metadata, carry.selection)
        x = x + attended.float()
        inner = self.post_attention_layernorm(x, self.dtype)
        inner = self.mlp(inner, batch.selections) if isinstance(self.mlp, Moe) else self.mlp(inner)
        x = x + inner.float()
        return Carry(x, selection)


class GlmMoeDsaModel(LanguageModel):
    """See `LanguageModel`."""

    def __init__(self, config: GlmMoeDsaConfig, weights: Weights, settings: ModelSettings) -> None:
        super().__init__(config, weights, settings)
        self.layers = [DecoderLayer(config, i, weights, settings) for i in range(self.layer_count)]
        self.norm = RmsNorm("norm", config.norm_eps, weights, settings.kernels)

    def embed(self, batch: ForwardBatch) -> Carry:
        """Rows of the embedding table."""
        return Carry(self.embed_tokens(batch.token_ids), None)

    def run_layers(self, batch: ForwardBatch, metadata: AttentionMetadata, carry: Carry, first: int, end: int) -> Carry:
        """Layers first .. end-1."""
        for layer in self.layers[first:end]:
            carry = layer(batch, metadata, carry)
        return carry

    def finish(self, carry: Carry) -> torch.Tensor:
        """The final norm."""
        return self.norm(carry.residual, self.settings.dtype)


def build(config: GlmMoeDsaConfig, weights: Weights, settings: ModelSettings) -> LanguageModel:
    """The model of this family."""
    return GlmMoeDsaModel(config, weights, settings)
