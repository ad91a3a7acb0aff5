"""Architecture name -> family. One row a family; modules are named by dotted path, so that looking
one up imports nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from msgspec import Struct

from hadron.kernels.catalog import Sizes
from hadron.layers.dimensions import IndexerDimensions, LayerSchedule, MlaDimensions, MoeDimensions
from hadron.models.inventory import ModuleSpec, Stored
from hadron.problems import Problem


class FamilyConfig(Protocol):
    """What every family's configuration offers (`models/<family>/config.py`)."""

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding."""

    @property
    def layers(self) -> tuple[LayerSchedule, ...]:
        """The decoder layers, without those for multi-token prediction."""

    @property
    def mtp_layers(self) -> int:
        """Multi-token-prediction layers that the configuration declares."""

    @property
    def max_position(self) -> int:
        """Longest context the model was made for."""

    @property
    def norm_eps(self) -> float:
        """Of the norms of hidden size."""

    @property
    def eos(self) -> tuple[int, ...]:
        """Token ids that end a text."""

    @property
    def mla(self) -> MlaDimensions:
        """Sizes of latent attention."""

    @property
    def indexer(self) -> IndexerDimensions:
        """Sizes of the sparse-attention indexer."""

    @property
    def moe(self) -> MoeDimensions:
        """Sizes of router and experts."""

    @property
    def sizes(self) -> Mapping[str, Sizes]:
        """By operation, those that kernels may limit."""

    @property
    def mtp_shares_selection(self) -> bool:
        """Whether later guesses of a step attend to what the first one selected."""


class Family(Struct, frozen=True):
    """A row: the modules that hold `read(config, problems)`, `inventory(config, stored)` and the model."""

    name: str
    config: str
    model: str


class ConfigModule(Protocol):
    """What a family's `config` module defines."""

    def read(self, raw: Mapping[str, Any], problems: list[Problem]) -> FamilyConfig | None:
        """The configuration in `config.json`, or None with its problems noted."""

    def inventory(self, config: Any, stored: Stored) -> Iterator[ModuleSpec]:
        """Every module of such a checkpoint."""


_GLM_MOE_DSA = Family("glm_moe_dsa", "hadron.models.glm_moe_dsa.config", "hadron.models.glm_moe_dsa.model")
_GLM5_NEXT = Family("glm5_next", "hadron.models.glm5_next.config", "hadron.models.glm5_next.model")

FAMILIES: dict[str, Family] = {
    "GlmMoeDsaForCausalLM": _GLM_MOE_DSA,
    "Glm5NextForConditionalGeneration": _GLM5_NEXT,
    "Glm5NextForCausalLM": _GLM5_NEXT,
}
