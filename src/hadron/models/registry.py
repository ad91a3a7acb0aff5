"""Architecture name -> family. One row a family; modules are named by dotted path, so that looking
one up imports nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from msgspec import Struct

from hadron.layers.dimensions import LayerSchedule
from hadron.models.inventory import ModuleSpec, Stored
from hadron.problems import Problem


class FamilyConfig(Protocol):
    """What every family's configuration offers (`models/<family>/config.py`)."""

    @property
    def hidden(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def layers(self) -> tuple[LayerSchedule, ...]: ...
    @property
    def mtp_layers(self) -> int: ...
    @property
    def max_position(self) -> int: ...
    @property
    def eos(self) -> tuple[int, ...]: ...


class Family(Struct, frozen=True):
    """A row: the modules that hold `read(config, problems)`, `inventory(config, stored)` and the model."""

    name: str
    config: str
    model: str


class ConfigModule(Protocol):
    """What a family's `config` module defines."""

    def read(self, raw: Mapping[str, Any], problems: list[Problem]) -> FamilyConfig | None: ...
    def inventory(self, config: Any, stored: Stored) -> Iterator[ModuleSpec]: ...


_GLM_MOE_DSA = Family("glm_moe_dsa", "hadron.models.glm_moe_dsa.config", "hadron.models.glm_moe_dsa.model")
_GLM5_NEXT = Family("glm5_next", "hadron.models.glm5_next.config", "hadron.models.glm5_next.model")

FAMILIES: dict[str, Family] = {
    "GlmMoeDsaForCausalLM": _GLM_MOE_DSA,
    "Glm5NextForConditionalGeneration": _GLM5_NEXT,
    "Glm5NextForCausalLM": _GLM5_NEXT,
}
