"""The held-out sets' score: near misses are misses."""

from __future__ import annotations

import json

from recipes.tiny.data.score import score


def test_values_are_matched_whole() -> None:
    row = {"kind": "retrieval", "step": "answer", "target": "</think>13.", "answer": "13"}
    assert score(row, "</think>Bolar is 13 years old.<|user|>")
    assert score(row, "</think>13.")
    for wrong in (
        "</think>130.",
        "</think>413.",
        "</think>1.13",
        "</think>13.5",
        "</think>It is a-13",
        "13.",
        "13</think>14",
    ):
        assert not score(row, wrong), wrong
    wanted = {"name": "f", "arguments": {"a": 1.5, "b": "x"}}
    row = {"kind": "tool", "step": "call", "target": "</think>", "answer": json.dumps(wanted)}
    text = "<tool_call>f<arg_key>a</arg_key><arg_value>1.5</arg_value><arg_key>b</arg_key><arg_value>x</arg_value></tool_call>"
    assert score(row, f"</think>{text}<|observation|>")
    for wrong in (
        text.replace("1.5", "1.50"),
        text.replace("f<", "g<"),
        text + text,
        "Well " + text,
        text[:-3],
        text.replace(">b<", ">c<"),
    ):
        assert not score(row, "</think>" + wrong), wrong
