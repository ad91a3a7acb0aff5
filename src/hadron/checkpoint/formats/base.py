"""What a dialect answers, and the words the plan uses for its answers.

A dialect is recognised from the configuration (and confirmed by tensor names), says what it claims
for a module *by checkpoint name*, and which suffix plays which role. Facts decide; `resolve` compares
them with the claims. "Absent" is a value of its own: `None`, never the global default.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Protocol

from msgspec import Struct

from hadron.problems import Problem
from hadron.quantization.scheme import ActivationScheme, QuantizationScheme


class Source(StrEnum):
    """What decided a module's scheme and activation."""

    FACTS = "facts"
    LAYER = "layer"
    TYPE = "type"
    GLOBAL = "global"
    EXCLUDE = "exclude"
    IGNORE = "ignore"
    NONE = "none"


class DecidedBy(Struct, frozen=True, gc=False):
    """The rule that applied, and the configuration entry as it is spelt there."""

    source: Source
    entry: str | None = None


class Claim(Struct, frozen=True):
    """What the configuration says about a module.

    scheme None: unquantized. mx_mode and the like live in `activation`.
    """

    scheme: QuantizationScheme | None
    activation: ActivationScheme
    decided_by: DecidedBy


class Dialect(Protocol):
    """One way of declaring quantization."""

    name: str

    def claim(self, module: str, is_linear: bool) -> Claim | None:
        """The claim for a module of that checkpoint name; None where nothing applies to it."""

    def unmatched(self) -> list[str]:
        """Entries that matched no module asked for, as spelt in the configuration."""


class DialectFactory(Protocol):
    """A row of the table in `formats/__init__.py`."""

    def __call__(self, config: Mapping[str, Any], problems: list[Problem]) -> Dialect | None:
        """The dialect when `config` (the quantization configuration) is written in it, else None."""
