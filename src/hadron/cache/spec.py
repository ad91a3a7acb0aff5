"""What a model keeps between steps: bytes a token (pages) and bytes a sequence (state slots).

Row layouts come from the configuration alone: a latent row is `kv_rank + rope` wide (512 where there
is no rotary part), an indexer row `head_dim` for every `pool` tokens. Indexer rows and windows keep the
model's dtype; latent rows have one of their own, and in FP8 each row holds its own scale. Imports no tensor
library: planning counts with this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hadron.errors import UnsupportedError

PAGE_SIZE = 64
"""Tokens of a page."""

FP8 = "fp8_e4m3"
"""Latent rows of E4M3 codes, the float32 scale of these, and the rotary part behind in bfloat16."""

KV_CACHE_DTYPES = ("auto", "bf16", "fp32", FP8)
"""What a user may ask latent rows to be kept in; `auto` is the dtype of activations."""

_BYTES = {"float32": 4, "bfloat16": 2}
_SCALE = 4  # bytes


class _LayerKinds(Protocol):
    """What is needed of a `LayerSchedule`."""

    @property
    def attention(self) -> str: ...
    @property
    def indexer(self) -> str | None: ...


class _LatentSizes(Protocol):
    """What is needed of `MlaDimensions`."""

    @property
    def latent_width(self) -> int: ...
    @property
    def rope(self) -> int: ...


class _IndexerSizes(Protocol):
    """What is needed of `IndexerDimensions`."""

    @property
    def head_dim(self) -> int: ...
    @property
    def pool(self) -> int: ...
    @property
    def pooled(self) -> bool: ...


class _KdaSizes(Protocol):
    """What is needed of `KdaDimensions`."""

    @property
    def heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def conv_kernel(self) -> int: ...


class _CachedModel(Protocol):
    """A configuration whose cache can be laid out; its `kda` is looked for, and may be missing."""

    @property
    def layers(self) -> Sequence[_LayerKinds]: ...
    @property
    def mla(self) -> _LatentSizes: ...
    @property
    def indexer(self) -> _IndexerSizes: ...


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer keeps. 0 and () mean nothing.

    latent_width: elements a token, of which the last `rope_width` are the rotary part. index_width:
    elements for every `pool` tokens. tail_rows: rows of the open pool, each a key and a gate of
    `index_width` (float32). kda: (heads, head_dim) of the float32 matrices head_dim x head_dim. conv:
    (channels, rows) of the window before the short convolution, in the model's dtype.
    """

    latent_width: int = 0
    rope_width: int = 0
    index_width: int = 0
    tail_rows: int = 0
    kda: tuple[int, int] | tuple[()] = ()
    conv: tuple[int, int] | tuple[()] = ()


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The cache of a model. pool: tokens of an indexer row (1: not pooled). dtype: of indexer rows and
    windows. latents: `float32`, `bfloat16` or `fp8_e4m3`, what latent rows are kept in."""

    layers: tuple[LayerCache, ...]
    pool: int
    dtype: str
    page_size: int
    latents: str

    def latent_bytes(self, layer: LayerCache) -> int:
        """Bytes of a token's latent row in such a layer."""
        if self.latents != FP8:
            return layer.latent_width * _BYTES[self.latents]
        latent = layer.latent_width - layer.rope_width
        return latent + _SCALE + layer.rope_width * _BYTES["bfloat16"] if latent else 0

    def index_bytes(self, layer: LayerCache) -> int:
        """Bytes of an indexer row, one for `pool` tokens, in such a layer."""
        return layer.index_width * _BYTES[self.dtype]

    @property
    def bytes_per_page(self) -> int:
        """Bytes that `page_size` tokens take in all layers."""
        rows = self.page_size // self.pool
        return sum(self.latent_bytes(c) * self.page_size + self.index_bytes(c) * rows for c in self.layers)

    @property
    def bytes_per_token(self) -> int:
        """`bytes_per_page` shared out over its tokens, rounded up."""
        return -(-self.bytes_per_page // self.page_size)

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes of one state slot in all layers; 0 where everything grows with tokens."""
        total = 0
        for c in self.layers:
            total += 4 * 2 * c.tail_rows * c.index_width
            if c.kda:
                heads, size = c.kda
                total += 4 * heads * size * size
            if c.conv:
                channels, rows = c.conv
                total += _BYTES[self.dtype] * channels * rows
        return total

    @property
    def has_state(self) -> bool:
        """Whether a sequence keeps anything that a page cannot hold."""
        return any(c.kda or c.tail_rows for c in self.layers)


def latent_dtype(asked: str, dtype: str) -> str:
    """What latent rows are kept in: `asked` of `KV_CACHE_DTYPES`, beside activations of `dtype`.

    `UnsupportedError` for another word.
    """
    found = {"auto": dtype, "bf16": "bfloat16", "fp32": "float32", FP8: FP8}.get(asked)
    if found is None:
        raise UnsupportedError(
            "The cache cannot hold this dtype", where="--kv-cache-dtype", found=repr(asked),
            accepted=", ".join(KV_CACHE_DTYPES), hint="leave it out to keep latents in the dtype of activations",
        )  # fmt: skip
    return found


def cache_spec(
    config: _CachedModel,
    *,
    dtype: str,
    latents: str | None = None,
    page_size: int = PAGE_SIZE,
    drafting: bool = False,
) -> CacheSpec:
    """The cache of the decoder layers of `config`. dtype: `float32` or `bfloat16`; latents: None for the same,
    else one of those or `fp8_e4m3`. drafting: with one more layer behind, for multi-token prediction.

    `UnsupportedError` for another dtype, and where a pool would straddle pages.
    """
    latents = latents or dtype
    for what, found, accepted in (("cache dtype", dtype, (*_BYTES,)), ("latents", latents, (*_BYTES, FP8))):
        if found not in accepted:
            raise UnsupportedError(
                "The cache cannot hold this dtype", where=what, found=repr(found), accepted=" or ".join(accepted),
                hint="indexer keys and windows keep the dtype of activations; only latents can be FP8",
            )  # fmt: skip
    indexer = config.indexer
    if page_size % indexer.pool:
        raise UnsupportedError(
            "Pools of indexer keys do not fit pages", where="config.json: index_kpool", found=str(indexer.pool),
            accepted=f"a divisor of the page size ({page_size})", hint="use a page size that the pool size divides",
        )  # fmt: skip
    layers = [_layer(layer, config, getattr(config, "kda", None)) for layer in config.layers]
    if drafting:
        layers.append(_attending(config, full=True))
    return CacheSpec(
        tuple(layers),
        indexer.pool,
        dtype,
        page_size,
        latents,
    )


def _layer(kinds: _LayerKinds, config: _CachedModel, kda: _KdaSizes | None) -> LayerCache:
    if kinds.attention == "kda":
        assert kda is not None, "a KDA layer without KDA sizes"
        return LayerCache(kda=(kda.heads, kda.head_dim), conv=(3 * kda.heads * kda.head_dim, kda.conv_kernel - 1))
    return _attending(config, full=kinds.indexer == "full")


def _attending(config: _CachedModel, *, full: bool) -> LayerCache:
    """A layer of latent attention; full: with an indexer of its own."""
    return LayerCache(
        latent_width=config.mla.latent_width,
        rope_width=config.mla.rope,
        index_width=config.indexer.head_dim if full else 0,
        tail_rows=config.indexer.pool - 1 if full and config.indexer.pooled else 0,
    )
