"""The contract of attention backends: declared capabilities, one metadata a step, two prefill paths.

A backend states what it can do on its own class, or the class does not come into being; so does one
that claims what it has no method for. Decodes come first in a batch. A prefill takes `mqa` (absorbed,
over selected latents) unless `dense_mha` was settled at start-up and every context of the step fits
the selection budget, where both are equal.
"""

from __future__ import annotations

import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import torch

from hadron.attention.select import PREFILL_PATHS, AttentionChoice
from hadron.batch import ForwardBatch
from hadron.cache.pages import Pages
from hadron.cache.spec import FP8
from hadron.kernels.provider import Provider

logger = logging.getLogger("hadron.attention")


class BatchSplit(NamedTuple):
    """How a batch divides into decodes and the prefills behind them."""

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int


def split_decodes_and_prefills(query_lens: Sequence[int], decode_threshold: int) -> BatchSplit:
    """A request is a decode when its query length is at most `decode_threshold`.

    `ValueError` for an empty query, and where a decode follows a prefill.
    """
    if decode_threshold < 1:
        raise ValueError(f"decode threshold {decode_threshold}: at least 1")
    if min(query_lens, default=1) < 1:
        raise ValueError(f"query lengths {tuple(query_lens)}: at least 1 each")
    if max(query_lens, default=0) <= decode_threshold:
        return BatchSplit(len(query_lens), 0, sum(query_lens), 0)
    decodes = next((i for i, length in enumerate(query_lens) if length > decode_threshold), len(query_lens))
    if any(length <= decode_threshold for length in query_lens[decodes:]):
        raise ValueError(f"query lengths {tuple(query_lens)}: decodes (at most {decode_threshold}) must come first")
    tokens = sum(query_lens[:decodes])
    return BatchSplit(decodes, len(query_lens) - decodes, tokens, sum(query_lens) - tokens)


@dataclass(frozen=True)
class PrefillMetadata:
    """The prefills of a step that take the dense path: requests and rows from these on, to the end."""

    first_request: int
    first_token: int
    query_lens: tuple[int, ...]
    sequence_lens: tuple[int, ...]


@dataclass(frozen=True)
class AttentionMetadata:
    """What attention needs of a step. No field has a default: every builder states all of them.

    query_lens, sequence_lens: new and total tokens of each request.
    request_of_token, positions, slots: int64 [tokens]. block_tables: int64 [requests, pages], -1 beyond.
    prefill_max_seq_len: longest sequence of `prefill`, 0 where that is None (every row takes mqa).
    """

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int
    query_lens: tuple[int, ...]
    sequence_lens: tuple[int, ...]
    request_of_token: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    block_tables: torch.Tensor
    page_size: int
    prefill_max_seq_len: int
    prefill: PrefillMetadata | None


@dataclass(frozen=True, slots=True)
class LatentExpansion:
    """The two halves of `kv_b_proj`, float32: key [heads, nope, kv_rank], value [heads, v, kv_rank];
    scale multiplies q.k."""

    key: torch.Tensor
    value: torch.Tensor
    scale: float


class KeyValueProjection(Protocol):
    """`kv_b_proj` as a layer holds it: [heads * (nope + v), kv_rank]."""

    def dequantized(self) -> torch.Tensor:
        """The weight as float32."""


class LatentSizes(Protocol):
    """What is needed of `MlaDimensions`."""

    @property
    def heads(self) -> int:
        """Query heads."""

    @property
    def nope(self) -> int:
        """Elements of a head without position."""

    @property
    def rope(self) -> int:
        """Rotated elements of a head, behind."""

    @property
    def v(self) -> int:
        """Elements of a value."""

    @property
    def kv_rank(self) -> int:
        """Elements of a latent."""

    @property
    def scale(self) -> float:
        """Of q.k."""


@dataclass(frozen=True, slots=True)
class AttentionInput:
    """One layer's share of a step. query: [tokens, heads, nope + rope]; selection: int64 [tokens, width],
    positions in ascending order, -1 beyond; expansion: what `bind_expansion` of the same backend gave."""

    layer: int
    query: torch.Tensor
    selection: torch.Tensor
    expansion: Any

    def rows(self, first: int, end: int) -> AttentionInput:
        """The same for rows first .. end-1."""
        return AttentionInput(self.layer, self.query[first:end], self.selection[first:end], self.expansion)


_DECLARED: dict[str, type] = {
    "name": str,
    "is_sparse": bool,
    "supports_dense_mha_prefill": bool,
    "supports_speculative_verification": bool,
    "cache_dtypes": tuple,
}
_METHOD_OF = {"supports_dense_mha_prefill": "forward_mha"}


class AttentionBackend(ABC):
    """Base of all backends. A subclass declares, on itself, everything in the list below.

    cache_dtypes: of latent rows that it writes and reads. supports_dense_mha_prefill: has `forward_mha`.
    supports_speculative_verification: `forward_mqa` gives each of several rows of a request what it gives it
    alone, so that drafts are verified as decodes are. `TypeError` at class creation for a missing declaration
    and for one that its methods contradict.
    """

    name: ClassVar[str]
    is_sparse: ClassVar[bool]
    supports_dense_mha_prefill: ClassVar[bool]
    supports_speculative_verification: ClassVar[bool]
    cache_dtypes: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        faults = [
            f"{key} must be declared as a {kind.__name__}"
            for key, kind in _DECLARED.items()
            if not isinstance(cls.__dict__.get(key), kind) or cls.__dict__[key] in ("", ())
        ]
        if not callable(getattr(cls, "forward_mqa", None)) or cls.forward_mqa is AttentionBackend.forward_mqa:
            faults.append("forward_mqa must be defined")
        for key, method in _METHOD_OF.items():
            claimed, there = cls.__dict__.get(key), callable(getattr(cls, method, None))
            if isinstance(claimed, bool) and claimed != there:
                faults.append(f"{key} is {claimed}, but {method} is {'' if there else 'not '}defined")
        if faults:
            raise TypeError(f"attention backend {cls.__name__}: {'; '.join(faults)}")

    def __init__(
        self, prefill_path: str, *, selection_budget: int, decode_threshold: int = 1, kernels: Provider | None = None
    ) -> None:
        """prefill_path: `mqa` or `dense_mha`, for good. selection_budget: see `select.AttentionNeeds`."""
        if prefill_path not in PREFILL_PATHS:
            raise ValueError(f"prefill path {prefill_path!r}: one of {', '.join(PREFILL_PATHS)}")
        if prefill_path == "dense_mha" and not self.supports_dense_mha_prefill:
            raise ValueError(f"{self.name} has no dense_mha prefill")
        self.prefill_path = prefill_path
        self.selection_budget = selection_budget
        self.decode_threshold = decode_threshold
        self.kernels = kernels or Provider()
        self._encode = Provider().function("mla", "encode_rows")  # the definition; a backend may bring its own
        if self.is_sparse and not self.supports_dense_mha_prefill:
            logger.info("attention backend %s has no dense_mha prefill: every prefill takes mqa", self.name)

    def bind_expansion(self, kv_b_proj: KeyValueProjection, sizes: LatentSizes) -> Callable[[], Any]:
        """What gives a step's `AttentionInput.expansion`: called once a layer and step.

        Here both halves in float32, from the stored bytes each time, so that no copy is kept.
        """

        def expansion() -> LatentExpansion:
            both = kv_b_proj.dequantized().reshape(sizes.heads, sizes.nope + sizes.v, sizes.kv_rank)
            return LatentExpansion(both[:, : sizes.nope], both[:, sizes.nope :], sizes.scale)

        return expansion

    def build_metadata(self, batch: ForwardBatch) -> AttentionMetadata:
        """The metadata of a step, for all layers. `ValueError` where decodes do not come first."""
        split = split_decodes_and_prefills(batch.query_lens, self.decode_threshold)
        lens = batch.sequence_lens
        prefill = self._dense_prefill(split, batch.query_lens, lens)
        return AttentionMetadata(
            *split,
            query_lens=batch.query_lens,
            sequence_lens=lens,
            request_of_token=batch.request_of_token,
            positions=batch.positions,
            slots=batch.slots,
            block_tables=batch.block_tables,
            page_size=batch.pages.page_size,
            prefill_max_seq_len=max(prefill.sequence_lens) if prefill else 0,
            prefill=prefill,
        )

    def _dense_prefill(
        self, split: BatchSplit, query_lens: tuple[int, ...], sequence_lens: tuple[int, ...]
    ) -> PrefillMetadata | None:
        if self.prefill_path != "dense_mha" or not split.num_prefills:
            return None
        lens = sequence_lens[split.num_decodes :]
        if self.is_sparse and max(lens) > self.selection_budget:
            return None
        return PrefillMetadata(split.num_decodes, split.num_decode_tokens, query_lens[split.num_decodes :], lens)

    def write(
        self, layer: int, latent: torch.Tensor, key: torch.Tensor, metadata: AttentionMetadata, pages: Pages
    ) -> int:
        """The step's latents [tokens, kv_rank] and rotated keys [tokens, rope] into a layer's pages, in the dtype
        of these; returns the number of rows."""
        rows = torch.cat([latent, key], dim=-1)
        if pages.spec.latents == FP8:
            rows = self._encode(rows, latent.shape[-1])
        return pages.write_latents(layer, metadata.slots, rows)

    def attend(self, step: AttentionInput, metadata: AttentionMetadata, pages: Pages) -> torch.Tensor:
        """[tokens, heads, v] in the query's dtype; the step's own rows are already in the pages."""
        if metadata.prefill is None:
            return self.forward_mqa(step, metadata, pages)
        first, end = metadata.prefill.first_token, step.query.shape[0]
        dense = cast(Any, self).forward_mha(step.rows(first, end), metadata, pages)
        if first == 0:
            return cast(torch.Tensor, dense)
        return torch.cat([self.forward_mqa(step.rows(0, first), metadata, pages), dense])

    @abstractmethod
    def forward_mqa(self, step: AttentionInput, metadata: AttentionMetadata, pages: Pages) -> torch.Tensor:
        """Absorbed attention over selected latents, for the first `len(step.query)` rows of the batch."""


def create_backend(
    choice: AttentionChoice, *, selection_budget: int, decode_threshold: int = 1, kernels: Provider | None = None
) -> AttentionBackend:
    """The backend of a choice, ready to build metadata; logs once why it was chosen.

    `UnsupportedError` with every reason when the choice holds none.
    """
    choice.require()
    assert choice.path is not None and choice.prefill_path is not None
    module, _, name = choice.path.partition(":")
    backend: type[AttentionBackend] = getattr(importlib.import_module(module), name)
    logger.info(
        "attention backend %s, prefill path %s (%s)", choice.backend, choice.prefill_path, "; ".join(choice.reasons)
    )
    return backend(
        choice.prefill_path, selection_budget=selection_budget, decode_threshold=decode_threshold, kernels=kernels
    )
