"""The language in which families describe what a checkpoint must hold.

A family yields `ModuleSpec`s in *checkpoint names*. Some pieces may be stored in more than one way
(experts one by one or stacked, `gate_up_proj` fused or not, vendor's or transformers' names): the
family asks which names are `Stored` and yields what is there; the vendor's own where nothing is, so
that it is reported missing; several where several are, so that the clash is reported.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from enum import StrEnum
from typing import Protocol

from msgspec import Struct


class ModuleKind(StrEnum):
    """What a module is; capabilities are declared per scheme and kind."""

    EMBEDDING = "embedding"
    LM_HEAD = "lm_head"
    NORM = "norm"
    ATTENTION = "attention"  # MLA projections
    INDEXER = "indexer"
    KDA = "kda"  # projections of linear attention
    CONV = "conv"
    ROUTER = "router"
    MLP = "mlp"
    SHARED_EXPERT = "shared_expert"
    EXPERT = "expert"
    HYPER_CONNECTION = "hyper_connection"
    MTP_PROJECTION = "mtp_projection"  # eh_proj
    PARAMETER = "parameter"  # A_log, dt_bias, correction bias, pooling gate and table
    VISION = "vision"


#: kinds whose weight is a matrix [out, in] that may be quantized
LINEAR_KINDS = frozenset(
    {
        ModuleKind.ATTENTION, ModuleKind.INDEXER, ModuleKind.KDA, ModuleKind.ROUTER, ModuleKind.MLP,
        ModuleKind.SHARED_EXPERT, ModuleKind.EXPERT, ModuleKind.MTP_PROJECTION, ModuleKind.LM_HEAD,
        ModuleKind.VISION,
    }
)  # fmt: skip


class Section(StrEnum):
    """Which part of the model a module belongs to."""

    TEXT = "text"
    MTP = "mtp"
    VISION = "vision"


class Split(StrEnum):
    """How a module's weight maps to the parameters it provides."""

    WHOLE = "whole"  # one parameter
    ROWS = "rows"  # equal row ranges, in the order of `provides`
    EXPERTS = "experts"  # leading axis is the expert, then equal row ranges


class ModuleSpec(Struct, frozen=True, gc=False):
    """One module as a checkpoint may store it.

    name: module name in the checkpoint (without `.weight`); the full tensor name when `bare`.
    shape: of the weight, unpacked: [out, in] for matrices, [experts, out, in] when stacked.
    provides: the runtime parameters it fills: names as in the vendors' checkpoints but without the
    tower's prefix (`layers.3.mlp.gate_proj`); for `EXPERTS`, patterns with `{e}` for the expert.
    bare: the tensor has no `.weight` suffix. bias: a `.bias` [shape[0]] belongs to it.
    keep_float32: see `preflight` HC307.
    """

    name: str
    kind: ModuleKind
    section: Section
    shape: tuple[int, ...]
    provides: tuple[str, ...]
    split: Split = Split.WHOLE
    bare: bool = False
    bias: bool = False
    keep_float32: bool = False


class Stored(Protocol):
    """The names a checkpoint holds; `checkpoint.facts.Facts` is one."""

    @property
    def modules(self) -> Container[str]:
        """Names of modules: tensor names without their last part."""

    @property
    def tensors(self) -> Container[str]:
        """Full tensor names."""


def stored_alternatives(stored: Stored, alternatives: Iterable[tuple[ModuleSpec, ...]]) -> Iterator[ModuleSpec]:
    """The modules of every alternative of which the first module is stored; else of the first alternative."""
    alternatives = tuple(alternatives)
    found = [specs for specs in alternatives if specs[0].name in (stored.tensors if specs[0].bare else stored.modules)]
    for specs in found or alternatives[:1]:
        yield from specs
