"""The lightning indexer: scores of pools (Flash) or tokens (5.2-style), and the selection they give.

Unlike the stock modules, scores keep their gradient, since the indexer is trained here; its inputs are detached, so
that the trunk never learns from it. Among equal scores at the boundary (zeros after ReLU) the lowest index wins.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import TinyConfig
from .layers import Linear


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on interleaved pairs of the last axis; all first halves, then all second ones come out."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=-1)


def rotary_table(length: int, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [S, dim / 2] in float32."""
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angles = torch.arange(length, dtype=torch.float32).unsqueeze(1) * frequencies
    return angles.cos(), angles.sin()


def top_mask(scores: Tensor, k: int) -> Tensor:
    """The k largest of the last axis as a mask, the lowest index first among equals; -inf is never chosen."""
    valid = scores > float("-inf")
    if k >= scores.shape[-1]:
        return valid
    threshold = scores.topk(k, dim=-1).values[..., -1:]
    above = scores > threshold
    equal = scores == threshold
    room = k - above.sum(-1, keepdim=True)
    return (above | (equal & (equal.cumsum(-1) <= room))) & valid


class Indexer(nn.Module):
    """Indexer of one layer, for pools of `index_kpool` tokens or for tokens where that is 1."""

    def __init__(self, config: TinyConfig):
        super().__init__()
        dim = config.index_head_dim
        self.wq_b = Linear(config.q_lora_rank, config.index_n_heads * dim)
        self.wk = Linear(config.hidden_size, dim)
        self.k_norm = nn.LayerNorm(dim, eps=1e-6)
        self.weights_proj = Linear(config.hidden_size, config.index_n_heads)
        with torch.no_grad():
            self.weights_proj.weight.mul_(0.1)
        if config.index_kpool > 1:
            self.index_kpool_compress_ape = nn.Parameter(torch.zeros(config.index_kpool, dim))
            self.index_kpool_compress_gate = nn.Parameter(torch.zeros(dim, config.hidden_size))
        self.config = config

    def forward(self, x: Tensor, q_latent: Tensor, batch: int) -> Tensor:
        """Scores [B, S, pools or tokens], -inf where not visible; `x` [B * S, H], `q_latent` [B * S, q_lora]."""
        config = self.config
        x, q_latent = x.detach().view(batch, -1, x.shape[-1]), q_latent.detach()
        length, dim, heads = x.shape[1], config.index_head_dim, config.index_n_heads
        q = self.wq_b(q_latent).view(batch, length, heads, dim)
        k = self.wk(x)
        k = F.layer_norm(k, (dim,), self.k_norm.weight.to(k.dtype), self.k_norm.bias.to(k.dtype), 1e-6)
        if rope := config.qk_rope_head_dim:
            cos, sin = (t.to(x.dtype) for t in rotary_table(length, rope, config.rope_theta))
            q = torch.cat([rotate(q[..., :rope], cos[:, None], sin[:, None]), q[..., rope:]], dim=-1)
            k = torch.cat([rotate(k[..., :rope], cos, sin), k[..., rope:]], dim=-1)
        positions = torch.arange(length)
        if config.index_kpool > 1:
            k = self._pool(x, k)
            last = torch.arange(k.shape[1]) * config.index_kpool + config.index_kpool - 1
        else:
            last = positions
        scores = F.relu(q.float().flatten(1, 2) @ k.float().transpose(1, 2) * dim**-0.5)
        weights = self.weights_proj(x).float() * heads**-0.5
        scores = (weights.unsqueeze(-2) @ scores.view(batch, length, heads, -1)).squeeze(-2)
        return scores.masked_fill(last[None, :] > positions[:, None], float("-inf"))

    def _pool(self, x: Tensor, k: Tensor) -> Tensor:
        size = self.config.index_kpool
        pools = x.shape[1] // size
        gates = F.linear(x, self.index_kpool_compress_gate.to(x.dtype))[:, : pools * size]
        shape = (x.shape[0], pools, size, -1)
        logits = gates.float().reshape(shape) + self.index_kpool_compress_ape
        return (logits.softmax(2).to(k.dtype) * k[:, : pools * size].reshape(shape)).sum(2)

    @property
    def budget(self) -> int:
        """Pools or tokens a query selects."""
        return self.config.index_topk // self.config.index_kpool

    def select(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Chosen pools or tokens, and the mask [B, S, S] of tokens attention may see."""
        chosen = top_mask(scores.detach(), self.budget)
        size = self.config.index_kpool
        if size == 1:
            return chosen, chosen
        length = scores.shape[1]
        tokens = chosen.repeat_interleave(size, dim=-1)
        tokens = F.pad(tokens, (0, length - tokens.shape[-1]))
        position = torch.arange(length)
        # The pool a query stands in is not complete until its last token: its tokens so far are always seen.
        tail = (position[None, :] <= position[:, None]) & (
            position[None, :] >= ((position + 1) // size * size)[:, None]
        )
        return chosen, tokens | tail
