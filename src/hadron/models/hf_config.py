"""Typed reading of `config.json`: required, default, must-equal; every refusal collected.

A reader never raises: it notes a `Problem` and returns a stand-in, so that one run reports all.
Whoever builds a configuration asks `reader.ok` at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hadron.problems import Problem, problem

#: several times the largest published; a configuration that asks for more only costs memory
MAX_LAYERS = 512
MAX_EXPERTS = 2048


_KINDS: dict[type, str] = {
    int: "a whole number", float: "a number", bool: "true or false", str: "a text", list: "a list", dict: "an object",
}  # fmt: skip


class ConfigReader:
    """Reads one JSON object. `path` is how messages name it (`config.json: text_config`)."""

    def __init__(self, values: Mapping[str, Any], path: str, problems: list[Problem]) -> None:
        self.values = values
        self.path = path
        self.problems = problems
        self.ok = True

    def _refuse(self, code: str, key: str, *, found: str, accepted: str, hint: str) -> None:
        self.ok = False
        self.problems.append(
            problem(code, f"{self.path}: {key}", found=found, accepted=accepted, hint=hint, tensors=(key,))
        )

    def _typed(self, key: str, kind: type, minimum: float | None, maximum: float | None) -> Any:
        value = self.values[key]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value) if abs(value) < 2**1023 else float("inf")
        wrong_type = not isinstance(value, kind) or (kind is not bool and isinstance(value, bool))
        too_small = not wrong_type and minimum is not None and value < minimum
        too_large = not wrong_type and maximum is not None and value > maximum
        if wrong_type or too_small or too_large or (kind is float and abs(value) == float("inf")):
            bound = "" if minimum is None else f" of at least {minimum:g}"
            bound += "" if maximum is None else f" and at most {maximum:g}"
            self._refuse(
                "HC201", key, found=repr(value)[:80], accepted=_KINDS[kind] + bound,
                hint="compare with the config.json of the original release",
            )  # fmt: skip
            return None
        return value

    def required(self, key: str, kind: type, *, minimum: float | None = None, maximum: float | None = None) -> Any:
        """The value of `key`, or a stand-in of its type with a problem noted."""
        stand_in = {int: max(1, int(minimum or 1)), float: 1.0, bool: False, str: "", list: [], dict: {}}[kind]
        if self.values.get(key) is None:
            self._refuse(
                "HC201", key, found="nothing", accepted=_KINDS[kind],
                hint="compare with the config.json of the original release",
            )  # fmt: skip
            return stand_in
        value = self._typed(key, kind, minimum, maximum)
        return stand_in if value is None else value

    def default(self, key: str, kind: type, default: Any, *, minimum: float | None = None) -> Any:
        """The value of `key`, or `default` where it is absent or null."""
        if self.values.get(key) is None:
            return default
        value = self._typed(key, kind, minimum, None)
        return default if value is None else value

    def must_equal(self, key: str, accepted: tuple[Any, ...], why: str) -> None:
        """Refuse any value of `key` but those accepted; an absent key is accepted."""
        value = self.values.get(key)
        if value is not None and value not in accepted:
            self.unsupported(key, value, accepted, why)

    def unsupported(self, key: str, value: Any, accepted: tuple[Any, ...], why: str) -> None:
        """Note that `key` has a value that nothing here implements."""
        self._refuse("HC203", key, found=repr(value)[:80], accepted=" or ".join(repr(a) for a in accepted), hint=why)

    def invalid(self, key: str, *, found: str, accepted: str, hint: str) -> None:
        """Note that the value of `key` cannot be used."""
        self._refuse("HC201", key, found=found, accepted=accepted, hint=hint)

    def schedule(self, key: str, length: int, accepted: Mapping[str, str]) -> tuple[str, ...] | None:
        """A list of `length` words mapped through `accepted`; None where absent or refused."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < length:
            size = f"{len(value)} entries" if isinstance(value, list) else repr(value)[:80]
            self.invalid(
                key, found=size, accepted=f"a list of {length} entries, one a layer",
                hint="compare with the config.json of the original release",
            )  # fmt: skip
            return None
        odd = sorted({str(word) for word in value[:length] if not isinstance(word, str) or word not in accepted})
        if odd:
            self.unsupported(key, ", ".join(odd), tuple(accepted), "only these kinds of layer are implemented")
            return None
        return tuple(accepted[word] for word in value[:length])
