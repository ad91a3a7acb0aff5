"""The reference backend: absorbed attention over selected latents, and the dense path it is equal to.

Both read keys and values back from the pages, also those written in the same step, and compute in
float32 whatever the dtype of pages and query; FP8 rows are widened as they are taken.
"""

from __future__ import annotations

from typing import Any

import torch

from hadron.attention.backend import AttentionBackend, AttentionInput, AttentionMetadata
from hadron.cache.pages import Pages
from hadron.kernels.provider import Provider


class ReferenceBackend(AttentionBackend):
    """Plain torch on any device."""

    name = "reference"
    is_sparse = True
    supports_dense_mha_prefill = True
    supports_speculative_verification = True
    cache_dtypes = ("float32", "bfloat16", "fp8_e4m3")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        kernels = Provider()  # the definition, whatever the rest of the model runs on
        self._absorb = kernels.function("mla", "absorb")
        self._slots = kernels.function("mla", "selected_slots")
        self._attend = kernels.function("mla", "sparse_attend")
        self._expand = kernels.function("mla", "expand")
        self._dense = kernels.function("mla", "dense_attend")

    def forward_mqa(self, step: AttentionInput, metadata: AttentionMetadata, pages: Pages) -> torch.Tensor:
        """Absorb the query, attend over the selected rows, expand the mix of latents."""
        owners = metadata.request_of_token[: step.query.shape[0]]
        slots = self._slots(step.selection, metadata.block_tables[owners], metadata.page_size, pages.blocks)
        query = self._absorb(step.query, step.expansion.key)
        mixed = self._attend(query, pages.latent_rows(step.layer), slots, step.expansion)
        out: torch.Tensor = self._expand(mixed, step.expansion.value)
        return out.to(step.query.dtype)

    def forward_mha(self, step: AttentionInput, metadata: AttentionMetadata, pages: Pages) -> torch.Tensor:
        """Expand keys and values of each request's whole context; every row sees all before it."""
        prefill = metadata.prefill
        assert prefill is not None
        rows, latents = 0, pages.latents[step.layer]
        assert latents is not None
        outs = []
        for i, (query_len, length) in enumerate(zip(prefill.query_lens, prefill.sequence_lens, strict=True)):
            table = metadata.block_tables[prefill.first_request + i, : -(-length // metadata.page_size)]
            context = latents[table].flatten(0, 1)[:length]
            query = step.query[rows : rows + query_len]
            outs.append(self._dense(query, context, length - query_len, step.expansion))
            rows += query_len
        return torch.cat(outs).to(step.query.dtype)
