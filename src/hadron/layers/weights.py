"""`Weights`: where a layer finds its parameters, by runtime name.

The engine hands layers an implementation that views the mapped checkpoint as its plan says
(`engine/weights.py`); tests hand them one over plain tensors.
"""

from __future__ import annotations

from typing import Protocol

import torch


class LinearLike(Protocol):
    """A matrix product by a weight [out, in] in whatever scheme it is stored."""

    @property
    def in_features(self) -> int:
        """Columns of the weight."""

    @property
    def out_features(self) -> int:
        """Rows of the weight."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, in] -> [tokens, out] in x's dtype."""

    def dequantized(self) -> torch.Tensor:
        """The weight as float32 [out, in]."""


class Weights(Protocol):
    """Parameters by runtime name (`layers.3.self_attn.q_a_proj`)."""

    def __contains__(self, name: str) -> bool:
        """Whether the model holds that parameter."""

    def linear(self, name: str) -> LinearLike:
        """The matrix product of that name, its bias included."""

    def tensor(self, name: str) -> torch.Tensor:
        """A plain parameter in its stored dtype; a norm's bias is `<name>.bias`."""
