"""The tiny models: trunk of either family and its MTP layer, for training and for batched evaluation.

Parameters have the names of transformers' modules (below `model.` there), so that a state loads into the stock classes;
`export` gives them the names of published files.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import MLA, Selection
from .config import TinyConfig
from .hyper import HyperConnection
from .kda import KDA
from .layers import MLP, Linear, RMSNorm
from .moe import MoE

#: Layers before have not yet gathered what a place can be recognized by.
GUIDED_FROM = 2


class Block(nn.Module):
    """A decoder layer; `streams` says whether hyper-connections or a plain residual join its halves."""

    def __init__(self, config: TinyConfig, mixer: str, mlp: str, indexer_type: str, site: int | None):
        super().__init__()
        self.self_attn = KDA(config) if mixer == "kda" else MLA(config, indexer_type)
        self.mlp = (
            MoE(config) if mlp == "sparse" else MLP(config.hidden_size, config.intermediate_size, config.swiglu_limit)
        )
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.streams = site is not None
        if site is not None:
            self.attn_hc = HyperConnection(config, 2 * site)
            self.ffn_hc = HyperConnection(config, 2 * site + 1)

    def _mix(self, x: Tensor, batch: int, selection: Selection) -> Tensor:
        if isinstance(self.self_attn, KDA):
            return self.self_attn(x, batch)
        return self.self_attn(x, batch, selection)

    def _feed(self, x: Tensor, padding: Tensor | None) -> Tensor:
        return self.mlp(x, padding) if isinstance(self.mlp, MoE) else self.mlp(x)

    def forward(self, x: Tensor, batch: int, selection: Selection, padding: Tensor | None) -> Tensor:
        """`x` is [T, m, H] with hyper-connections, [T, H] without."""
        if not self.streams:
            x = x + self._mix(self.input_layernorm(x), batch, selection)
            return x + self._feed(self.post_attention_layernorm(x), padding)
        y, post, comb = self.attn_hc.collapse(x, self.input_layernorm.weight)
        x = self.attn_hc.expand(x, self._mix(y, batch, selection), post, comb)
        y, post, comb = self.ffn_hc.collapse(x, self.post_attention_layernorm.weight)
        return self.ffn_hc.expand(x, self._feed(y, padding), post, comb)


class MTP(nn.Module):
    """The draft layer: predicts the token after next from a position's hidden state and the next token."""

    def __init__(self, config: TinyConfig):
        super().__init__()
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = Linear(2 * config.hidden_size, config.hidden_size)
        self.block = Block(config, "mla", "sparse", "full", None)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, embedded: Tensor, hidden: Tensor, batch: int, selection: Selection, padding: Tensor | None
    ) -> Tensor:
        """Normed states [T, H] of embeddings of the next tokens and normed hidden states of the target, [T, H] both."""
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        return self.norm(self.block(x, batch, selection, padding))


class TinyModel(nn.Module):
    """Trunk, output head and MTP layer of `config`."""

    def __init__(self, config: TinyConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        kinds = zip(config.layer_types, config.mlp_types, config.indexer_types, strict=True)
        self.layers = nn.ModuleList(
            Block(config, mixer, mlp, indexer, i if config.hc_mult else None)
            for i, (mixer, mlp, indexer) in enumerate(kinds)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, gain=0.5)
        self.mtp = MTP(config)

    def trunk(
        self, ids: Tensor, dtype: torch.dtype, selection: Selection | None = None, padding: Tensor | None = None
    ) -> Tensor:
        """Hidden states [B * S, H] after the final norm, of ids [B, S]; `padding` [B, S]."""
        selection = selection or Selection()
        flat = None if padding is None else padding.flatten()
        x = F.embedding(ids.flatten(), self.embed_tokens.weight).to(dtype)
        if self.config.hc_mult:
            x = x.unsqueeze(1).expand(-1, self.config.hc_mult, -1).contiguous()
        for i, layer in enumerate(self.layers):
            selection.guided = i >= GUIDED_FROM
            x = layer(x, ids.shape[0], selection, flat)
        selection.guided = False  # the MTP layer predicts another token
        if self.config.hc_mult:
            x = x.mean(1)
        return self.norm(x)

    def draft(
        self, ids: Tensor, hidden: Tensor, selection: Selection | None = None, padding: Tensor | None = None
    ) -> Tensor:
        """MTP states [B * S, H]: row p reads the token at p + 1 and predicts the one at p + 2."""
        following = torch.roll(ids, -1, dims=1)
        embedded = F.embedding(following.flatten(), self.embed_tokens.weight).to(hidden.dtype)
        flat = None if padding is None else padding.flatten()
        return self.mtp(embedded, hidden, ids.shape[0], selection or Selection(), flat)

    def moe_layers(self) -> list[MoE]:
        """Every sparse MLP, the MTP layer's last."""
        return [module for module in self.modules() if isinstance(module, MoE)]

    def indexer_parameters(self) -> list[nn.Parameter]:
        """Parameters only the indexers' loss reaches."""
        return [p for name, p in self.named_parameters() if ".indexer." in name]

    def trunk_parameters(self) -> list[nn.Parameter]:
        """Every other parameter."""
        return [p for name, p in self.named_parameters() if ".indexer." not in name]
