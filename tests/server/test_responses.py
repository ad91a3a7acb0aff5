"""OpenAI's own client against `/v1/responses`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from hadron.server.run import Server
from tests.server.running import NAME, TOKENIZER, Scripts, scripts, server
from tests.server.test_anthropic import CALLS
from tests.server.test_openai import LOOK, NOW, SCHEMA

GREEDY: dict[str, Any] = {"model": NAME, "temperature": 0, "max_output_tokens": 200}
TOOLS: list[Any] = [{"type": "function", **tool["function"]} for tool in (LOOK, NOW)]


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def items(response: Any) -> Any:
    """The output without its ids."""
    return [item.model_dump(exclude={"id", "call_id", "encrypted_content", "phase"}) for item in response.output]


def both_ways(client: OpenAI, **arguments: Any) -> Any:
    """A response at once and as a stream, which must agree."""
    whole = client.responses.create(**{**GREEDY, **arguments})
    events = list(client.responses.create(**{**GREEDY, **arguments}, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last.type == f"response.{whole.status}"
    assert items(last.response) == items(whole)
    assert last.response.usage.output_tokens == whole.usage.output_tokens
    deltas: dict[str, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            deltas[event.item_id] = deltas.get(event.item_id, "") + event.delta
    texts = {
        item.id: item.arguments if item.type == "function_call" else item.content[0].text
        for item in last.response.output
    }
    assert deltas == {key: text for key, text in texts.items() if text}
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == last.response.output
    logprobs: dict[str, list[Any]] = {}
    for event in events:
        if event.type == "response.output_text.delta":
            logprobs.setdefault(event.item_id, []).extend(entry.logprob for entry in event.logprobs)
        elif event.type in ("response.output_text.done", "response.content_part.done"):
            part = event if event.type == "response.output_text.done" else event.part
            item = next(item for item in done + last.response.output if item.id == event.item_id)
            if item.type == "message":
                whole_row = [entry.logprob for entry in item.content[0].logprobs]
                assert [entry.logprob for entry in part.logprobs] == whole_row
                sent = logprobs[event.item_id]
                assert sent == whole_row[: len(sent)] and bool(sent) is bool(whole_row)
    return whole


def test_thoughts_and_text(client: OpenAI, scripts: Scripts) -> None:
    whole = both_ways(client, input=scripts.say("So.</think>Yes."), instructions="Be short.")
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    assert whole.output[0].content[0].text == "So." and whole.output_text == "Yes."
    assert whole.status == "completed" and whole.usage.output_tokens_details.reasoning_tokens > 0
    assert (
        whole.instructions == "Be short."
        and whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    )


def test_an_answer_that_is_cut_is_incomplete(client: OpenAI, scripts: Scripts) -> None:
    whole = both_ways(client, input=scripts.say("So.</think>one two three"), max_output_tokens=6)
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens"
    assert whole.output[-1].status == "incomplete"


def test_tools_and_their_results(client: OpenAI, scripts: Scripts) -> None:
    said = scripts.say(CALLS)
    whole = both_ways(client, input=said, tools=TOOLS)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    calls = whole.output[2:]
    assert [(c.name, json.loads(c.arguments)) for c in calls] == [("look", {"what": 'a "b"', "times": 3}), ("now", {})]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "found"} for call in calls]
    again = [{"role": "user", "content": said}, *[item.model_dump() for item in whole.output], *results]
    assert both_ways(client, input=again, tools=TOOLS, max_output_tokens=2).usage.output_tokens == 2


def test_a_call_can_be_demanded(client: OpenAI) -> None:
    choice = {"type": "function", "name": "now"}
    whole = both_ways(client, input="a", tools=TOOLS, tool_choice=choice, extra_body=None, reasoning={"effort": "none"})
    assert [item.name for item in whole.output if item.type == "function_call"] == ["now"]


def test_an_answer_by_a_json_schema(client: OpenAI) -> None:
    form = {"format": {"type": "json_schema", "name": "p", "schema": SCHEMA, "strict": True}}
    whole = both_ways(client, input="Who?", text=form, reasoning={"effort": "none"})
    if whole.status == "completed":
        assert set(json.loads(whole.output_text)) == {"name", "age"}
    assert whole.text.format.type == "json_schema"


def test_logprobs(client: OpenAI, scripts: Scripts) -> None:
    said = scripts.say("a</think>b")
    for asked in ({"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}):
        whole = both_ways(client, input=said, **asked)
        assert len(whole.output[1].content[0].logprobs) == whole.usage.output_tokens
    assert both_ways(client, input=said).output[1].content[0].logprobs == []
    text = scripts.say("a</think>b <tool_call>now</tool_call>")
    whole = both_ways(client, input=text, tools=TOOLS, top_logprobs=1)
    tokens = "".join(entry.token for entry in whole.output[1].content[0].logprobs)
    assert tokens.startswith("a</think>b <tool_call>now")  # what a call's end brings has no place


def test_a_call_that_is_cut_is_incomplete(client: OpenAI, scripts: Scripts) -> None:
    said = scripts.say(CALLS)
    length = len(TOKENIZER.encode(CALLS.partition(' "b')[0], add_special_tokens=False))
    whole = both_ways(client, input=said, tools=TOOLS, max_output_tokens=length)
    assert whole.status == "incomplete" and whole.output[-1].type == "function_call"
    assert [item.status for item in whole.output] == ["completed", "completed", "incomplete"]
    whole = both_ways(client, input=said, tools=TOOLS, extra_body={"stop": ['"b']})
    assert whole.output[-1].type == "function_call" and whole.output[-1].status == "incomplete"


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 5000}, "temperature"),
        ({"input": []}, "input"),
        ({"input": [{"role": "king", "content": "a"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "look", "arguments": "{"}]}, None),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"instructions": "Be.", "input": [{"role": "user", "content": "a"}, {"type": "function_call", "name": "now", "arguments": "{"}]}, "input[1].arguments"),
        ({"text": {"format": {"type": "json_schema", "name": "p", "schema": {"type": 7}}}}, "text.format.schema"),
    ],
)  # fmt: skip
def test_errors_name_the_field(client: OpenAI, arguments: Any, param: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(**{**GREEDY, "input": "a", **arguments})
    assert param is None or raised.value.param == param, raised.value
    assert param is None or param in raised.value.message
