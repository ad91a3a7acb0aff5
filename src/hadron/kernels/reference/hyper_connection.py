"""Definition of `hyper_connection`: manifold-constrained hyper-connections (mHC), all in float32.

From m streams a site computes `pre` (how much of each the block reads), `post` (how much of the block's
output each receives) and `comb` (how streams mix), which alternating column and row normalisation makes
nearly doubly stochastic. bfloat16 is too coarse for that: its spacing near 1 is thousands of eps.
Source: transformers 5.23 `glm5_next`; Xie et al. 2026.
"""

from __future__ import annotations

import torch

from hadron.kernels.reference.norm import rms_norm
from hadron.kernels.sizes import HyperConnectionSizes


def mixes(
    streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, dims: HyperConnectionSizes
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """streams float32 [tokens, m, hidden], fn [(2+m)m, m*hidden], base [(2+m)m], scale [3] (pre, post, comb)
    -> pre [tokens, m], post [tokens, m], comb [tokens, m, m]."""
    m, eps = dims.streams, dims.eps
    flat = streams.flatten(1).float()
    flat = flat * torch.rsqrt(flat.square().mean(dim=-1, keepdim=True) + dims.norm_eps)
    mix = flat @ fn.float().T
    scale, base = scale.float(), base.float()
    pre = torch.sigmoid(mix[:, :m] * scale[0] + base[:m]) + eps
    post = 2 * torch.sigmoid(mix[:, m : 2 * m] * scale[1] + base[m : 2 * m])
    comb = (mix[:, 2 * m :] * scale[2] + base[2 * m :]).view(-1, m, m).softmax(dim=-1) + eps
    for i in range(2 * dims.sinkhorn_iterations - 1):
        # Columns (sums over rows) first and last: the rows come out exact to eps only in the limit.
        comb = comb / (comb.sum(dim=-1 if i % 2 else -2, keepdim=True) + eps)
    return pre, post, comb


def enter(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    dims: HyperConnectionSizes,
    norm: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`mixes`, with `pre` used up: -> the block's input [tokens, hidden] in `dtype`, which is the RMS norm by
    norm [hidden] and eps of the collapsed streams, post [tokens, m], comb [tokens, m, m]."""
    pre, post, comb = mixes(streams, fn, base, scale, dims)
    return rms_norm(collapse(streams, pre), norm, eps, dtype), post, comb


def collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """streams [tokens, m, hidden], pre [tokens, m] -> [tokens, hidden]."""
    return (pre.unsqueeze(-1) * streams).sum(dim=1)


def mean(streams: torch.Tensor) -> torch.Tensor:
    """streams [tokens, m, hidden] -> their mean [tokens, hidden], what the final norm reads."""
    return streams.mean(dim=1)


def spread(output: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    """output [tokens, hidden] of a block -> the next streams, float32 [tokens, m, hidden]: stream j is
    post[j] * output + the sum over i of comb[i, j] * stream i."""
    return post.unsqueeze(-1) * output.float().unsqueeze(1) + comb.transpose(-1, -2) @ streams
