"""Tools that a request offers: their schemas for the parser, and a grammar where a call is demanded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hadron.server.errors import ApiError
from hadron.tokenizer.markup import Mark, Markup
from hadron.tokenizer.tool_calls import Parameters, admits_text

Tool = Mapping[str, Any]


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
        lines.append(f"answer: %json {_json(answer)}")
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
            taken = "TEXT"
            words = value.get("enum") if isinstance(value, Mapping) else None
            if isinstance(words, list) and words and all(isinstance(word, str) and word for word in words):
                taken = "(" + " | ".join(json.dumps(word, ensure_ascii=False) for word in words) + ")"
            elif admits_text(value, schema) is not True:
                taken = f"{rule}_v"
                self.lines.append(f"{taken}: %json {_json(_with_definitions(value, schema))}")
            key = json.dumps(str(name), ensure_ascii=False)
            opening = (self.mark(Mark.KEY), key, self.mark(Mark.KEY_END), self.mark(Mark.VALUE))
            self.lines.append(f"{rule}: {' '.join(opening)} {taken} {self.mark(Mark.VALUE_END)}")
            parts.append(rule if isinstance(required, list) and name in required else f"{rule}?")
        self.lines.append(f"f{index}: {' '.join(parts)}")
        return f"f{index}"


def _with_definitions(value: Any, root: Mapping[str, Any]) -> Any:
    """A parameter's schema with the definitions that its references name."""
    kept = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**kept, **value} if isinstance(value, Mapping) else {}


def _json(value: Any) -> str:
    return json.dumps(value)
