"""Definition of `kda`: short convolution, forget gate, and the gated delta rule of Kimi delta attention.

    S_t = diag(exp g_t) S_{t-1};  S_t += k_t (beta_t (v_t - S_t^T k_t))^T;  o_t = S_t^T q_t

for each head, S [key, value] in float32, q and k of unit length and q scaled by 1/sqrt(key size).
`recurrence` is the definition; `chunked` solves one triangular system a chunk and must agree.
Source: Kimi Linear (2025), section 3; transformers 5.23 `glm5_next`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hadron.kernels.reference.norm import gated_rms_norm
from hadron.kernels.sizes import KdaSizes

_L2_EPS = 1e-6  # under the root of the q and k norms, whatever the model's RMS eps


def bind(
    convolutions: Sequence[torch.Tensor],
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm: torch.Tensor,
    dims: KdaSizes,
) -> Callable[..., torch.Tensor]:
    """The block of one layer, between its projections, for all requests of a step.

    convolutions: of q, k and v, each [width, kernel], width = heads * head_dim; a_log [heads], dt_bias [width],
    norm [head_dim]. The block takes q, k, v, forget (raw), gate [tokens, width] and beta (raw) [tokens, heads],
    in the order q, k, v, forget, beta, gate; then matrices float32 [slots, heads, key, value] and windows
    [slots, 3 * width, kernel - 1], which it moves in place; then the slot and the number of tokens of each
    request. -> [tokens, width] in q's dtype.
    """
    width, heads = dims.heads * dims.head_dim, (-1, dims.heads, dims.head_dim)

    def block(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        forget: torch.Tensor,
        beta: torch.Tensor,
        gate: torch.Tensor,
        matrices: torch.Tensor,
        windows: torch.Tensor,
        slots: Sequence[int],
        lengths: Sequence[int],
    ) -> torch.Tensor:
        g = forget_gate(forget.reshape(heads), a_log, dt_bias, dims.lower_bound)
        weight = beta.float().sigmoid()
        attended, first = [], 0
        for slot, length in zip(slots, lengths, strict=True):
            tokens = slice(first, first + length)
            first += length
            convolved = []
            for i, (part, taps) in enumerate(zip((q, k, v), convolutions, strict=True)):
                rows = slice(i * width, (i + 1) * width)
                y, windows[slot, rows] = short_convolution(part[tokens], windows[slot, rows], taps)
                convolved.append(y.view(heads))
            query, key, value = convolved
            out, matrices[slot] = recurrence(query, key, value, g[tokens], weight[tokens], matrices[slot])
            attended.append(out)
        return gated_rms_norm(torch.cat(attended), gate.reshape(heads), norm, dims.norm_eps, q.dtype).flatten(1)

    return block


def short_convolution(x: torch.Tensor, window: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal depthwise convolution, then SiLU. x [tokens, channels]; window [channels, kernel - 1], the
    inputs before x, oldest first; weight [channels, kernel]
    -> (float32 [tokens, channels], the next window in its dtype)."""
    tokens, kernel = x.shape[0], weight.shape[1]
    padded = torch.cat([window.float().T, x.float()])
    w = weight.float()
    y = padded[:tokens] * w[:, 0]
    for j in range(1, kernel):
        y = y + padded[j : j + tokens] * w[:, j]
    return torch.nn.functional.silu(y), padded[tokens:].T.to(window.dtype)


def forget_gate(
    raw: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float | None
) -> torch.Tensor:
    """raw [tokens, heads, key], a_log [heads], dt_bias [heads * key] -> g float32, the log of the decay.

    With a lower bound g = bound * sigmoid(exp(a_log) * (raw + bias)): the bound multiplies, it does not
    clamp. Without, g = -exp(a_log) * softplus(raw + bias).
    """
    g = raw.float() + dt_bias.float().view(raw.shape[1:])
    rate = a_log.float().exp().unsqueeze(-1)
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(rate * g)
    return -rate * torch.nn.functional.softplus(g)


def unit(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum of squares + 1e-6) over the last axis, float32."""
    x = x.float()
    return x / torch.sqrt(x.square().sum(dim=-1, keepdim=True) + _L2_EPS)


def recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k, g [tokens, heads, key], v [tokens, heads, value], beta [tokens, heads], state float32
    [heads, key, value] (not changed) -> (float32 [tokens, heads, value], the next state)."""
    q, k, v, decay = unit(q) * q.shape[-1] ** -0.5, unit(k), v.float(), g.float().exp()
    outputs = torch.empty_like(v)
    for t in range(q.shape[0]):
        state = state * decay[t].unsqueeze(-1)
        known = (state * k[t].unsqueeze(-1)).sum(dim=-2)
        delta = (v[t] - known) * beta[t].float().unsqueeze(-1)
        state = state + k[t].unsqueeze(-1) * delta.unsqueeze(-2)
        outputs[t] = (state * q[t].unsqueeze(-1)).sum(dim=-2)
    return outputs, state


def chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    chunk: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `recurrence`, `chunk` tokens at a time.

    With G the running sum of g within a chunk and S the state before it, the deltas d_t solve
    d_t + beta_t sum_{s<t} (k_t . exp(G_t - G_s) k_s) d_s = beta_t (v_t - S^T exp(G_t) k_t).
    """
    q, k, v = unit(q) * q.shape[-1] ** -0.5, unit(k), v.float()
    outputs = []
    for first in range(0, q.shape[0], chunk):
        part = slice(first, first + chunk)
        qc, kc, vc, total = (x[part].transpose(0, 1) for x in (q, k, v, g.float()))
        total = total.cumsum(dim=1)
        b = beta[part].float().T.unsqueeze(-1)
        # Decay from s to t, never above 1: exp(G_t) exp(-G_s) apart would overflow.
        between = (total.unsqueeze(2) - total.unsqueeze(1)).clamp(max=0).exp()
        seen = torch.einsum("htd,hsd,htsd->hts", kc, kc, between).tril(-1)
        read = torch.einsum("htd,hsd,htsd->hts", qc, kc, between).tril()
        decayed = total.exp()
        system = torch.eye(kc.shape[1], device=kc.device) + b * seen
        delta = torch.linalg.solve_triangular(system, b * (vc - (kc * decayed) @ state), upper=False)
        outputs.append(((qc * decayed) @ state + read @ delta).transpose(0, 1))
        rest = (total[:, -1:] - total).exp()
        state = state * decayed[:, -1].unsqueeze(-1) + (kc * rest).transpose(1, 2) @ delta
    return torch.cat(outputs), state
