"""`LoadPlan`: for every module the bytes it comes from, its scheme, its kernel, and every problem.

`hadron check` prints this object and the engine executes it; there is no second opinion. Built by
`preflight.build.make_plan`. No tensor library is imported here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from hadron.checkpoint.formats.base import DecidedBy
from hadron.kernels.select import KernelChoice
from hadron.models.inventory import ModuleKind, ModuleSpec, Section, Split
from hadron.problems import Problem, Severity
from hadron.quantization.scheme import ActivationScheme, QuantizationScheme, Storage

if TYPE_CHECKING:
    from hadron.checkpoint.facts import Facts
    from hadron.models.registry import FamilyConfig
    from hadron.platforms.base import Platform


class ModulePlan(Struct, frozen=True, gc=False):
    """How one module of the checkpoint is used.

    tensors: role -> tensor name, with the roles `weight`, `bias`, `scale`, `global_scale`,
    `zero_point`, `shape`, `input_scale` (a second global scale of the input counts as that too).
    kernel is None for what is claimed but not run (vision, an MTP layer that drafts nothing) or where none was
    found. nbytes: of its tensors, in the file.
    """

    spec: ModuleSpec
    scheme: QuantizationScheme
    activation: ActivationScheme
    storage: Storage
    tensors: dict[str, str]
    decided_by: DecidedBy
    kernel: KernelChoice | None
    nbytes: int

    @property
    def name(self) -> str:
        """The module's name in the checkpoint; the full tensor name for a bare parameter."""
        return self.spec.name

    @property
    def kind(self) -> ModuleKind:
        """What the module is."""
        return self.spec.kind

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the unpacked weight."""
        return self.spec.shape


class Binding(Struct, frozen=True, gc=False):
    """Where a runtime parameter lies: a module, and the part of its weight.

    expert: index on the leading axis of a stacked bank, or None. part, parts: which of `parts` equal
    row ranges (0 of 1 is the whole).
    """

    module: ModulePlan
    expert: int | None
    part: int
    parts: int


class MtpPlan(Struct, frozen=True):
    """The multi-token-prediction layer: whether its tensors are there, and usable; drafts: how many tokens it is to
    guess in a step, 0 where it is not to be loaded."""

    present: bool
    layer: int | None
    usable: bool
    reason: str
    drafts: int = 0


class AttentionPlan(Struct, frozen=True):
    """The chosen backend and prefill path, with why (and why not the others)."""

    backend: str | None
    prefill_path: str | None
    reasons: tuple[str, ...]


class MemoryPlan(Struct, frozen=True):
    """Bytes at run time. weights are mapped, not copied, but for `converted` of them. cache_dtype: what latents
    are kept in, `float32`, `bfloat16` or `fp8_e4m3`.

    max_context: most tokens of one request. pages: of `cache.spec.PAGE_SIZE` tokens, shared by all requests. states:
    of requests that run; snapshots: states kept for later ones.
    """

    weights: int
    converted: int
    cache_per_token: int
    state_per_sequence: int
    max_context: int
    pages: int
    states: int
    snapshots: int
    available: int
    cache_dtype: str


@dataclass(frozen=True)
class LoadPlan:
    """Everything known about a checkpoint before a byte of its data is read.

    model: as the user wrote it. root: local folder, or None when only headers were fetched.
    config: the family's configuration; None when it could not be read (then there is an error).
    providers: operation -> whose kernels run it, as far as one can. emulates: inputs of products are quantized as
    the checkpoint declares.
    parameters counts unpacked weights; bytes is the size of all tensors on disk.
    """

    model: str
    root: Path | None
    family: str | None
    architecture: str | None
    config: FamilyConfig | None
    facts: Facts
    modules: tuple[ModulePlan, ...]
    problems: tuple[Problem, ...]
    parameters: int
    bytes: int
    mtp: MtpPlan
    vision_present: bool
    attention: AttentionPlan
    memory: MemoryPlan
    platform: Platform
    providers: Mapping[str, str]
    emulates: bool

    @property
    def errors(self) -> tuple[Problem, ...]:
        """Problems that refuse a load."""
        return tuple(p for p in self.problems if p.severity is Severity.ERROR)

    @property
    def ok(self) -> bool:
        """Whether the engine may execute this plan."""
        return not any(p.severity is Severity.ERROR for p in self.problems)

    def module(self, name: str) -> ModulePlan:
        """The module of that checkpoint name; `KeyError` when there is none."""
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, ModulePlan]:
        return {module.name: module for module in self.modules}

    def runs(self, module: ModulePlan) -> bool:
        """Whether the engine loads that module: the text tower's, and those of the layer that drafts."""
        return runs(module.spec, self.mtp.layer if self.mtp.drafts else None)

    @cached_property
    def bindings(self) -> dict[str, Binding]:
        """Runtime parameter name (no tower prefix) -> where it lies; text and MTP sections."""
        return dict(_bind(self.modules))


def runs(spec: ModuleSpec, drafting_layer: int | None) -> bool:
    """Whether a module is of the text tower, or of that multi-token-prediction layer."""
    if spec.section is not Section.MTP:
        return spec.section is Section.TEXT
    return drafting_layer is not None and all(name.startswith(f"layers.{drafting_layer}.") for name in spec.provides)


def _bind(modules: tuple[ModulePlan, ...]) -> Iterator[tuple[str, Binding]]:
    for module in modules:
        spec = module.spec
        if spec.section is Section.VISION:
            continue
        parts = len(spec.provides)
        experts = range(spec.shape[0]) if spec.split is Split.EXPERTS else (None,)
        for expert in experts:
            for part, name in enumerate(spec.provides):
                yield name.replace("{e}", str(expert)), Binding(module, expert, part, parts)
