"""Native `hyper_connection`: mixes and collapse in one call before a block, spread in one after it.

The unweighted norm is a factor on the finished products of `fn`. Everything is float32.
"""

from __future__ import annotations

from typing import Any

import torch

from hadron.kernels.cpu.native import extension
from hadron.kernels.cpu.native import level as current_level
from hadron.kernels.cpu.plain import activations, numbers
from hadron.kernels.sizes import HyperConnectionSizes


def enter(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    dims: HyperConnectionSizes,
    norm: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    threads: int = 1,
    level: Any = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `reference.hyper_connection.enter`."""
    out = torch.empty(streams.shape[0], streams.shape[2], dtype=dtype if dtype is torch.bfloat16 else torch.float32)
    _, post, comb = _enter(streams, fn, base, scale, dims, (norm, eps, out), threads, level)
    return out.to(dtype), post, comb


def mixes(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    dims: HyperConnectionSizes,
    *,
    threads: int = 1,
    level: Any = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """streams float32 [tokens, m, hidden], fn [(2+m)m, m*hidden], base [(2+m)m], scale [3] (pre, post, comb)
    -> pre [tokens, m], post [tokens, m], comb [tokens, m, m]."""
    return _enter(streams, fn, base, scale, dims, None, threads, level)


def collapse(streams: torch.Tensor, pre: torch.Tensor, *, threads: int = 1, level: Any = None) -> torch.Tensor:
    """streams [tokens, m, hidden], pre [tokens, m] -> [tokens, hidden]."""
    streams, pre = streams.float().contiguous(), pre.float().contiguous()
    out = torch.empty(streams.shape[0], streams.shape[2])
    extension().hyper_collapse(
        level or current_level(), streams.data_ptr(), pre.data_ptr(), *streams.shape, out.data_ptr(), threads
    )
    return out


def mean(streams: torch.Tensor, *, threads: int = 1, level: Any = None) -> torch.Tensor:
    """streams [tokens, m, hidden] -> their mean [tokens, hidden], what the final norm reads."""
    tokens, m, _ = streams.shape
    return collapse(streams, torch.full((tokens, m), 1.0 / m), threads=threads, level=level)


def spread(
    output: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    streams: torch.Tensor,
    *,
    threads: int = 1,
    level: Any = None,
) -> torch.Tensor:
    """output [tokens, hidden] of a block -> the next streams, float32 [tokens, m, hidden]: stream j is
    post[j] * output + the sum over i of comb[i, j] * stream i."""
    output, post, comb, streams = (t.contiguous() for t in (activations(output), post, comb, streams))
    out = torch.empty(streams.shape)
    extension().hyper_spread(
        level or current_level(), *numbers(output), post.data_ptr(), comb.data_ptr(), streams.data_ptr(),
        *streams.shape, out.data_ptr(), threads,
    )  # fmt: skip
    return out


def _enter(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    dims: HyperConnectionSizes,
    normed: tuple[torch.Tensor, float, torch.Tensor] | None,
    threads: int,
    level: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    streams = streams.float().contiguous()
    tokens, m, hidden = streams.shape
    assert fn.shape == ((2 + m) * m, m * hidden) and m == dims.streams <= 16
    pre, post, comb = torch.empty(tokens, m), torch.empty(tokens, m), torch.empty(tokens, m, m)
    collapsed = None if normed is None else torch.empty(tokens, hidden)
    norm = (0, 0, 0.0, 0, 0) if normed is None else (*numbers(normed[0]), normed[1], *numbers(normed[2]))
    extension().hyper_enter(
        level or current_level(), streams.data_ptr(), tokens, m, hidden, dims.sinkhorn_iterations, dims.eps,
        dims.norm_eps, *numbers(fn), *numbers(base), *numbers(scale), pre.data_ptr(), post.data_ptr(), comb.data_ptr(),
        0 if collapsed is None else collapsed.data_ptr(), *norm, threads,
    )  # fmt: skip
    return pre, post, comb
