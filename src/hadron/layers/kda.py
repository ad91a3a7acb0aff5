"""Kimi delta attention: short convolutions, a forget gate, the delta rule, a gated norm.

Its state (a float32 matrix a head, the last inputs of the convolutions) lives in the request's slot and
is read and written once a step; where the step guesses, a copy of it, and the state itself once it is known what
was right.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hadron.batch import ForwardBatch
from hadron.kernels.provider import Provider
from hadron.layers.dimensions import KdaDimensions
from hadron.layers.linear import Linears
from hadron.layers.weights import Weights


class Kda:
    """`self_attn` of a linear-attention layer."""

    def __init__(self, prefix: str, layer: int, dims: KdaDimensions, weights: Weights, kernels: Provider) -> None:
        self.layer = layer
        self.dims = dims
        self.q_proj = weights.linear(f"{prefix}.q_proj")
        self.k_proj = weights.linear(f"{prefix}.k_proj")
        self.v_proj = weights.linear(f"{prefix}.v_proj")
        self.f_a_proj = weights.linear(f"{prefix}.f_a_proj")
        self.f_b_proj = weights.linear(f"{prefix}.f_b_proj")
        self.b_proj = weights.linear(f"{prefix}.b_proj")
        self.g_a_proj = weights.linear(f"{prefix}.g_a_proj")
        self.g_b_proj = weights.linear(f"{prefix}.g_b_proj")
        self.o_proj = weights.linear(f"{prefix}.o_proj")
        self._of_input = Linears([self.q_proj, self.k_proj, self.v_proj, self.b_proj, self.f_a_proj, self.g_a_proj])
        self._of_low_rank = Linears([self.f_b_proj, self.g_b_proj])
        convolutions = [
            weights.tensor(f"{prefix}.{name}").reshape(dims.width, dims.conv_kernel)
            for name in ("q_conv1d", "k_conv1d", "v_conv1d")
        ]
        self.a_log = weights.tensor(f"{prefix}.A_log")
        self.dt_bias = weights.tensor(f"{prefix}.dt_bias")
        norm = weights.tensor(f"{prefix}.o_norm")
        self._block = kernels.function("kda", "bind")(convolutions, self.a_log, self.dt_bias, norm, dims)

    def __call__(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        matrices, windows = batch.states.kda[self.layer], batch.states.conv[self.layer]
        assert matrices is not None and windows is not None
        q, k, v, b, f_a, g_a = self._of_input(x)
        f, gate = self._of_low_rank(f_a, g_a)
        mixed = batch.move_states(self._move, (q, k, v, f, b, gate), (matrices, windows))
        parts = [part for part in mixed if part is not None]
        return self.o_proj(parts[0] if len(parts) == 1 else torch.cat(parts))

    def _move(
        self,
        rows: Sequence[torch.Tensor],
        states: Sequence[torch.Tensor],
        slots: Sequence[int],
        lens: Sequence[int],
        ends: Sequence[int],
    ) -> torch.Tensor:
        del ends
        out: torch.Tensor = self._block(*rows, *states, slots, lens)
        return out
