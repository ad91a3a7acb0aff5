"""`LanguageModel`: what every family's model offers the engine, and the order in which a step runs.

A family gives embedding, a range of decoder layers and the closing norm; running [0, n) in one piece
or in many gives the same result, because everything between two layers is in `Carry`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch

from hadron.attention.backend import AttentionBackend, AttentionMetadata, create_backend
from hadron.attention.select import AttentionChoice, selection_budget
from hadron.batch import ForwardBatch
from hadron.errors import NumericsError
from hadron.kernels.provider import Provider
from hadron.layers.dimensions import LayerSchedule
from hadron.layers.embedding import Embedding, LmHead
from hadron.layers.logits import Logits
from hadron.layers.weights import Weights


@dataclass(frozen=True, slots=True)
class Carry:
    """All that passes from one decoder layer to the next.

    residual: float32 [tokens, hidden], or [tokens, streams, hidden] with hyper-connections.
    selection: int64 [tokens, width], what the last full indexer selected (positions ascending, -1
    beyond), or None before the first.
    """

    residual: torch.Tensor
    selection: torch.Tensor | None


class NonFiniteTrace:
    """Where the rows of a step first were not finite: for debugging, at the cost of a look at every layer."""

    def __init__(self) -> None:
        self._where: dict[int, tuple[int, str]] = {}
        self._looks = 0

    def look(self, where: str, rows: torch.Tensor) -> None:
        """rows [tokens, ...], what `where` computed."""
        self._looks += 1
        finite = torch.isfinite(rows).flatten(1).all(dim=1)
        for row in (~finite).nonzero().flatten().tolist():
            self._where.setdefault(row, (self._looks, where))

    def first(self, start: int, end: int) -> str | None:
        """What first computed a value that is not finite in rows start .. end-1, and in which of them."""
        found = [(*self._where[row], row - start) for row in range(start, end) if row in self._where]
        if not found:
            return None
        _, where, token = min(found)
        return f"{where}, token {token} of the step"


class _IndexerConfig(Protocol):
    """What is needed of `IndexerDimensions` to tell when it selects everything."""

    @property
    def topk(self) -> int: ...
    @property
    def pooled(self) -> bool: ...
    @property
    def pool(self) -> int: ...
    @property
    def always_select_tail(self) -> bool: ...


class _TextConfig(Protocol):
    """What every family's configuration holds of a text tower."""

    @property
    def vocabulary(self) -> int: ...
    @property
    def layers(self) -> tuple[LayerSchedule, ...]: ...
    @property
    def indexer(self) -> _IndexerConfig: ...


def config_selection_budget(config: _TextConfig) -> int:
    """`attention.select.selection_budget` of a family's configuration."""
    d = config.indexer
    return selection_budget(d.topk, pooled=d.pooled, pool=d.pool, always_select_tail=d.always_select_tail)


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """How a model runs. dtype: of activations and cache, float32 or bfloat16."""

    dtype: torch.dtype
    device: torch.device
    attention: AttentionBackend
    kernels: Provider


def model_settings(
    config: _TextConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    attention: AttentionChoice,
    kernels: Provider | None = None,
    drafts: int = 0,
) -> ModelSettings:
    """Settings with the chosen attention backend opened for `config`; drafts: most guesses of a request in a step."""
    kernels = kernels or Provider()
    backend = create_backend(
        attention, selection_budget=config_selection_budget(config), decode_threshold=1 + drafts, kernels=kernels
    )
    return ModelSettings(dtype, torch.device(device), backend, kernels)


class LanguageModel(ABC):
    """Embedding, decoder layers, norm and head of a text tower; inference only.

    `models/<family>/model.py` defines `build(config, weights, settings)`.
    """

    def __init__(self, config: _TextConfig, weights: Weights, settings: ModelSettings) -> None:
        self.settings = settings
        self.layer_count = len(config.layers)
        self.embed_tokens = Embedding("embed_tokens", config.vocabulary, weights, settings.kernels)
        self.lm_head = LmHead("lm_head", "embed_tokens", weights, settings.kernels)

    @abstractmethod
    def embed(self, batch: ForwardBatch) -> Carry:
        """The input of layer 0."""

    @abstractmethod
    def run_layers(self, batch: ForwardBatch, metadata: AttentionMetadata, carry: Carry, first: int, end: int) -> Carry:
        """Layers first .. end-1; writes their caches but moves no stamp."""

    @abstractmethod
    def finish(self, carry: Carry) -> torch.Tensor:
        """[tokens, hidden] in the model's dtype, after the final norm."""

    def prepare(self, batch: ForwardBatch) -> AttentionMetadata:
        """Check the stamps of the states and build the attention metadata, once a step."""
        batch.check_stamps()
        return self.settings.attention.build_metadata(batch)

    def forward(self, batch: ForwardBatch, trace: NonFiniteTrace | None = None) -> torch.Tensor:
        """Run a step: [tokens, hidden] in the model's dtype, after the final norm.

        Writes the caches and moves the states' stamps; the caller then commits to the manager. trace: is
        shown what every layer computes.
        """
        metadata = self.prepare(batch)
        carry = self.embed(batch)
        if trace is None:
            carry = self.run_layers(batch, metadata, carry, 0, self.layer_count)
        else:
            trace.look("embed_tokens", carry.residual)
            for layer in range(self.layer_count):
                carry = self._traced(batch, metadata, carry, layer, trace)
                trace.look(f"layers.{layer}", carry.residual)
        hidden = self.finish(carry)
        if trace is not None:
            trace.look("norm", hidden)
        batch.advance()
        return hidden

    def _traced(
        self, batch: ForwardBatch, metadata: AttentionMetadata, carry: Carry, layer: int, trace: NonFiniteTrace
    ) -> Carry:
        """One layer; what its kernels refuse says where it began: here, or in a layer before."""
        try:
            return self.run_layers(batch, metadata, carry, layer, layer + 1)
        except NumericsError as error:
            began = trace.first(0, batch.tokens) or f"layers.{layer}, {error.where}"
            parts = error.parts() | {"where": began}
            raise NumericsError(parts.pop("what"), **parts) from error

    def head(self, hidden: torch.Tensor) -> Logits:
        """The logits of hidden [n, hidden] (rows of what `forward` returns), not handed out.

        A row that is not finite is left so: it is one request's, and its sampler says so.
        """
        return self.lm_head(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden] -> float32 [n, vocabulary]; `NumericsError` where a logit is not finite."""
        return self.head(hidden).checked()
