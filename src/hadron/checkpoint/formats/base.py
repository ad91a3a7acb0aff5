"""How a dialect declares quantization, reduced to one form: `Rules`.

Every dialect file parses its part of the configuration into the same rules: names that are excluded,
declarations for named layers, one for a type of module, a global one. Rules are asked *by checkpoint
name*. "Nothing applies" is a value of its own (None), never the global default. What the file holds
decides in the end (`checkpoint/resolve.py`); rules are claims.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from msgspec import Struct

from hadron.checkpoint.formats.matching import NameMatcher, is_pattern
from hadron.problems import Problem, Severity, problem
from hadron.quantization.scheme import NO_ACTIVATION, ActivationScheme, QuantizationScheme


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


class Declaration(Struct, frozen=True):
    """A scheme for weights (None: leave them alone) and one for activations.

    understood: False where the configuration says something that is not known here, and so claims nothing.
    """

    scheme: QuantizationScheme | None
    activation: ActivationScheme = NO_ACTIVATION
    understood: bool = True


class Claim(Struct, frozen=True):
    """What the configuration says about one module, and which entry says it."""

    declaration: Declaration
    decided_by: DecidedBy


UNQUANTIZED = Declaration(None)
UNKNOWN = Declaration(None, understood=False)


@dataclass
class Rules:
    """A parsed quantization configuration. Precedence: excluded, then layer, then type, then global.

    name: the dialect. exclude_source: whether its list is called exclude or ignore. layers: entry ->
    declaration, in the order of the configuration. by_type: (entry, declaration) for linear modules.
    exclude_key, layers_key: where the lists stand, for messages.
    """

    name: str
    exclude_key: str = ""
    layers_key: str = ""
    exclude: NameMatcher = field(default_factory=lambda: NameMatcher(()))
    exclude_source: Source = Source.EXCLUDE
    layers: dict[str, Declaration] = field(default_factory=dict)
    layer_names: NameMatcher = field(default_factory=lambda: NameMatcher(()))
    by_type: tuple[str, Declaration] | None = None
    default: tuple[str, Declaration] | None = None

    def __post_init__(self) -> None:
        # One Claim object an entry: comparing and caching by identity stays cheap over 60,000 modules.
        self._excluded: dict[str, Claim] = {}
        self._layer_claims = {
            entry: Claim(declaration, DecidedBy(Source.LAYER, entry)) for entry, declaration in self.layers.items()
        }
        self._linear: Claim | None = None
        for source, declared in ((Source.TYPE, self.by_type), (Source.GLOBAL, self.default)):
            if declared is not None and self._linear is None:
                self._linear = Claim(declared[1], DecidedBy(source, declared[0]))

    def claim(self, module: str, *, linear: bool) -> Claim | None:
        """What applies to the module of that checkpoint name; None where nothing does."""
        if self.exclude and (entry := self.exclude.find(module)) is not None:
            if entry not in self._excluded:
                self._excluded[entry] = Claim(UNQUANTIZED, DecidedBy(self.exclude_source, entry))
            if self.layer_names:
                self.layer_names.find(module)  # so that a shadowed entry does not count as unmatched
            return self._excluded[entry]
        if not linear:
            return None
        if self.layer_names and (entry := self.layer_names.find(module)) is not None:
            return self._layer_claims[entry]
        return self._linear

    def claim_parts(self, module: str, parts: Iterable[str], *, linear: bool) -> tuple[Claim | None, bool]:
        """The claim for a module stored fused, asked under its own name, then under its parts' names.

        The second value is False where the parts' claims differ, and then nothing is claimed.
        """
        own = self.claim(module, linear=linear)
        if own is not None and own.decided_by.source not in (Source.TYPE, Source.GLOBAL):
            return own, True
        claims = [self.claim(part, linear=linear) for part in parts]
        if not claims:
            return own, True
        declared = {claim.declaration if claim else None for claim in claims}
        return (claims[0], True) if len(declared) == 1 else (None, False)

    def check(self, names: Iterable[str]) -> list[Problem]:
        """Entries that match no module of the checkpoint, and patterns that are not valid."""
        names = tuple(names)
        problems: list[Problem] = []
        for matcher, key in ((self.exclude, self.exclude_key), (self.layer_names, self.layers_key)):
            if invalid := matcher.invalid:
                problems.append(
                    problem(
                        "HC205", f"{key}: a pattern cannot be used",
                        found="; ".join(f"{entry} ({why})" for entry, why in invalid[:3]),
                        accepted="regular expressions as in Python", hint="correct the entry",
                        tensors=tuple(entry for entry, _ in invalid),
                    )
                )  # fmt: skip
            left = matcher.unmatched(names)
            exact = tuple(entry for entry in left if not is_pattern(entry))
            patterns = tuple(entry for entry in left if is_pattern(entry))
            # A pattern is often written for several models; an exact name was meant for this one.
            for entries, severity in ((exact, None), (patterns, Severity.NOTE)):
                if entries:
                    problems.append(_unmatched(key, entries, len(matcher.entries), severity))
        return problems


def _unmatched(where: str, entries: tuple[str, ...], total: int, severity: Severity | None) -> Problem:
    return problem(
        "HC207", f"{where}: {len(entries)} of {total} entries match no module",
        found=", ".join(entries[:3]) + (", …" if len(entries) > 3 else ""),
        accepted="names of modules in this checkpoint",
        hint="harmless where the file was meant to be as it is (the file decides); "
        "a misspelt entry changes what other engines do",
        tensors=entries, severity=severity,
    )  # fmt: skip


class Dialect(Protocol):
    """A row of the table in `formats/__init__.py`: parses a configuration it recognises."""

    def __call__(self, config: Mapping[str, Any], problems: list[Problem]) -> Rules | None:
        """The rules when `config` is written in this dialect, else None."""


def unknown_keys(config: Mapping[str, Any], known: Iterable[str], section: str, problems: list[Problem]) -> None:
    """Note keys that no version of a dialect known here has."""
    if odd := sorted(set(config) - set(known)):
        problems.append(
            problem(
                "HC204", f"{section}: unknown keys", found=", ".join(odd), accepted=", ".join(sorted(known)),
                hint="they are not read; if one changes what the file means, please report it", tensors=tuple(odd),
            )
        )  # fmt: skip


def bad_value(problems: list[Problem], where: str, found: object, accepted: str) -> None:
    """Note a declaration that cannot be understood."""
    problems.append(
        problem(
            "HC205", where, found=repr(found)[:120], accepted=accepted,
            hint="compare with what the quantizer wrote; the file's own schemes are still read from its tensors",
        )
    )  # fmt: skip
