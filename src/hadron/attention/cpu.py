"""The native backend: a layer's attention over its pages is one call.

The dense path is a call a request; it is outside the promise on bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch

from hadron.attention.backend import (
    AttentionBackend,
    AttentionInput,
    AttentionMetadata,
    KeyValueProjection,
    LatentSizes,
)
from hadron.cache.pages import Pages
from hadron.kernels.provider import Provider
from hadron.kernels.stored import StoredWeight


class _Stored(Protocol):
    """A projection with its stored weight, as `layers.linear.Linear` is."""

    @property
    def weight(self) -> StoredWeight: ...


class CpuBackend(AttentionBackend):
    """Native kernels on the CPU, at the level of instructions in use."""

    name = "cpu"
    is_sparse = True
    supports_dense_mha_prefill = True
    supports_speculative_verification = True
    cache_dtypes = ("float32", "bfloat16", "fp8_e4m3")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        kernels = Provider({"mla": "cpu"}, threads=self.kernels.threads)
        self._bind, self._encode = kernels.function("mla", "bind"), kernels.function("mla", "encode_rows")

    def bind_expansion(self, kv_b_proj: KeyValueProjection, sizes: LatentSizes) -> Callable[[], Any]:
        """The native attention over `kv_b_proj` as it is stored, bound once."""
        weight = cast(_Stored, kv_b_proj).weight
        bound = self._bind(weight, sizes.heads, sizes.nope, sizes.rope, sizes.v, sizes.scale)
        return lambda: bound

    def forward_mqa(self, step: AttentionInput, metadata: AttentionMetadata, pages: Pages) -> torch.Tensor:
        """Absorb the query, attend over the selected rows, expand the mix of latents."""
        owners = metadata.request_of_token[: step.query.shape[0]]
        out: torch.Tensor = step.expansion.sparse(
            step.query, step.selection, _latents(pages, step.layer), metadata.block_tables, owners
        )
        return out

    def forward_mha(self, step: AttentionInput, metadata: AttentionMetadata, pages: Pages) -> torch.Tensor:
        """Expand keys and values of each request's whole context; every row sees all before it."""
        prefill = metadata.prefill
        assert prefill is not None
        first, outs = 0, []
        for i, (count, length) in enumerate(zip(prefill.query_lens, prefill.sequence_lens, strict=True)):
            table = metadata.block_tables[prefill.first_request + i]
            query = step.query[first : first + count]
            outs.append(step.expansion.dense(query, _latents(pages, step.layer), table, length))
            first += count
        return torch.cat(outs)


def _latents(pages: Pages, layer: int) -> torch.Tensor:
    latents = pages.latents[layer]
    assert latents is not None, f"layer {layer} keeps no latents"
    return latents
