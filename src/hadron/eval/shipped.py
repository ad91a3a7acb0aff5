"""The tasks that ship: their rows, read beside their task files without the network or a cache, and their scores.

The task files name these functions. A row has `prompt`, rendered by the chat template already, `target` (what
should be written), `answer` (what is looked at of it), `step`, `level`, and the `tools` that were offered.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from hadron.eval.scoring import is_call, is_number, is_value
from hadron.tokenizer.tool_calls import Parameters

#: All of them together.
TAG = "hadron"
_FIELDS = ("prompt", "target", "answer", "step")


def folder() -> Any:
    """Where the task files are: a folder of the package."""
    return resources.files("hadron").joinpath("assets", "tasks")


def rows(*, file: str, **_: Any) -> Any:
    """A task's data set: its rows under `test`."""
    from datasets import Dataset

    lines = [json.loads(line) for line in (folder() / file).read_text(encoding="utf-8").splitlines()]
    # what differs from row to row in its shape is kept as text
    kept = [
        {name: str(line[name]) for name in _FIELDS} | {"level": line["level"], "tools": json.dumps(line["tools"])}
        for line in lines
    ]
    return {"test": Dataset.from_list(kept)}


def word_problem(row: dict[str, Any], completions: list[str]) -> dict[str, float]:
    """1 where the number after `The answer is` is right."""
    return _exact(is_number(completions[0], row["answer"]))


def retrieval(row: dict[str, Any], completions: list[str]) -> dict[str, float]:
    """1 where the answer holds the value that was asked for."""
    return _exact(is_value(completions[0], row["answer"]))


def tool(row: dict[str, Any], completions: list[str]) -> dict[str, float]:
    """1 where the one call is right, or where the answer holds the value that a tool gave."""
    if row["step"] != "call":
        return _exact(is_value(completions[0], row["answer"]))
    offered = [tool["function"] for tool in json.loads(row["tools"]) or ()]
    tools = {function["name"]: Parameters(function.get("parameters")) for function in offered}
    return _exact(is_call(completions[0], json.loads(row["answer"]), tools))


def _exact(right: bool) -> dict[str, float]:
    return {"exact_match": float(right)}
