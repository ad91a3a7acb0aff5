"""A plan as lines for people: at most 100 columns, and one screen for a model of any size.

Lines are plain text with a role (`Role`) that `cli.console` may colour; nothing here knows a
terminal. The machine's own figures stand on the one line that starts with `machine`. The same plan
as JSON is `preflight.json_report`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from textwrap import wrap
from typing import NamedTuple

from hadron.kernels.cpu import native
from hadron.models.inventory import ModuleKind, Section
from hadron.preflight.plan import LoadPlan, ModulePlan
from hadron.problems import CODES, Problem, Severity

WIDTH = 100
SCREEN = 45  # lines; problems are told more briefly where they would not fit
_LABEL = 11  # columns of the labels on the left
_TENSOR_ROLES = ("weight", "scale", "global_scale", "zero_point", "shape", "bias", "input_scale")


class Role(StrEnum):
    """What a line is, for whoever colours it."""

    PLAIN = "plain"
    TITLE = "title"
    HEAD = "head"
    DETAIL = "detail"
    OK = "ok"
    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Line(NamedTuple):
    """One line of a report, without its end."""

    text: str
    role: Role = Role.PLAIN


_ROLES = {Severity.ERROR: Role.ERROR, Severity.WARNING: Role.WARNING, Severity.NOTE: Role.NOTE}

#: lines a message and a hint may take: in full, and where the whole would not fit the screen
_FULL = dict.fromkeys(Severity, (6, 3))
_BRIEF = {Severity.ERROR: (4, 2), Severity.WARNING: (2, 1), Severity.NOTE: (1, 1)}


@dataclass
class Tally:
    """Modules that are used alike, counted. parameters: of unpacked weights; bytes: on disk."""

    modules: int = 0
    parameters: int = 0
    bytes: int = 0
    providers: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        """Count what `other` counted."""
        self.modules += other.modules
        self.parameters += other.parameters
        self.bytes += other.bytes
        self.providers.update(other.providers)
        self.sources.update(other.sources)


class Use(NamedTuple):
    """How a module is used, as names: what tallies are kept by."""

    section: Section
    kind: str
    scheme: str
    activation: str


def summary(plan: LoadPlan) -> Iterator[Line]:
    """The whole plan on one screen: totals, modules by kind and scheme, machine, problems, verdict."""
    uses = tally(plan)
    lines = [*_header(plan)]
    if uses:
        lines += [Line(""), *_kinds(uses), Line(""), *_schemes(uses)]
    lines += [Line(""), *_sections(plan, uses), *_attention(plan), *_memory(plan), Line("")]
    problems = [*_problems(plan.problems, _FULL)]
    if len(lines) + len(problems) >= SCREEN:
        problems = [*_problems(plan.problems, _BRIEF)]
    yield from lines
    yield from problems
    yield _verdict(plan)


def details(plan: LoadPlan, modules: Iterable[ModulePlan]) -> Iterator[Line]:
    """These modules of the plan, each with its tensors and all that was decided."""
    for module in modules:
        yield from _detail(plan, module)


def select(plan: LoadPlan, pattern: str) -> tuple[ModulePlan, ...]:
    """The modules whose checkpoint name matches the shell pattern (`*`, `?`, `[...]`), in file order."""
    return tuple(module for module in plan.modules if fnmatchcase(module.name, pattern))


def tally(plan: LoadPlan) -> dict[Use, Tally]:
    """Modules counted by how they are used."""
    # Tens of thousands of modules share a few hundred values: group by identity first, by name after.
    groups: dict[tuple[str, str, int, int, int, int], tuple[ModulePlan, Tally]] = {}
    for module in plan.modules:
        spec = module.spec
        key = (
            spec.section, spec.kind, id(module.scheme), id(module.activation), id(module.kernel),
            id(module.decided_by),
        )  # fmt: skip
        group = groups.get(key)
        if group is None:
            group = groups[key] = (module, Tally())
        counted = group[1]
        counted.modules += 1
        counted.parameters += parameters(module)
        counted.bytes += module.nbytes
    uses: dict[Use, Tally] = {}
    for module, counted in groups.values():
        counted.providers[module.kernel.provider if module.kernel else "-"] = counted.modules
        counted.sources[module.decided_by.source.value] = counted.modules
        use = Use(module.spec.section, module.kind.value, module.scheme.name, module.activation.name)
        uses.setdefault(use, Tally()).add(counted)
    return uses


def parameters(module: ModulePlan) -> int:
    """Values of the unpacked weight and of the bias, if it has one."""
    count = math.prod(module.shape)
    return count + module.shape[0] if "bias" in module.tensors else count


def count_text(value: int) -> str:
    """A count of parameters: `24`, `1.2K`, `753M`, `321B`."""
    return _scaled(value, ("", "K", "M", "B", "T"))


def bytes_text(value: int) -> str:
    """A number of bytes in decimal units: `512 B`, `4.2 MB`, `171 GB`."""
    return _scaled(value, (" B", " kB", " MB", " GB", " TB"))


def _scaled(value: int, units: Sequence[str]) -> str:
    """Three significant digits in the largest unit that leaves at least 1."""
    scaled, unit = float(value), 0
    while scaled >= 999.5 and unit < len(units) - 1:
        scaled /= 1000
        unit += 1
    if unit == 0:
        return f"{value}{units[0]}"
    digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
    return f"{scaled:.{digits}f}{units[unit]}"


def _header(plan: LoadPlan) -> Iterator[Line]:
    yield Line(plan.model, Role.TITLE)
    shards = len(plan.facts.shards)
    family = f"{plan.family} ({plan.architecture})" if plan.family else f"unknown family ({plan.architecture})"
    files = f"{shards} shard{'' if shards == 1 else 's'}"
    yield Line(f"{family}, {count_text(plan.parameters)} parameters, {bytes_text(plan.bytes)} in {files}")


def _kinds(uses: dict[Use, Tally]) -> Iterator[Line]:
    rows: dict[tuple[str, str], Tally] = {}
    order = [kind.value for kind in ModuleKind]
    for use, counted in sorted(uses.items(), key=lambda item: order.index(item[0].kind)):
        if use.section is Section.TEXT:
            rows.setdefault((use.kind, use.scheme), Tally()).add(counted)
    yield from table(
        ("module", "scheme", "modules", "parameters", "bytes", "kernels", "decided by"),
        "<<>>><<",
        [
            (kind, scheme, f"{row.modules:,}", count_text(row.parameters), bytes_text(row.bytes),
             _most(row.providers), _most(row.sources))
            for (kind, scheme), row in rows.items()
        ],
    )  # fmt: skip


def _schemes(uses: dict[Use, Tally]) -> Iterator[Line]:
    rows: dict[tuple[str, str], Tally] = {}
    for use, counted in uses.items():
        rows.setdefault((use.scheme, use.activation), Tally()).add(counted)
    yield from table(
        ("scheme", "activation", "modules", "parameters", "bytes"),
        "<<>>>",
        [
            (scheme, activation, f"{row.modules:,}", count_text(row.parameters), bytes_text(row.bytes))
            for (scheme, activation), row in sorted(rows.items(), key=lambda item: -item[1].bytes)
        ],
    )


def table(head: Sequence[str], align: str, rows: Sequence[Sequence[str]]) -> Iterator[Line]:
    """Aligned columns, two spaces apart; `align` holds `<` or `>` a column."""
    widths = [max(len(cell) for cell in column) for column in zip(head, *rows, strict=True)]
    for number, row in enumerate((head, *rows)):
        cells = (f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True))
        text = "  ".join(cells).rstrip()
        yield Line(text if len(text) <= WIDTH else text[: WIDTH - 1] + "…", Role.PLAIN if number else Role.HEAD)


def _most(counted: Counter[str]) -> str:
    """The two most common, and that there are more."""
    names = [name for name, _ in counted.most_common()]
    return ", ".join(names[:2]) + (", …" if len(names) > 2 else "")


def _labelled(label: str, text: str, *, role: Role = Role.PLAIN, lines: int | None = None) -> Iterator[Line]:
    """`text` wrapped beside `label`; cut after `lines` lines when that is given."""
    wrapped = wrap(
        text, WIDTH, initial_indent=f"{label:<{_LABEL}}", subsequent_indent=" " * _LABEL,
        break_long_words=False, break_on_hyphens=False, max_lines=lines, placeholder=" …",
    )  # fmt: skip
    for line in wrapped:
        yield Line(line, role)


def _sections(plan: LoadPlan, uses: dict[Use, Tally]) -> Iterator[Line]:
    mtp = plan.mtp
    if not mtp.present:
        words = f"not in the file: {mtp.reason}" if mtp.reason else "not in the file"
    else:
        words = f"layer {mtp.layer}, {'usable' if mtp.usable else 'not usable'}"
        words += f": {mtp.reason}" if mtp.reason else ""
        words += f" ({_extent(uses, Section.MTP)})"
    yield from _labelled("mtp", words)
    seen = f"present, not run ({_extent(uses, Section.VISION)})"
    yield from _labelled("vision", seen if plan.vision_present else "not in the file")


def _extent(uses: dict[Use, Tally], section: Section) -> str:
    total, schemes = Tally(), Counter[str]()
    for use, counted in uses.items():
        if use.section is section:
            total.add(counted)
            schemes[use.scheme] += counted.bytes
    names = ", ".join(name for name, _ in schemes.most_common())
    return (
        f"{total.modules:,} module{'' if total.modules == 1 else 's'}, {count_text(total.parameters)} parameters, "
        f"{bytes_text(total.bytes)}: {names or 'none'}"
    )


def _attention(plan: LoadPlan) -> Iterator[Line]:
    chosen = plan.attention
    path = f", prefill path {chosen.prefill_path}" if chosen.prefill_path else ""
    reasons = "; ".join(chosen.reasons)
    words = f"{chosen.backend or 'none'}{path}" + (f" ({reasons})" if reasons else "")
    yield from _labelled("attention", words, lines=4)
    refused = dict.fromkeys(why for module in plan.modules if module.kernel for why in module.kernel.refused)
    if refused:
        yield from _labelled("kernels", "; ".join(refused), lines=2)


def _memory(plan: LoadPlan) -> Iterator[Line]:
    memory = plan.memory
    converted = f" ({bytes_text(memory.converted)} of it converted at load)" if memory.converted else ""
    yield from _labelled(
        "memory",
        f"weights {bytes_text(memory.weights)}{converted}, cache {bytes_text(memory.cache_per_token)} a token "
        f"(latents {memory.cache_dtype}), "
        f"state {bytes_text(memory.state_per_sequence)} a sequence",
    )
    machine = plan.platform
    native_level = native.level_name() if native.levels() else "no native kernels"
    nodes = f" on {machine.nodes} NUMA nodes" if machine.nodes > 1 else ""
    yield from _labelled(
        "machine",
        f"{machine.device}, {machine.description}, {machine.cores} cores{nodes}, {native_level}, "
        f"{bytes_text(memory.available)} memory, "
        f"room for {memory.max_context:,} tokens a request: {memory.pages:,} pages"
        + (f", {memory.states:,} states, {memory.snapshots:,} snapshots" if memory.state_per_sequence else ""),
    )


def _problems(problems: Iterable[Problem], limits: Mapping[Severity, tuple[int, int]]) -> Iterator[Line]:
    groups: dict[tuple[Severity, str], list[Problem]] = {}
    for found in problems:
        groups.setdefault((found.severity, found.code), []).append(found)
    order = list(Severity)
    for severity, code in sorted(groups, key=lambda key: (order.index(key[0]), key[1])):
        yield from _group(severity, code, groups[severity, code], *limits[severity])


def _group(severity: Severity, code: str, group: list[Problem], message_lines: int, hint_lines: int) -> Iterator[Line]:
    role, first = _ROLES[severity], group[0]
    times = f" ({len(group):,} times)" if len(group) > 1 else ""
    yield Line(f"{severity.value:<{_LABEL}}{code} {CODES[code][1]}{times}", role)
    yield from _labelled("", first.message, lines=message_lines)
    names = dict.fromkeys(name for found in group for name in found.tensors if name not in first.message)
    if names:
        yield from _labelled("", _first_names(tuple(names)), role=Role.DETAIL)
    yield from _labelled("", f"try: {first.hint}", role=Role.DETAIL, lines=hint_lines)


def _first_names(names: tuple[str, ...]) -> str:
    """As many names as fit on a line, at most four, and how many there are beside."""
    room, shown = WIDTH - _LABEL - len("also:  and 000,000 more"), 0
    while shown < min(4, len(names)) and len(", ".join(names[: shown + 1])) <= room:
        shown += 1
    shown = max(shown, 1)
    rest = len(names) - shown
    return f"also: {', '.join(names[:shown])}" + (f" and {rest:,} more" if rest else "")


def _verdict(plan: LoadPlan) -> Line:
    counts = Counter(found.severity for found in plan.problems)
    parts = [
        f"{counts[severity]:,} {severity.value}{'' if counts[severity] == 1 else 's'}"
        for severity in Severity
        if counts[severity]
    ]
    listing = ", ".join(parts) or "no problems"
    if plan.ok:
        return Line(f"OK: this checkpoint can be loaded ({listing})", Role.OK)
    return Line(f"NOT OK: this checkpoint cannot be loaded ({listing})", Role.ERROR)


def _detail(plan: LoadPlan, module: ModulePlan) -> Iterator[Line]:
    yield Line(module.name, Role.TITLE)
    shape = "x".join(str(size) for size in module.shape) or "scalar"
    section = "" if module.spec.section is Section.TEXT else f", {module.spec.section.value} section"
    yield Line(f"  {'module':<14}{module.kind.value} {shape}{section}")
    yield Line(f"  {'scheme':<14}{module.scheme.name}, activation {module.activation.name}")
    entry = "" if module.decided_by.entry is None else f", entry {module.decided_by.entry}"
    yield Line(f"  {'decided by':<14}{module.decided_by.source.value}{entry}")
    kernel = module.kernel
    refused = f" ({'; '.join(kernel.refused)})" if kernel and kernel.refused else ""
    converts = ", converted once at load" if module.storage.converts else ""
    yield Line(f"  {'kernel':<14}{kernel.name if kernel else 'none'}{converts}{refused}")
    for role, name in sorted(module.tensors.items(), key=lambda item: _TENSOR_ROLES.index(item[0])):
        tensor = plan.facts.tensors[name]
        shard = plan.facts.shards[tensor.shard].name if tensor.shard >= 0 else "unknown shard"
        stored = "x".join(str(size) for size in tensor.shape) or "scalar"
        yield Line(f"  {role:<14}{name}  {tensor.dtype} {stored}, {shard}", Role.DETAIL)
