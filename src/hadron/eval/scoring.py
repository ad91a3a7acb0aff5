"""Whether what a model wrote is right, for the tasks that ship: numbers, tool calls, values in an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from hadron.tokenizer.answer import PieceSplitter, Reasoning
from hadron.tokenizer.markup import Mark, Piece
from hadron.tokenizer.tool_calls import CallArguments, CallBegin, Parameters

_NUMBER = re.compile(r"The answer is (-?[0-9]+(?:\.[0-9]+)?)")
_MARKS = re.compile("|".join(re.escape(mark) for mark in Mark))


def is_number(completion: str, wanted: str) -> bool:
    """Whether the last number after `The answer is` is `wanted`."""
    found = _NUMBER.findall(completion)
    return bool(found) and found[-1] == wanted


def is_value(completion: str, wanted: str) -> bool:
    """Whether the answer holds `wanted`, not as part of a longer word or number, and calls no tool."""
    said = re.search(rf"(?<![\w.-]){re.escape(wanted)}(?![\w-]|\.\w)", completion)
    return said is not None and Mark.CALL not in completion


def is_call(completion: str, wanted: Mapping[str, Any], tools: Mapping[str, Parameters]) -> bool:
    """Whether it is exactly one call, complete, with the name and the arguments of `wanted`, and nothing else.

    tools: the parameters of each function that was offered; they say which arguments are text.
    """
    text, calls, arguments = "", [], ""
    splitter = PieceSplitter(is_open=False, after_mark=False, tools=tools)
    for part in [*splitter.push(_pieces(completion)), *splitter.finish(complete=False)]:
        if isinstance(part, CallBegin):
            calls.append(part.name)
        elif isinstance(part, CallArguments):
            arguments += part.text
        elif not isinstance(part, Reasoning):
            text += part.text
    if calls != [wanted["name"]] or text.strip():
        return False
    try:
        return bool(json.loads(arguments) == wanted["arguments"])
    except ValueError:  # cut before its end
        return False


def _pieces(completion: str) -> list[Piece]:
    """Text and markers; here, unlike in a stream of tokens, markers are known by their text alone."""
    pieces: list[Piece] = []
    end = 0
    for found in _MARKS.finditer(completion):
        pieces += [completion[end : found.start()], Mark(found[0])]
        end = found.end()
    return [piece for piece in [*pieces, completion[end:]] if piece]
