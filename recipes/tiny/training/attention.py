"""MLA with the indexer's selection as a mask, dense otherwise: sequences are short."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import TinyConfig
from .guide import guide_loss
from .indexer import Indexer, rotary_table, rotate
from .layers import Linear, RMSNorm


@dataclass
class Selection:
    """What the indexers do in one forward pass, and what came of it.

    `select`: attention sees only the selected tokens. `observe`: scores and attention probabilities are kept for the
    indexers' loss, one group for each full indexer. `source` [B, S]: where the first head should look (`guide`), in
    layers where `guided` is set; `guides`: the losses of that.
    """

    select: bool = False
    observe: bool = False
    source: Tensor | None = None
    guided: bool = False
    mask: Tensor | None = None
    groups: list["Group"] = field(default_factory=list)
    guides: list[Tensor] = field(default_factory=list)


@dataclass
class Group:
    """A full indexer and the layers that share its selection."""

    scores: Tensor  # [B, S, P]
    chosen: Tensor | None  # [B, S, P]
    pool: int
    probabilities: list[Tensor] = field(default_factory=list)  # head means [B, S, S], one a layer


class MLA(nn.Module):
    """Multi-head latent attention under the parameter names of transformers."""

    def __init__(self, config: TinyConfig, indexer_type: str):
        super().__init__()
        heads, nope, rope = config.num_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
        self.q_a_proj = Linear(config.hidden_size, config.q_lora_rank)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.latent_norm_eps)
        self.q_b_proj = Linear(config.q_lora_rank, heads * (nope + rope), gain=1.5)
        self.kv_a_proj_with_mqa = Linear(config.hidden_size, config.kv_lora_rank + rope)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, config.latent_norm_eps)
        self.kv_b_proj = Linear(config.kv_lora_rank, heads * (nope + config.v_head_dim))
        self.o_proj = Linear(heads * config.v_head_dim, config.hidden_size)
        self.indexer = Indexer(config) if indexer_type == "full" else None
        self.config = config
        self._align()

    @torch.no_grad()
    def _align(self) -> None:
        """Starts with attention that is not flat: half the heads look for latents like the query's own.

        The first columns of the query latent are the key latent; there q and k of these heads share their projection.
        """
        config = self.config
        rank, nope = config.kv_lora_rank, config.qk_nope_head_dim
        self.q_a_proj.weight[:rank] = self.kv_a_proj_with_mqa.weight[:rank]
        q = self.q_b_proj.weight.view(config.num_heads, -1, config.q_lora_rank)
        kv = self.kv_b_proj.weight.view(config.num_heads, -1, rank)
        for head in range(config.num_heads // 2):
            q[head, :nope].zero_()
            q[head, :nope, :rank] = 1.5 * kv[head, :nope]

    def forward(self, x: Tensor, batch: int, selection: Selection) -> Tensor:
        """`x` [B * S, H] to the same shape; a full layer's selection stays in `selection` for the layers that share."""
        config, dtype = self.config, x.dtype
        heads, nope, rope, v = config.num_heads, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        q_latent = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(q_latent).view(batch, -1, heads, nope + rope).transpose(1, 2)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([config.kv_lora_rank, rope], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, -1, heads, nope + v).transpose(1, 2)
        k, values = kv.split([nope, v], dim=-1)
        if rope:
            cos, sin = (t.to(dtype) for t in rotary_table(q.shape[2], rope, config.rope_theta))
            q = torch.cat([q[..., :nope], rotate(q[..., nope:], cos, sin)], dim=-1)
            turned = rotate(k_rope.view(batch, 1, -1, rope), cos, sin)
            k = torch.cat([k, turned.expand(-1, heads, -1, -1)], dim=-1)
        if self.indexer is not None:
            selection.mask = None
            if selection.observe or selection.select:
                with torch.set_grad_enabled(selection.observe):
                    scores = self.indexer(x, q_latent, batch)
                chosen = None
                if selection.select:
                    chosen, selection.mask = self.indexer.select(scores)
                if selection.observe:
                    selection.groups.append(Group(scores, chosen, config.index_kpool))
        mask = None if selection.mask is None else selection.mask.unsqueeze(1)
        if selection.observe:
            selection.groups[-1].probabilities.append(self._probabilities(q.detach(), k.detach(), mask))
        if selection.source is not None and selection.guided:
            selection.guides.append(guide_loss(q[:, 0], k[:, 0], selection.source))
        out = F.scaled_dot_product_attention(q, k, values, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(out.transpose(1, 2).reshape(x.shape[0], heads * v))

    @staticmethod
    def _probabilities(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """Head mean of the attention probabilities, [B, S, S] in float32."""
        logits = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
        if mask is None:
            mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        return logits.masked_fill(~mask, float("-inf")).softmax(-1).mean(1)
