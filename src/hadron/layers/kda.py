"""Kimi delta attention: short convolutions, a forget gate, the delta rule, a gated norm.

Its state (a float32 matrix a head, the last inputs of the convolutions) lives in the request's slot and
is read and written once a step.
"""

from __future__ import annotations

import torch

from hadron.batch import ForwardBatch
from hadron.kernels.provider import Provider
from hadron.layers.dimensions import KdaDimensions
from hadron.layers.weights import Weights


class Kda:
    """`self_attn` of a linear-attention layer."""

    def __init__(self, prefix: str, layer: int, dims: KdaDimensions, weights: Weights, kernels: Provider) -> None:
        self.layer = layer
        self.dims = dims
        self.q_proj = weights.linear(f"{prefix}.q_proj")
        self.k_proj = weights.linear(f"{prefix}.k_proj")
        self.v_proj = weights.linear(f"{prefix}.v_proj")
        self.convolutions = [
            weights.tensor(f"{prefix}.{name}").reshape(dims.width, dims.conv_kernel)
            for name in ("q_conv1d", "k_conv1d", "v_conv1d")
        ]
        self.f_a_proj = weights.linear(f"{prefix}.f_a_proj")
        self.f_b_proj = weights.linear(f"{prefix}.f_b_proj")
        self.a_log = weights.tensor(f"{prefix}.A_log")
        self.dt_bias = weights.tensor(f"{prefix}.dt_bias")
        self.b_proj = weights.linear(f"{prefix}.b_proj")
        self.g_a_proj = weights.linear(f"{prefix}.g_a_proj")
        self.g_b_proj = weights.linear(f"{prefix}.g_b_proj")
        self.o_norm = weights.tensor(f"{prefix}.o_norm")
        self.o_proj = weights.linear(f"{prefix}.o_proj")
        self._convolve = kernels.function("kda", "short_convolution")
        self._forget_gate = kernels.function("kda", "forget_gate")
        self._recurrence = kernels.function("kda", "recurrence")
        self._gated_norm = kernels.function("norm", "gated_rms_norm")

    def __call__(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        d = self.dims
        heads = (-1, d.heads, d.head_dim)
        inputs = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        g = self._forget_gate(self.f_b_proj(self.f_a_proj(x)).reshape(heads), self.a_log, self.dt_bias, d.lower_bound)
        beta = self.b_proj(x).float().sigmoid()
        attended = torch.cat(
            [
                self._run(slot, [part[first:end] for part in inputs], g[first:end], beta[first:end], batch)
                for slot, (first, end) in zip(batch.state_slots, batch.ranges, strict=True)
            ]
        )
        gate = self.g_b_proj(self.g_a_proj(x)).reshape(heads)
        return self.o_proj(self._gated_norm(attended, gate, self.o_norm, d.norm_eps, x.dtype).flatten(1))

    def _run(
        self, slot: int, inputs: list[torch.Tensor], g: torch.Tensor, beta: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """One request: float32 [tokens, heads, head_dim]; moves its state."""
        d = self.dims
        matrices, windows = batch.states.kda[self.layer], batch.states.conv[self.layer]
        assert matrices is not None and windows is not None
        convolved = []
        for i, (part, weight) in enumerate(zip(inputs, self.convolutions, strict=True)):
            rows = slice(i * d.width, (i + 1) * d.width)
            y, window = self._convolve(part, windows[slot, rows], weight)
            windows[slot, rows] = window
            convolved.append(y.view(-1, d.heads, d.head_dim))
        out: torch.Tensor
        out, matrices[slot] = self._recurrence(*convolved, g, beta, matrices[slot])
        return out
