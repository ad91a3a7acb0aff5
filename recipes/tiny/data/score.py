"""Whether a completion is right, for the held-out rows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from .markup import STOP_TOKENS

_NUMBER = re.compile(r"The answer is (-?[0-9]+)")
_CALL = re.compile(r"<tool_call>([^<]*)((?:<arg_key>[^<]*</arg_key><arg_value>.*?</arg_value>)*)</tool_call>", re.S)
_ARGUMENT = re.compile(r"<arg_key>([^<]*)</arg_key><arg_value>(.*?)</arg_value>", re.S)


def spoken(completion: str) -> str:
    """The answer without thoughts and without the token that ended it; all of it where nothing closes a thought."""
    for token in STOP_TOKENS:
        completion = completion.split(token)[0]
    return completion.rpartition("</think>")[2] if "</think>" in completion else completion


def is_call(text: str, wanted: Mapping[str, Any]) -> bool:
    """Whether a text is exactly one well-formed call, with this name and these arguments."""
    found = _CALL.fullmatch(text.strip())
    if found is None or found[1] != wanted["name"]:
        return False
    given = _ARGUMENT.findall(found[2])
    shown = {key: value if isinstance(value, str) else json.dumps(value) for key, value in wanted["arguments"].items()}
    return len(given) == len(shown) and dict(given) == shown


def score(row: Mapping[str, Any], completion: str) -> bool:
    """The number after `The answer is`; the call, name and arguments; the value, as words of the answer.

    row: a line of a held-out file; completion: all that the model wrote after `row["prompt"]`, `</think>` included
    (a thought that is left open is no answer), and special tokens included or not.
    """
    if "</think>" in row["target"] and "</think>" not in completion:
        return False
    text = spoken(completion)
    if row["kind"] == "problem":
        numbers = _NUMBER.findall(text)
        return bool(numbers) and numbers[-1] == row["answer"]
    if row["step"] == "call":
        return is_call(text, json.loads(row["answer"]))
    if row["kind"] == "talk":
        return text.strip() == row["answer"]
    value = re.escape(row["answer"])
    return "<tool_call>" not in text and re.search(rf"(?<![\w.-]){value}(?![\w-]|\.\w)", text) is not None
