"""Kimi delta attention by matrix products over chunks of 16 tokens.

Decays are taken relative to the middle of a chunk: with the bound of -5 a token they stay within e^40 and a product of
two within e^80, which float32 holds. What a chunk does to the state is one affine map, S' = M S + N, found for all
chunks at once; only these maps run in sequence.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import TinyConfig
from .layers import Linear, compiled
from .native import native

CHUNK = 16


class _Scan(torch.autograd.Function):
    """States before each chunk, [N, C, d, d], of S' = M S + N from S = 0."""

    @staticmethod
    def forward(ctx, transition, inputs):
        states = torch.empty_like(inputs)
        states[:, 0] = 0
        for i in range(inputs.shape[1] - 1):
            states[:, i + 1] = torch.baddbmm(inputs[:, i], transition[:, i], states[:, i])
        ctx.save_for_backward(transition, states)
        return states

    @staticmethod
    def backward(ctx, grad):
        transition, states = ctx.saved_tensors
        after = torch.empty_like(grad)  # gradient of the state after each chunk
        after[:, -1] = 0
        for i in range(grad.shape[1] - 1, 0, -1):
            after[:, i - 1] = torch.baddbmm(grad[:, i], transition[:, i].transpose(1, 2), after[:, i])
        return after @ states.transpose(-1, -2), after


class _UnitLowerInverse(torch.autograd.Function):
    """(I + A)^-1 of strictly lower triangular A [..., 16, 16], by doubling."""

    @staticmethod
    def forward(ctx, a):
        eye = torch.eye(a.shape[-1], dtype=a.dtype)
        power = -a
        inverse = eye + power
        for _ in range(3):
            power = power @ power
            inverse = inverse + inverse @ power
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        turned = inverse.transpose(-1, -2)
        return -(turned @ grad @ turned)


def _decayed(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    total = g.cumsum(-2)
    middle = total[..., CHUNK // 2 - 1 : CHUNK // 2, :]
    last = total[..., -1:, :]
    up = torch.exp(total - middle)
    down = torch.exp(middle - total)
    kb = k * up * beta
    return q * up, kb, k * down, v * beta, torch.exp(middle), torch.exp(last - middle), torch.exp(last)


_decayed_c = compiled(_decayed)


def chunked_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Delta-rule attention of [N, S, d] (N sequences times heads, S a multiple of 16), float32.

    `q` is scaled and, as `k`, of unit length; `g` the log decay a channel, in [-5, 0]; `beta` [N, S, 1].
    """
    n, length, dim = q.shape
    parts = [x.view(n, length // CHUNK, CHUNK, -1) for x in (q, k, v, g, beta)]
    qd, kb, kd, vb, e_middle, e_last_middle, e_last = _decayed_c(*parts)
    kd_turned = kd.transpose(-1, -2)
    inverse = _UnitLowerInverse.apply((kb @ kd_turned).tril(-1))
    scores = (qd @ kd_turned).tril()
    u = inverse @ vb
    w = (inverse @ kb) * e_middle
    k_end = (kd * e_last_middle).transpose(-1, -2)
    transition = torch.diag_embed(e_last.squeeze(-2)) - k_end @ w
    states = _Scan.apply(transition, k_end @ u)
    out = scores @ u + (qd * e_middle - scores @ w) @ states
    return out.reshape(n, length, dim)


def conv_silu_plain(x: Tensor, taps: Tensor) -> Tensor:
    """SiLU of the causal convolution of [B, S, W] with taps [K, W], the last of them the token itself."""
    last = taps.shape[0] - 1
    padded = F.pad(x, (0, 0, last, 0))
    return F.silu(sum(padded[:, i : i + x.shape[1]] * taps[i] for i in range(last + 1)))


class _ConvSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, taps):
        ctx.save_for_backward(x, taps)
        return native().conv_silu(x, taps)

    @staticmethod
    def backward(ctx, grad):
        return tuple(native().conv_silu_back(*ctx.saved_tensors, grad.contiguous()))


def conv_silu(x: Tensor, taps: Tensor) -> Tensor:
    """`conv_silu_plain`, compiled where there is a compiler; float32."""
    if native() is None:
        return conv_silu_plain(x, taps)
    return _ConvSilu.apply(x.contiguous(), taps.contiguous())


def _unit_qk(qk: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    unit = qk / torch.sqrt((qk * qk).sum(-1, keepdim=True) + 1e-6)
    return unit[0] * scale, unit[1]


def _gates(forget: Tensor, dt_bias: Tensor, decay: Tensor, b: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """Log decays [B, S, W] of raw `forget` and the rate of each channel, and beta [B, S, heads]."""
    return bound * torch.sigmoid(decay * (forget.float() + dt_bias)), torch.sigmoid(b.float())


_unit_qk_c = compiled(_unit_qk)
_gates_c = compiled(_gates)


def _finish(out: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Gated RMSNorm of [B, heads, S, d] by [B, S, heads * d]; [B * S, heads * d]."""
    batch, heads, length, dim = out.shape
    out = out.transpose(1, 2)
    out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + eps) * weight
    out = out * torch.sigmoid(gate.float()).view(batch, length, heads, dim)
    return out.to(gate.dtype).reshape(batch * length, heads * dim)


_finish_c = compiled(_finish)


class ForgetGate(nn.Module):
    """Projections and constants of the log decay."""

    def __init__(self, config: TinyConfig):
        super().__init__()
        width = config.kda_heads * config.kda_head_dim
        self.f_a_proj = Linear(config.hidden_size, config.kda_head_dim)
        self.f_b_proj = Linear(config.kda_head_dim, width)
        # Half-lives from one token to hundreds, so that some channels shift by a token and others carry a sum.
        self.dt_bias = nn.Parameter(torch.linspace(-6.0, 1.0, config.kda_head_dim).repeat(config.kda_heads))
        self.A_log = nn.Parameter(torch.zeros(config.kda_heads))


class KDA(nn.Module):
    """A KDA layer under the parameter names of transformers."""

    def __init__(self, config: TinyConfig):
        super().__init__()
        hidden, width = config.hidden_size, config.kda_heads * config.kda_head_dim
        self.q_proj = Linear(hidden, width)
        self.k_proj = Linear(hidden, width)
        self.v_proj = Linear(hidden, width)
        self.conv1d = nn.Module()
        taps = torch.randn(3 * width, 1, config.kda_conv) * 0.3
        taps[:, 0, -1] += 0.7
        self.conv1d.weight = nn.Parameter(taps)
        self.forget_gate = ForgetGate(config)
        self.b_proj = Linear(hidden, config.kda_heads)
        self.g_a_proj = Linear(hidden, config.kda_head_dim)
        self.g_b_proj = Linear(config.kda_head_dim, width)
        self.o_norm = nn.Module()
        self.o_norm.weight = nn.Parameter(torch.ones(config.kda_head_dim))
        self.o_proj = Linear(width, hidden)
        self.config = config

    def forward(self, x: Tensor, batch: int) -> Tensor:
        """`x` [B * S, H] to the same shape."""
        config, dtype = self.config, x.dtype
        sizes = [3 * self.o_proj.in_features, config.kda_head_dim, config.kda_head_dim, config.kda_heads]
        weight = torch.cat(
            [
                self.q_proj.weight,
                self.k_proj.weight,
                self.v_proj.weight,
                self.forget_gate.f_a_proj.weight,
                self.g_a_proj.weight,
                self.b_proj.weight,
            ]
        )
        qkv, f_a, g_a, b = F.linear(x, weight.to(dtype)).view(batch, -1, sum(sizes)).split(sizes, dim=-1)
        forget, gate = self.forget_gate.f_b_proj(f_a), self.g_b_proj(g_a)
        length = qkv.shape[1]
        pad = -length % CHUNK
        if pad:
            qkv, forget, b = (F.pad(t, (0, 0, 0, pad)) for t in (qkv, forget, b))
        heads, dim, span = config.kda_heads, config.kda_head_dim, length + pad
        mixed = conv_silu(qkv.float(), self.conv1d.weight.squeeze(1).t())
        mixed = mixed.view(batch, span, 3, heads, dim).permute(2, 0, 3, 1, 4).reshape(3, batch * heads, span, dim)
        q, k = _unit_qk_c(mixed[:2], dim**-0.5)
        decay = self.forget_gate.A_log.exp().repeat_interleave(dim)
        g, beta = _gates_c(forget, self.forget_gate.dt_bias, decay, b, config.kda_lower_bound)
        g = g.view(batch, span, heads, dim).transpose(1, 2).reshape(batch * heads, span, dim)
        beta = beta.transpose(1, 2).reshape(batch * heads, span, 1)
        out = chunked_kda(q, k, mixed[2], g, beta)
        out = out.view(batch, config.kda_heads, length + pad, -1)[:, :, :length]
        return self.o_proj(_finish_c(out, gate, self.o_norm.weight, config.rms_norm_eps))
