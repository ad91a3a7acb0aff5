"""The grammar of demanded calls: which texts it lets a model write."""

from __future__ import annotations

from typing import Any

import pytest

from hadron.engine.structured import Grammars
from hadron.sampling_params import StructuredOutputsParams
from hadron.server.tools import grammar
from hadron.tokenizer.markup import Markup
from hadron.tokenizer.tokenizer import Tokenizer
from tests.conftest import RANDOM
from tests.engine.masks import allowed

TOKENIZER = Tokenizer.load(RANDOM)
GRAMMARS = Grammars(TOKENIZER, 512, {480})
LOOK = {
    "name": "look",
    "parameters": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "kind": {"enum": ["near", "far"]},
            "count": {"$ref": "#/$defs/small"},
            "any": {},
            "mode": {"const": "fast"},
            "mixed": {"enum": ["a", 1, None]},
            "colour": {"anyOf": [{"$ref": "#/$defs/colour"}, {"type": "null"}]},
            "code": {"type": "string", "pattern": "^[a-c]/\\d+$", "maxLength": 4},
            "part": {"type": "string", "pattern": "x|y"},
            "loop": {"$ref": "#/$defs/loop"},
            "none": {"enum": [""]},
            "maybe": {"enum": ["", "a"]},
        },
        "required": ["text"],
        "$defs": {
            "small": {"type": "integer", "minimum": 1, "maximum": 9},
            "colour": {"type": "string", "enum": ["red", "blue"]},
            "loop": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/loop"}]},
        },
    },
}


def written(text: str, *, several: bool = True, answer: Any = None) -> tuple[bool, bool]:
    """Whether the text may be written, and whether it may end there."""
    tools = [{"type": "function", "function": function} for function in (LOOK, {"name": "now"})]
    source = grammar(tools, Markup(TOKENIZER), several=several, answer=answer)
    matcher = GRAMMARS.matcher(StructuredOutputsParams(grammar=source))
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        if matcher.finished or not allowed(matcher)[token]:
            return False, False
        matcher.accept(token)
    return True, matcher.finished or bool(allowed(matcher)[480])


def call(name: str, **values: str) -> str:
    arguments = "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in values.items())
    return f"<tool_call>{name}{arguments}</tool_call>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (call("now"), (True, True)),
        (call("look", text="a <b> \n{}"), (True, True)),
        (call("look", text="", kind="far", count="7", any="[1, {}]"), (True, True)),
        (call("now") + call("look", text="x"), (True, True)),
        (call("look", text="x")[:-12], (True, False)),
        (call("look"), (False, False)),
        (call("look", kind="far"), (False, False)),
        (call("look", text="x", kind="middle"), (False, False)),
        (call("look", text="x", count="12"), (False, False)),
        (call("look", text="x", count='"7"'), (False, False)),
        (call("look", count="7", text="x"), (False, False)),
        (call("other"), (False, False)),
        (call("look", text="x", mode="fast", mixed="null", colour="red", code="b/12"), (True, True)),
        (call("look", text="x", mixed="a", colour="null", part="axb", loop="any"), (True, True)),
        (call("look", text="x", none="", maybe=""), (True, True)),
        (call("look", text="x", maybe="b"), (False, False)),
        (call("look", text="x", mode="slow"), (False, False)),
        (call("look", text="x", mixed="2"), (False, False)),
        (call("look", text="x", colour="green"), (False, False)),
        (call("look", text="x", code="b/"), (False, False)),
        (call("look", text="x", code="b/123"), (False, False)),
        (call("look", text="x", part="ab"), (False, False)),
        ("Let me look.", (False, False)),
        (call("now") + "and", (False, False)),
    ],
)
def test_what_may_be_written(text: str, expected: Any) -> None:
    assert written(text) == expected


def test_one_call_or_several() -> None:
    assert written(call("now"), several=False) == (True, True)
    assert written(call("now") * 2, several=False) == (False, False)


def test_an_answer_by_a_schema_instead() -> None:
    answer = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert written('{"a": 1}', answer=answer) == (True, True)
    assert written('{"b"', answer=answer) == (False, False)
    assert written(call("now"), answer=answer) == (True, True)
