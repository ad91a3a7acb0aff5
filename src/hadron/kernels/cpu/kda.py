"""Native `kda`: convolutions, gates, recurrence and gated norm of all requests of a step in one call.

The state moves in place, token by token, in blocks of a head's value columns; bits do not depend on how
a sequence is split into steps. There is no chunked form on this provider.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hadron.kernels.cpu.native import extension
from hadron.kernels.cpu.native import level as current_level
from hadron.kernels.cpu.plain import activations, number_type, numbers
from hadron.kernels.sizes import KdaSizes


def bind(
    convolutions: Sequence[torch.Tensor],
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm: torch.Tensor,
    dims: KdaSizes,
    *,
    threads: int = 1,
    level: Any = None,
) -> Callable[..., torch.Tensor]:
    """See `kernels/reference/kda.bind`. Parameters are copied as float32 in the order in which they are used:
    48 bytes a channel of q, k and v."""
    width = dims.heads * dims.head_dim
    assert dims.conv_kernel <= 17, "a convolution reaches back into one earlier piece"
    taps = torch.stack([c.float().reshape(width, dims.conv_kernel).T for c in convolutions]).contiguous()
    rate = a_log.double().exp().float().reshape(-1).contiguous()
    parameters = [taps, rate, *(p.float().reshape(-1).clone() for p in (dt_bias, norm))]
    bound = dims.lower_bound
    layer = extension().kda_layer(
        dims.heads, dims.head_dim, dims.conv_kernel, *(p.data_ptr() for p in parameters), dims.norm_eps,
        0.0 if bound is None else bound, bound is not None,
    )  # fmt: skip
    used, call = level or current_level(), extension().kda

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
        assert parameters and matrices.is_contiguous() and windows.is_contiguous()
        assert matrices.dtype is torch.float32 and windows.dtype in (torch.float32, torch.bfloat16)
        assert sum(lengths) == q.shape[0]
        inputs = [activations(x) for x in (q, k, v, forget, beta, gate)]
        assert all(x.dtype is inputs[0].dtype for x in inputs)
        out = torch.empty(q.shape[0], width, dtype=inputs[0].dtype)
        call(
            used, layer, *(x.data_ptr() for x in inputs), number_type(out.dtype), out.data_ptr(), *numbers(windows),
            matrices.data_ptr(), slots, lengths, threads,
        )  # fmt: skip
        return out.to(q.dtype)

    return block
