"""GLM-5.3-Flash: the text tower. KDA or rope-free sparse MLA, MLP or experts, in hyper-connections.

Four residual streams, float32; every block reads a weighted sum of them and its output is spread over
all of them. The mean of the streams goes into the final norm. Attribute names are those of the
checkpoint. Source: transformers 5.23 `glm5_next`.
"""

from __future__ import annotations

import torch

from hadron.attention.backend import AttentionMetadata
from hadron.batch import ForwardBatch
from hadron.layers.hyper_connection import HyperConnection
from hadron.layers.kda import Kda
from hadron.layers.mla import Mla
from hadron.layers.mlp import Mlp
from hadron.layers.moe import Moe
from hadron.layers.norm import RmsNorm
from hadron.layers.weights import Weights
from hadron.models.glm5_next.config import Glm5NextConfig
from hadron.models.language_model import Carry, LanguageModel, ModelSettings


class DecoderLayer:
    """One block: attention, then MLP, each between a collapse and a spread of the streams."""

    def __init__(self, config: Glm5NextConfig, index: int, weights: Weights, settings: ModelSettings) -> None:
        prefix, schedule, kernels = f"layers.{index}.", config.layers[index], settings.kernels
        self.hc_attn = HyperConnection(prefix + "hc_attn", config.hyper_connection, weights, kernels)
        self.hc_ffn = HyperConnection(prefix + "hc_ffn", config.hyper_connection, weights, kernels)
        self.input_layernorm = RmsNorm(prefix + "input_layernorm", config.norm_eps, weights, kernels)
        self.post_attention_layernorm = RmsNorm(prefix + "post_attention_layernorm", config.norm_eps, weights, kernels)
        self.self_attn: Kda | Mla
        if schedule.attention == "kda":
            self.self_attn = Kda(prefix + "self_attn", index, config.kda, weights, kernels)
        else:
            own = config.indexer if schedule.indexer == "full" else None
            self.self_attn = Mla(prefix + "self_attn", index, config.mla, own, weights, settings.attention, kernels)
        self.mlp: Mlp | Moe
        if schedule.mlp == "sparse":
            self.mlp = Moe(prefix + "mlp", config.moe, weights, kernels)
        else:
            self.mlp = Mlp(prefix + "mlp", config.mlp, weights, kernels)
        self.dtype = settings.dtype

    def __call__(self, batch: ForwardBatch, metadata: AttentionMetadata, carry: Carry) -> Carry:
        """The carry after this layer."""
        streams, selection = carry.residual, carry.selection
        site = self.hc_attn(streams, self.input_layernorm, self.dtype)
        if isinstance(self.self_attn, Kda):
            x = self.self_attn(site.inner, batch)
        else:
            x, selection = self.self_attn(site.inner, batch, metadata, selection)
        streams = self.hc_attn.spread(x, site, streams)
        site = self.hc_ffn(streams, self.post_attention_layernorm, self.dtype)
        x = self.mlp(site.inner, batch.selections) if isinstance(self.mlp, Moe) else self.mlp(site.inner)
        return Carry(self.hc_ffn.spread(x, site, streams), selection)


class Glm5NextModel(LanguageModel):
    """See `LanguageModel`."""

    def __init__(self, config: Glm5NextConfig, weights: Weights, settings: ModelSettings) -> None:
        super().__init__(config, weights, settings)
        self.streams = config.hyper_connection.streams
        self.layers = [DecoderLayer(config, i, weights, settings) for i in range(self.layer_count)]
        self._mean = settings.kernels.function("hyper_connection", "mean")
        self.norm = RmsNorm("norm", config.norm_eps, weights, settings.kernels)

    def embed(self, batch: ForwardBatch) -> Carry:
        """Rows of the embedding table, once for each stream."""
        return Carry(self.embed_tokens(batch.token_ids).unsqueeze(1).repeat(1, self.streams, 1), None)

    def run_layers(self, batch: ForwardBatch, metadata: AttentionMetadata, carry: Carry, first: int, end: int) -> Carry:
        """Layers first .. end-1."""
        for layer in self.layers[first:end]:
            carry = layer(batch, metadata, carry)
        return carry

    def finish(self, carry: Carry) -> torch.Tensor:
        """The mean of the streams, then the final norm."""
        return self.norm(self._mean(carry.residual), self.settings.dtype)


def build(config: Glm5NextConfig, weights: Weights, settings: ModelSettings) -> LanguageModel:
    """The model of this family."""
    return Glm5NextModel(config, weights, settings)
