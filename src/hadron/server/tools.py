"""Tools that a request offers: their schemas for the parser, and a grammar where a call is demanded."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hadron.engine.structured import spaced
from hadron.server.errors import ApiError
from hadron.tokenizer.markup import Mark, Markup
from hadron.tokenizer.tool_calls import Parameters, admits_text, follow

Tool = Mapping[str, Any]
#: How deep alternatives of alternatives are told apart, in parameters that may be text.
_DEPTH = 4


def parameters(tools: Sequence[Tool]) -> dict[str, Parameters]:
    """The parameters of each function, by name."""
    return {tool["function"]["name"]: Parameters(tool["function"].get("parameters")) for tool in tools}


def check(tools: Sequence[Tool], markup: Markup | None) -> None:
    """`ApiError` for two functions of one name, and where the model has no markup for calls."""
    names = [tool["function"]["name"] for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ApiError(
                400, f"tools[{index}].function.name: found {name!r} a second time; accepted: names that differ",
                param=f"tools[{index}].function.name",
            )  # fmt: skip
    if tools and (markup is None or not markup.has_calls):
        raise ApiError(
            400, "tools: the tokenizer has no tokens that mark tool calls; accepted: a request without tools",
            param="tools",
        )  # fmt: skip


def grammar(tools: Sequence[Tool], markup: Markup, *, several: bool, answer: Mapping[str, Any] | None = None) -> str:
    """In llguidance's Lark: calls of these functions, as the family writes them, with their arguments.

    Arguments come in the order of their schema, required ones always. several: more than one call may come.
    answer: a JSON schema that the text may follow instead.
    """
    rules = _Rules(markup)
    calls = "call+" if several else "call"
    start = f"start: {calls}" if answer is None else f"start: {calls} | answer"
    names = " | ".join(rules.function(index, tool["function"]) for index, tool in enumerate(tools))
    lines = [start, f"call: {rules.mark(Mark.CALL)} ({names}) {rules.mark(Mark.CALL_END)}", *rules.lines]
    if answer is not None:
        lines.append(f"answer: %json {_json(spaced(answer))}")
    lines.append(r"TEXT: /(?s:.*)/ & ~/(?s:.*)<\/?(tool_call|arg_key|arg_value)>(?s:.*)/")
    return "\n".join(lines)


class _Rules:
    def __init__(self, markup: Markup) -> None:
        self._markup = markup
        self.lines: list[str] = []

    def mark(self, mark: Mark) -> str:
        """A marker as a token: spelt out, it would be text."""
        return f"<[{self._markup.ids[mark]}]>"

    def function(self, index: int, function: Mapping[str, Any]) -> str:
        """The name of a rule for a call of one function."""
        schema = function.get("parameters") or {}
        properties = schema.get("properties")
        required = schema.get("required")
        parts = [json.dumps(function["name"])]
        for number, (name, value) in enumerate(properties.items() if isinstance(properties, Mapping) else ()):
            rule = f"f{index}_a{number}"
            taken = self._value(rule, value, schema)
            key = json.dumps(str(name), ensure_ascii=False)
            opening = (self.mark(Mark.KEY), key, self.mark(Mark.KEY_END), self.mark(Mark.VALUE))
            self.lines.append(f"{rule}: {' '.join(opening)} {taken} {self.mark(Mark.VALUE_END)}")
            parts.append(rule if isinstance(required, list) and name in required else f"{rule}?")
        self.lines.append(f"f{index}: {' '.join(parts)}")
        return f"f{index}"

    def _value(self, rule: str, value: Any, root: Mapping[str, Any], depth: int = 0) -> str:
        """What stands for a value: text as it is, all else as JSON. Names that it needs begin with `rule`."""
        if depth > _DEPTH:
            return "TEXT"
        value = follow(value, root)
        if admits_text(value, root) is not True:
            return self._as_json(rule, _with_definitions(value, root))
        listed = [value["const"]] if "const" in value else value.get("enum")
        if isinstance(listed, list) and listed:
            return self._one_of(rule, listed)
        several = next((value[key] for key in ("anyOf", "oneOf") if isinstance(value.get(key), list)), None)
        if several is not None:
            taken = [self._value(f"{rule}_{number}", each, root, depth + 1) for number, each in enumerate(several)]
            return "TEXT" if "TEXT" in taken else f"({' | '.join(dict.fromkeys(taken))})"
        bounds = [value.get(key) for key in ("minLength", "maxLength")]
        least, most = (bound if isinstance(bound, int) and bound >= 0 else None for bound in bounds)
        limits = [] if least is None and most is None else [f"(?s:.{{{least or 0},{'' if most is None else most}}})"]
        if isinstance(value.get("pattern"), str):
            limits += _anywhere(value["pattern"])
        if not limits:
            return "TEXT"
        self.lines.append(f"{rule.upper()}: TEXT & {' & '.join(f'/{_escaped(limit)}/' for limit in limits)}")
        return rule.upper()

    def _one_of(self, rule: str, values: Sequence[Any]) -> str:
        taken = [json.dumps(word, ensure_ascii=False) for word in values if isinstance(word, str) and word]
        others = [each for each in values if not isinstance(each, str)]
        if others:
            taken.append(self._as_json(rule, {"enum": others}))
        if not taken:  # the empty text alone
            return "TEXT"
        return f"({' | '.join(taken)})" + ("?" if "" in values else "")

    def _as_json(self, rule: str, schema: Any) -> str:
        self.lines.append(f"{rule}_v: %json {_json(spaced(schema))}")
        return f"{rule}_v"


def _anywhere(pattern: str) -> list[str]:
    """A JSON schema's pattern, which may match anywhere, as one of a whole text; none where it cannot be said so."""
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[begins : len(pattern) - ends]
    if (begins or ends) and "|" in inner:  # an anchor may be of one alternative
        return []
    return [("" if begins else "(?s:.*)") + f"({inner})" + ("" if ends else "(?s:.*)")]


def _escaped(pattern: str) -> str:
    """A regular expression between the slashes of Lark."""
    return re.sub(r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], pattern, flags=re.DOTALL)


def _with_definitions(value: Any, root: Mapping[str, Any]) -> Any:
    """A parameter's schema with the definitions that its references name."""
    kept = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**kept, **value} if isinstance(value, Mapping) else {}


def _json(value: Any) -> str:
    return json.dumps(value)
