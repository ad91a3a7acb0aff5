"""Sizes and constants of the blocks, as plain data shared by configurations and layers.

Imports no tensor library: `models/<family>/config.py` builds these while planning.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MlaDimensions:
    """Multi-head latent attention. rope is 0 for rope-free models. scale multiplies q.k.

    latent_norm_eps: of `q_a_layernorm` and `kv_a_layernorm`. rope_interleave: pairs (2i, 2i+1)
    rather than half-split; the rotary part comes last within a head.
    """

    hidden: int
    heads: int
    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    v: int
    latent_norm_eps: float
    rope_theta: float
    rope_interleave: bool
    bias: bool

    @property
    def scale(self) -> float:
        """1/sqrt(query head size)."""
        return float((self.nope + self.rope) ** -0.5)

    @property
    def latent_width(self) -> int:
        """Elements of one cached row: normed latent, then the rotated shared key."""
        return self.kv_rank + self.rope


@dataclass(frozen=True, slots=True)
class IndexerDimensions:
    """Sparse-attention indexer. topk counts tokens; pool is 1 where keys are not pooled.

    rope: rotary elements, first within a head. always_select_tail: the open pool is attended.
    """

    hidden: int
    q_rank: int
    heads: int
    head_dim: int
    topk: int
    rope: int
    rope_theta: float
    rope_interleave: bool
    pool: int = 1
    pooled: bool = False
    always_select_tail: bool = False
    norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class MlpDimensions:
    """Gated MLP. limit clamps gate from above and up on both sides (None: no clamp)."""

    hidden: int
    intermediate: int
    limit: float | None


@dataclass(frozen=True, slots=True)
class MoeDimensions:
    """Sigmoid-routed experts with a shared expert."""

    hidden: int
    experts: int
    top_k: int
    intermediate: int
    shared_intermediate: int
    groups: int
    topk_groups: int
    normalize: bool
    scaling: float
    limit: float | None


@dataclass(frozen=True, slots=True)
class KdaDimensions:
    """Kimi delta attention. lower_bound multiplies a sigmoid gate; None selects the softplus gate."""

    hidden: int
    heads: int
    head_dim: int
    conv_kernel: int
    lower_bound: float | None
    norm_eps: float

    @property
    def width(self) -> int:
        """heads x head_dim."""
        return self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class HyperConnectionDimensions:
    """Manifold-constrained hyper-connections: `streams` residual streams."""

    hidden: int
    streams: int
    sinkhorn_iterations: int
    eps: float
    norm_eps: float

    @property
    def mixes(self) -> int:
        """Values a site computes for each token: pre, post and comb."""
        return (2 + self.streams) * self.streams


@dataclass(frozen=True, slots=True)
class LayerSchedule:
    """What one decoder layer is made of."""

    attention: str  # "mla" or "kda"
    indexer: str | None  # "full", "shared" or None (kda)
    mlp: str  # "dense" or "sparse"
