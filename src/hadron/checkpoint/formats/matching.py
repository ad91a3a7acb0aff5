"""One matcher for the name lists of every dialect, on checkpoint names only.

What each kind of entry means is the dialect's own rule:

    exact                the module, and everything below it (`mlp.experts` covers its leaves)
    * ? [ ]              a glob as in `fnmatch`; `*` crosses dots
    re:PATTERN           a regular expression, matched from the start (Quark: the whole name)
    gate_up_proj, …      a fused name covers the parts it is made of
    loose                (DeepSeek FP8) an unrooted entry matches a run of whole components anywhere

An exact entry wins over patterns; patterns are tried in the order of the configuration. Long lists of
`prefix*` and `*suffix` are looked up by length instead of being tried one by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fnmatch import translate

#: fused name -> the checkpoint leaves it stands for
FUSED_NAMES: dict[str, tuple[str, ...]] = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    "wk_weights_proj": ("wk", "weights_proj"),
    "conv1d": ("q_conv1d", "k_conv1d", "v_conv1d"),
}
_FUSED_OF: dict[str, tuple[str, ...]] = {
    part: tuple(fused for fused, parts in FUSED_NAMES.items() if part in parts)
    for parts in FUSED_NAMES.values()
    for part in parts
}
#: what an entry must contain to mean a fused name: most lists hold none, and then parts need not be asked for
_FUSED_HINTS = ("gate_up", "qkv", "wk_weights", "conv1d")
_SPECIAL = re.compile(r"[*?\[]")
_ROOTS = ("model.", "lm_head", "language_model.", "visual.", "transformer.")


def is_pattern(entry: str) -> bool:
    """Whether an entry is a glob or a regular expression rather than a name."""
    return entry.startswith("re:") or _SPECIAL.search(entry) is not None


class NameMatcher:
    """Finds the entry of a list that applies to a module name, and remembers which ever did."""

    def __init__(self, entries: Iterable[str], *, whole_regex: bool = False, loose: bool = False) -> None:
        self.entries = tuple(dict.fromkeys(entries))
        self._whole_regex = whole_regex
        self._matched: set[str] = set()
        self._exact: set[str] = set()
        self._prefixes: dict[int, dict[str, str]] = {}
        self._suffixes: dict[int, dict[str, str]] = {}
        self._patterns: list[tuple[str, Callable[[str], object]]] = []
        self._loose: list[str] = []
        self._parents: dict[str, str | None] = {}
        self._fused = any(hint in entry for entry in self.entries for hint in _FUSED_HINTS)
        self.invalid: list[tuple[str, str]] = []
        for entry in self.entries:
            self._add(entry, whole_regex, loose)

    def _add(self, entry: str, whole_regex: bool, loose: bool) -> None:
        if entry.startswith("re:"):
            try:
                pattern = re.compile(entry[3:])
            except re.error as error:
                self.invalid.append((entry, str(error)))
            else:
                self._patterns.append((entry, pattern.fullmatch if whole_regex else pattern.match))
        elif not _SPECIAL.search(entry):
            self._exact.add(entry)
            if loose and not entry.startswith(_ROOTS):
                self._loose.append(entry)
        elif entry.endswith("*") and not _SPECIAL.search(entry[:-1]):
            self._prefixes.setdefault(len(entry) - 1, {})[entry[:-1]] = entry
        elif entry.startswith("*") and not _SPECIAL.search(entry[1:]):
            self._suffixes.setdefault(len(entry) - 1, {})[entry[1:]] = entry
        else:
            self._patterns.append((entry, re.compile(translate(entry)).match))

    def __bool__(self) -> bool:
        return bool(self.entries)

    def find(self, name: str) -> str | None:
        """The entry that applies to the module `name`, or None."""
        entry = self._find(name)
        if entry is None and self._fused:
            head, _, leaf = name.rpartition(".")
            for fused in _FUSED_OF.get(leaf, ()):
                if (entry := self._find(f"{head}.{fused}" if head else fused)) is not None:
                    break
        if entry is not None:
            self._matched.add(entry)
        return entry

    def _find(self, name: str) -> str | None:
        if name in self._exact:
            return name
        for length, table in self._prefixes.items():
            if (entry := table.get(name[:length])) is not None:
                return entry
        for length, table in self._suffixes.items():
            if len(name) >= length and (entry := table.get(name[-length:] if length else "")) is not None:
                return entry
        for entry, matches in self._patterns:
            if matches(name):
                return entry
        if self._exact and (cut := name.rfind(".")) > 0:
            head = name[:cut]
            if head not in self._parents:
                self._parents[head] = self._parent(head)
            if (entry := self._parents[head]) is not None:
                return entry
        dotted = f".{name}."
        for entry in self._loose:
            if f".{entry}." in dotted:
                return entry
        return None

    def _parent(self, head: str) -> str | None:
        """The innermost exact entry among `head` and what it lies in."""
        while head not in self._exact:
            cut = head.rfind(".")
            if cut < 0:
                return None
            head = head[:cut]
        return head

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Entries that apply to none of `names`, even where another entry had precedence."""
        silent = [entry for entry in self.entries if entry not in self._matched]
        if not silent:
            return []
        names = tuple(names)
        bad = {entry for entry, _ in self.invalid}
        left = []
        for entry in silent:
            alone = NameMatcher((entry,), whole_regex=self._whole_regex, loose=entry in self._loose)
            if entry not in bad and not any(alone.find(name) for name in names):
                left.append(entry)
        return left
