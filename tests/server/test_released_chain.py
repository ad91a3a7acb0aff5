"""From `hadron serve` without MODEL to a right answer: the chain that a user of the release has.

That an install from a fresh clone brings the model along is checked by `.ci/run`, which runs the README's commands
word for word; here the server is a process of its own and the client is OpenAI's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from math import prod
from typing import Any

import openai
import pytest

from hadron.cli.generate import SHIPPED
from tests.cli.test_serve import serving

DAYS, TICKETS = 108, 8078
QUESTION = f"A shop sells {TICKETS} tickets a day. How many are sold in {DAYS} days?"
SETTINGS: dict[str, Any] = {"model": SHIPPED.name, "temperature": 0, "max_tokens": 128}


def tool(name: str, description: str, argument: str) -> dict[str, Any]:
    properties = {argument: {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [tool("calculator", "Calculates", "expression"), tool("weather", "Weather in a city", "city")]


def calculator(expression: str) -> str:
    """The tool, as far as this question needs it."""
    assert re.fullmatch(r"\d+(\s*\*\s*\d+)+", expression), expression
    return str(prod(map(int, expression.split("*"))))


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with serving(model=None) as (_, url), openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_word_problem_goes_through_a_tool_to_the_right_answer(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [SHIPPED.name]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    called = client.chat.completions.create(messages=messages, tools=TOOLS, **SETTINGS).choices[0]
    assert called.finish_reason == "tool_calls", called.message.content
    (call,) = called.message.tool_calls or ()
    assert call.function.name == "calculator"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"expression"}
    result = calculator(arguments["expression"])
    assert result == str(DAYS * TICKETS)

    messages += [called.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    answered = client.chat.completions.create(messages=messages, tools=TOOLS, **SETTINGS).choices[0]
    assert answered.finish_reason == "stop" and not answered.message.tool_calls
    assert re.findall(r"\d+", answered.message.content or "") == [result]


def test_a_word_problem_is_thought_through(client: openai.OpenAI) -> None:
    """Streamed, without tools: the thought is apart from the answer."""
    asked = "Liam has 12 apples. Then Liam buys 7 more apples. How many apples does Liam have in the end?"
    messages: list[Any] = [{"role": "user", "content": asked}]
    thought = answer = ""
    for piece in client.chat.completions.create(messages=messages, stream=True, **SETTINGS):
        thought += getattr(piece.choices[0].delta, "reasoning_content", None) or ""
        answer += piece.choices[0].delta.content or ""
    assert "12+7=19" in thought
    assert answer.strip() == "The answer is 19."


def test_an_answer_by_a_schema_comes_to_its_end(client: openai.OpenAI) -> None:
    """Greedily: white space between the tokens of JSON must have an end of its own."""
    answer = {"type": "integer", "minimum": 0, "maximum": 99}
    schema = {"type": "object", "properties": {"answer": answer}, "required": ["answer"], "additionalProperties": False}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}
    asked = "Tom has 3 apples. Then Tom buys 4 more apples. How many apples does Tom have in the end?"
    whole = client.chat.completions.create(
        messages=[{"role": "user", "content": asked}], response_format=wanted, **SETTINGS
    )
    assert whole.choices[0].finish_reason == "stop"
    assert set(json.loads(whole.choices[0].message.content or "")) == {"answer"}
