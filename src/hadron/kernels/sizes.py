"""What operations need of the sizes of a block.

Kernels stand below the layers that own the dimensions, so they say what they read of them.
"""

from __future__ import annotations

from typing import Protocol


class KdaSizes(Protocol):
    """Of `KdaDimensions`."""

    @property
    def heads(self) -> int:
        """Heads of q, k and v."""

    @property
    def head_dim(self) -> int:
        """Elements of a head."""

    @property
    def conv_kernel(self) -> int:
        """Taps of the short convolutions."""

    @property
    def lower_bound(self) -> float | None:
        """Multiplies a sigmoid forget gate; None selects the softplus gate."""

    @property
    def norm_eps(self) -> float:
        """Of the gated norm."""


class RouterSizes(Protocol):
    """Of `MoeDimensions`."""

    @property
    def top_k(self) -> int:
        """Experts of a token."""

    @property
    def groups(self) -> int:
        """Groups of experts."""

    @property
    def topk_groups(self) -> int:
        """Groups that a token may use."""

    @property
    def normalize(self) -> bool:
        """Whether the weights are divided by their sum."""

    @property
    def scaling(self) -> float:
        """What they are multiplied by."""


class HyperConnectionSizes(Protocol):
    """Of `HyperConnectionDimensions`."""

    @property
    def streams(self) -> int:
        """Residual streams."""

    @property
    def sinkhorn_iterations(self) -> int:
        """Alternations of column and row normalisation."""

    @property
    def eps(self) -> float:
        """Added to `pre`, to `comb` and to the sums that divide it."""

    @property
    def norm_eps(self) -> float:
        """Under the root of the norm of the streams."""
