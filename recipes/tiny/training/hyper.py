"""Manifold-constrained hyper-connections on [T, m, H] streams.

The weights of a site are kept as [values, T], so that what runs over them has the tokens as its inner axis.
"""

import torch
from torch import Tensor, nn

from .config import TinyConfig
from .layers import rms_norm
from .native import native


def sinkhorn_plain(logits: Tensor, streams: int, rounds: int, eps: float) -> Tensor:
    """Doubly stochastic matrices of [m * m, T] logits, softmax over the last index, then `rounds` of both norms."""
    comb = logits.view(streams, streams, -1).softmax(1) + eps
    comb = comb / (comb.sum(0, keepdim=True) + eps)
    for _ in range(rounds - 1):
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        comb = comb / (comb.sum(0, keepdim=True) + eps)
    return comb.view_as(logits)


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, rounds, eps):
        ctx.save_for_backward(logits)
        ctx.rounds, ctx.eps = rounds, eps
        return native().sinkhorn(logits, rounds, eps)

    @staticmethod
    def backward(ctx, grad):
        (logits,) = ctx.saved_tensors
        return native().sinkhorn_back(logits, grad.contiguous(), ctx.rounds, ctx.eps), None, None


def sinkhorn(logits: Tensor, streams: int, rounds: int, eps: float) -> Tensor:
    """`sinkhorn_plain`, by the compiled rounds where there are 4 streams and a compiler."""
    if streams == 4 and native() is not None:
        return _Sinkhorn.apply(logits.contiguous(), rounds, eps)
    return sinkhorn_plain(logits, streams, rounds, eps)


def collapse_plain(
    streams: Tensor, mix: Tensor, base: Tensor, scale: Tensor, norm: Tensor, norm_eps: float, hc_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised block input [T, H], post [m, T] and comb logits [m * m, T] of raw `mix` [(2 + m) m, T]."""
    m = streams.shape[1]
    wide = streams.float()
    mix = mix * torch.rsqrt(wide.square().mean((1, 2)) + norm_eps)
    pre = torch.sigmoid(mix[:m] * scale[0] + base[:m, None]) + hc_eps
    post = 2 * torch.sigmoid(mix[m : 2 * m] * scale[1] + base[m : 2 * m, None])
    comb = mix[2 * m :] * scale[2] + base[2 * m :, None]
    joined = sum(pre[i].unsqueeze(1) * wide[:, i] for i in range(m)).to(streams.dtype)
    return rms_norm(joined, norm, norm_eps), post, comb


def expand_plain(streams: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """New streams [T, m, H]: post times `out` [T, H] plus comb-transposed times the old ones."""
    m = streams.shape[1]
    wide, y = streams.float(), out.float()
    rows = [
        post[j].unsqueeze(1) * y + sum(comb[i * m + j].unsqueeze(1) * wide[:, i] for i in range(m)) for j in range(m)
    ]
    return torch.stack(rows, dim=1).to(streams.dtype)


def _fast(streams: Tensor) -> bool:
    return streams.dtype in (torch.bfloat16, torch.float32) and streams.shape[1] == 4 and native() is not None


class _Collapse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, streams, fn, base, scale, norm, norm_eps, hc_eps):
        fn = fn.to(streams.dtype)
        mix = (fn @ streams.flatten(1).t()).float()
        y, post, comb, pre, roots = native().hc_collapse(streams, mix, base, scale, norm, norm_eps, hc_eps)
        ctx.save_for_backward(streams, fn, mix, base, scale, norm, pre, post, roots)
        ctx.hc_eps = hc_eps
        return y, post, comb

    @staticmethod
    def backward(ctx, grad_y, grad_post, grad_comb):
        streams, fn, mix, base, scale, norm, pre, post, roots = ctx.saved_tensors
        grads = [grad.contiguous() for grad in (grad_y, grad_post, grad_comb)]
        grad_streams, grad_mix, *rest = native().hc_collapse_back(
            streams, mix, base, scale, norm, pre, post, roots, *grads, ctx.hc_eps
        )
        grad_mix = grad_mix.to(fn.dtype)
        grad_streams.flatten(1).addmm_(grad_mix.t(), fn)
        return grad_streams, (grad_mix @ streams.flatten(1)).float(), *rest, None, None


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, streams, out, post, comb):
        ctx.save_for_backward(streams, out, post, comb)
        return native().hc_expand(streams, out, post, comb)

    @staticmethod
    def backward(ctx, grad):
        return tuple(native().hc_expand_back(*ctx.saved_tensors, grad.contiguous()))


class HyperConnection(nn.Module):
    """One mHC site: what a block reads from the streams and how its output returns."""

    def __init__(self, config: TinyConfig, site: int):
        super().__init__()
        m = config.hc_mult
        self.fn = nn.Parameter(torch.randn((2 + m) * m, m * config.hidden_size) * 0.02)
        # Streams would stay equal for ever under uniform mixing: start near the identity, each site with a
        # preference for one stream.
        base = torch.zeros((2 + m) * m)
        base[:m] = -1.5
        base[site % m] = 1.5
        base[m : 2 * m] = -1.0
        base[m + site % m] = 1.0
        base[2 * m :] = 3.0 * torch.eye(m).flatten()
        self.base = nn.Parameter(base)
        self.scale = nn.Parameter(torch.ones(3))
        self.config = config

    def collapse(self, streams: Tensor, norm: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Block input [T, H] after RMSNorm by `norm`, post [m, T], comb [m * m, T] of streams [T, m, H]."""
        config = self.config
        if _fast(streams):
            x, post, comb = _Collapse.apply(
                streams, self.fn, self.base, self.scale, norm, config.rms_norm_eps, config.hc_eps
            )
        else:
            mix = self.fn.to(streams.dtype) @ streams.flatten(1).t()
            x, post, comb = collapse_plain(
                streams, mix.float(), self.base, self.scale, norm, config.rms_norm_eps, config.hc_eps
            )
        return x, post, sinkhorn(comb, config.hc_mult, config.hc_sinkhorn_iters, config.hc_eps)

    @staticmethod
    def expand(streams: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """Streams after the block gave `out`."""
        if _fast(streams):
            return _Expand.apply(streams, out.contiguous(), post, comb)
        return expand_plain(streams, out, post, comb)
