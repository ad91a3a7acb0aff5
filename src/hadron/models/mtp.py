"""The multi-token-prediction layer: guesses the token after next from a hidden state and the next token.

One decoder block of either family: MLA with an indexer of its own and experts, a plain residual (GLM-5.3-Flash has no
streams here). It lies behind the decoder layers, keeps latents and keys of its own under their number, and shares
embedding and head with the target unless it stores them.

    row (token u at p+1, hidden g of p, position p): y = block(eh_proj(cat(enorm(embed(u)), hnorm(g))))
    m = shared_head.norm(y), the hidden of the next guess; head(m) guesses the token at p+2
"""

from __future__ import annotations

import torch

from hadron.attention.backend import AttentionMetadata
from hadron.batch import ForwardBatch
from hadron.layers.embedding import Embedding, LmHead
from hadron.layers.logits import Logits
from hadron.layers.mla import Mla
from hadron.layers.moe import Moe
from hadron.layers.norm import RmsNorm
from hadron.layers.weights import Weights
from hadron.models.language_model import LanguageModel, ModelSettings
from hadron.models.registry import FamilyConfig


class Mtp:
    """Layer `layers.<number of decoder layers>`. target: whose embedding and head it uses where it has none.

    shares_selection: later guesses attend to what the last row of the first attended to, and write no keys.
    """

    def __init__(self, config: FamilyConfig, weights: Weights, settings: ModelSettings, target: LanguageModel) -> None:
        self.layer = len(config.layers)
        self.settings = settings
        self.shares_selection = config.mtp_shares_selection
        prefix, eps, kernels = f"layers.{self.layer}.", config.norm_eps, settings.kernels
        own = prefix + "embed_tokens"
        self.embed_tokens = target.embed_tokens
        if own in weights:
            self.embed_tokens = Embedding(own, config.vocabulary, weights, kernels)
        self.enorm = RmsNorm(prefix + "enorm", eps, weights, kernels)
        self.hnorm = RmsNorm(prefix + "hnorm", eps, weights, kernels)
        self.eh_proj = weights.linear(prefix + "eh_proj")
        self.input_layernorm = RmsNorm(prefix + "input_layernorm", eps, weights, kernels)
        self.self_attn = Mla(
            prefix + "self_attn", self.layer, config.mla, config.indexer, weights, settings.attention, kernels
        )
        self.post_attention_layernorm = RmsNorm(prefix + "post_attention_layernorm", eps, weights, kernels)
        self.mlp = Moe(prefix + "mlp", config.moe, weights, kernels)
        self.norm = RmsNorm(prefix + "shared_head.norm", eps, weights, kernels)
        self.lm_head = target.lm_head
        if prefix + "shared_head.head" in weights:
            self.lm_head = LmHead(prefix + "shared_head.head", own, weights, kernels)

    def forward(
        self, batch: ForwardBatch, hidden: torch.Tensor, selection: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of a step: batch.token_ids are those at the position after each row's.

        hidden [tokens, hidden]: the target's after its final norm, or what this gave for the row before.
        selection: int64 [tokens, width], to attend to instead of the layer's own choice
        -> (m [tokens, hidden] in the model's dtype, the selection). Writes the layer's cache and moves no stamp.
        """
        metadata: AttentionMetadata = self.settings.attention.build_metadata(batch)
        dtype = self.settings.dtype
        embedded = self.enorm(self.embed_tokens(batch.token_ids), dtype)
        # Widened: a product returns its input's dtype, and the residual is not rounded.
        x = self.eh_proj(torch.cat([embedded, self.hnorm(hidden, dtype)], dim=-1).float())
        inner = self.input_layernorm(x, dtype)
        attended, used = self.self_attn(inner, batch, metadata, selection, fixed=selection is not None)
        x = x + attended.float()
        x = x + self.mlp(self.post_attention_layernorm(x, dtype)).float()
        return self.norm(x, dtype), used

    def head(self, hidden: torch.Tensor) -> Logits:
        """The logits of rows of `forward`, not handed out and not checked."""
        return self.lm_head(hidden)
