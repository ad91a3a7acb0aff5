"""What counts as right in the tasks that ship."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hadron.eval import shipped
from hadron.eval.scoring import is_call, is_number, is_value
from hadron.tokenizer.tool_calls import Parameters

ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "note": {"type": "string"}}}
WANTED = {"name": "add", "arguments": {"a": 3, "note": "5"}}
CALL = (
    "<tool_call>add<arg_key>a</arg_key><arg_value>3</arg_value>"
    "<arg_key>note</arg_key><arg_value>5</arg_value></tool_call>"
)


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ("The answer is 12.", True),
        ("The answer is 1. No: The answer is 12", True),
        ("The answer is 12. Or: The answer is 13.", False),
        ("The answer is 120.", False),
        ("The answer is -12.", False),
        ("The answer is 12.5.", False),
        ("12", False),
        ("", False),
    ],
)
def test_numbers(completion: str, right: bool) -> None:
    assert is_number(completion, "12") is right


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ("It is in room 12.", True),
        ("12", True),
        ("Room 12, I think", True),
        ("Room 123", False),
        ("Room 12.5", False),
        ("2012-12", False),
        (CALL + "12", False),
    ],
)
def test_values(completion: str, right: bool) -> None:
    assert is_value(completion, "12") is right


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        (CALL, True),
        (f"\n{CALL}\n", True),
        (CALL.replace("add", "sub"), False),
        (CALL.replace(">3<", ">4<"), False),
        (CALL.replace(">5<", '>"5"<'), False),
        (CALL.replace("<arg_key>note</arg_key><arg_value>5</arg_value>", ""), False),
        (CALL + CALL, False),
        (f"I call it: {CALL}", False),
        (CALL.removesuffix("</tool_call>"), False),
        ("", False),
    ],
)
def test_calls(completion: str, right: bool) -> None:
    assert is_call(completion, WANTED, {"add": Parameters(ADD)}) is right


@pytest.mark.parametrize(
    ("file", "score"),
    [
        ("word_problems.jsonl", shipped.word_problem),
        ("tools.jsonl", shipped.tool),
        ("retrieval.jsonl", shipped.retrieval),
    ],
)
def test_every_row_is_right_by_its_own_target_and_not_by_anothers(file: str, score: Any) -> None:
    rows = shipped.rows(file=file, version=1.0)["test"]
    assert len(rows) == 500
    said = [row["target"].rpartition("</think>")[2] for row in rows]
    assert all(score(row, [text])["exact_match"] == 1 for row, text in zip(rows, said, strict=True))
    others = [score(row, [text])["exact_match"] for row, text in zip(rows, said[7:], strict=False)]
    assert sum(others) < 0.1 * len(others)
    assert not any(score(row, [""])["exact_match"] for row in rows)
    assert all(json.loads(row["tools"]) for row in rows if row["step"] == "call")
