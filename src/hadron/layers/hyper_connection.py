"""A hyper-connection site: before a block the streams are collapsed into its input and normed, after it the block's
output is spread over them while they mix. Everything is float32, whatever the parameters' storage."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hadron.kernels.provider import Provider
from hadron.layers.dimensions import HyperConnectionDimensions
from hadron.layers.norm import RmsNorm
from hadron.layers.weights import Weights


@dataclass(frozen=True, slots=True)
class Site:
    """inner: [tokens, hidden], the block's input, normed. post [tokens, m], comb [tokens, m, m]: for
    `HyperConnection.spread`."""

    inner: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


class HyperConnection:
    """Parameters `<prefix>_fn`, `<prefix>_base`, `<prefix>_scale`."""

    def __init__(self, prefix: str, dims: HyperConnectionDimensions, weights: Weights, kernels: Provider) -> None:
        self.fn = weights.tensor(prefix + "_fn")
        self.base = weights.tensor(prefix + "_base")
        self.scale = weights.tensor(prefix + "_scale")
        self.dims = dims
        self._enter = kernels.function("hyper_connection", "enter")
        self._spread = kernels.function("hyper_connection", "spread")

    def __call__(self, streams: torch.Tensor, norm: RmsNorm, dtype: torch.dtype) -> Site:
        """streams float32 [tokens, m, hidden]; norm: of the block's input, wanted in `dtype`."""
        return Site(*self._enter(streams, self.fn, self.base, self.scale, self.dims, norm.weight, norm.eps, dtype))

    def spread(self, output: torch.Tensor, site: Site, streams: torch.Tensor) -> torch.Tensor:
        """output [tokens, hidden] of the block, the streams it was computed from -> the next streams."""
        out: torch.Tensor = self._spread(output, site.post, site.comb, streams)
        return out
