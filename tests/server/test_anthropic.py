"""Anthropic's own client against a running server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic

from hadron.engine.request import Request
from hadron.errors import NumericsError
from hadron.server.run import Server
from tests.server.running import NAME, TOKENIZER, Scripts, idle, scripts, server, until

CALLS = (
    "I must look.</think>Looking.<tool_call>look<arg_key>what</arg_key><arg_value>a \"b\"</arg_value>"
    "<arg_key>times</arg_key><arg_value>3</arg_value></tool_call><tool_call>now</tool_call>"
)  # fmt: skip
LOOK: Any = {
    "name": "look",
    "description": "Look something up.",
    "input_schema": {
        "type": "object",
        "properties": {"what": {"type": "string"}, "times": {"type": "integer"}},
        "required": ["what"],
    },
}
NOW: Any = {"name": "now", "input_schema": {"type": "object", "properties": {}}}
GREEDY: dict[str, Any] = {"model": NAME, "max_tokens": 200, "extra_body": {"temperature": 0}}


@pytest.fixture
def client(server: Server) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def both_ways(client: Anthropic, **arguments: Any) -> Any:
    """A message at once and as a stream, which must agree."""
    whole = client.messages.create(**{**GREEDY, **arguments})
    with client.messages.stream(**{**GREEDY, **arguments}) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert events[0] == "message_start" and events[-1] == "message_stop"
    assert events.count("content_block_start") == events.count("content_block_stop") == len(whole.content)

    def values(message: Any) -> Any:
        blocks = [block.model_dump(exclude={"id", "parsed_output"}) for block in message.content]
        return blocks, message.stop_reason, message.stop_sequence

    assert values(streamed) == values(whole)
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    return whole


def test_thoughts_and_text(client: Anthropic, scripts: Scripts) -> None:
    whole = both_ways(client, messages=user(scripts.say("So.</think>Yes.")), system="Be short.")
    assert [block.type for block in whole.content] == ["thinking", "text"]
    assert (whole.content[0].thinking, whole.content[1].text) == ("So.", "Yes.")
    assert whole.stop_reason == "end_turn" and whole.model == NAME and whole.role == "assistant"
    whole = both_ways(client, messages=user(scripts.say("Yes.")), thinking={"type": "disabled"})
    assert [block.type for block in whole.content] == ["text"]


def test_how_it_ends(client: Anthropic, scripts: Scripts) -> None:
    said = user(scripts.say("So.</think>one two three"))
    assert both_ways(client, messages=said, max_tokens=3).stop_reason == "max_tokens"
    whole = both_ways(client, messages=said, stop_sequences=[" thr"])
    assert (whole.stop_reason, whole.stop_sequence, whole.content[1].text) == ("stop_sequence", " thr", "one two")


def test_a_thinking_budget(client: Anthropic) -> None:
    whole = both_ways(client, messages=user("a"), max_tokens=12, thinking={"type": "enabled", "budget_tokens": 2})
    assert [block.type for block in whole.content][-1] == "text"


def test_tools_and_their_results(client: Anthropic, scripts: Scripts) -> None:
    said = user(scripts.say(CALLS))
    whole = both_ways(client, messages=said, tools=[LOOK, NOW])
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [(block.name, block.input) for block in whole.content[2:]] == [
        ("look", {"what": 'a "b"', "times": 3}),
        ("now", {}),
    ]
    assert whole.stop_reason == "tool_use"
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "found"} for block in whole.content[2:]]
    again = [*said, {"role": "assistant", "content": whole.content}, {"role": "user", "content": results}]
    assert both_ways(client, messages=again, tools=[LOOK, NOW], max_tokens=3).usage.output_tokens == 3


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "now"}])
def test_a_call_can_be_demanded(client: Anthropic, choice: Any) -> None:
    whole = both_ways(
        client, messages=user("Look."), tools=[LOOK, NOW], tool_choice={**choice, "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 2}, max_tokens=400,
    )  # fmt: skip
    calls = [block for block in whole.content if block.type == "tool_use"]
    assert len(calls) == 1 and (choice["type"] == "any" or calls[0].name == "now")


def test_an_answer_that_was_begun_is_continued(client: Anthropic, scripts: Scripts) -> None:
    begun = [*user(scripts.say(" and on")), {"role": "assistant", "content": "On"}]
    assert both_ways(client, messages=begun).content[0].text == " and on"


def test_max_tokens_may_exceed_the_context(client: Anthropic, scripts: Scripts) -> None:
    assert both_ways(client, messages=user(scripts.say("a</think>b")), max_tokens=100_000).stop_reason == "end_turn"


def test_tokens_are_counted(client: Anthropic, scripts: Scripts) -> None:
    said = user("word " * 100)
    counted = client.messages.count_tokens(model=NAME, messages=said, tools=[LOOK]).input_tokens
    usage = client.messages.create(**{**GREEDY, "max_tokens": 1}, messages=said, tools=[LOOK]).usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted
    assert client.messages.count_tokens(model=NAME, messages=user("word " * 9000)).input_tokens > 9000


def test_streamed_words_are_the_text(client: Anthropic, scripts: Scripts) -> None:
    text = "one \U0001f600 two"
    with client.messages.stream(**GREEDY, messages=user(scripts.say(f"</think>{text}"))) as stream:
        assert "".join(stream.text_stream) == text


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"extra_body": {"temperature": -1}}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [NOW], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"tools": [{"name": "a", "input_schema": {"properties": {"p": {"type": "string", "pattern": "(?=a)"}}}}], "tool_choice": {"type": "any"}}, "tools[0].input_schema"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 7}}}}, "output_config.format.schema"),
        ({"tools": [NOW], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"messages": user("word " * 6000)}, "at most 4096"),
    ],
)  # fmt: skip
def test_errors_have_anthropics_shape_and_name_the_field(client: Anthropic, arguments: Any, part: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as raised:
        client.messages.create(**{**GREEDY, "messages": user("a"), **arguments})
    body: Any = raised.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert part in body["error"]["message"] and body["request_id"]


@pytest.mark.parametrize("seed", range(2))
def test_an_answer_by_a_json_schema(client: Anthropic, seed: int) -> None:
    schema = {
        "type": "object", "properties": {"name": {"enum": ["anna", "bob"]}, "age": {"enum": [1, 2]}},
        "required": ["name", "age"], "additionalProperties": False,
    }  # fmt: skip
    whole = both_ways(
        client, messages=user("Who?"), thinking={"type": "enabled", "budget_tokens": 2},
        output_config={"format": {"type": "json_schema", "schema": schema}},
        extra_body={"temperature": 1, "seed": seed},
    )  # fmt: skip
    assert whole.stop_reason == "end_turn"
    value = json.loads(whole.content[-1].text)
    assert value["name"] in ("anna", "bob") and value["age"] in (1, 2) and len(value) == 2


def test_effort_reaches_the_template(client: Anthropic) -> None:
    low = client.messages.create(**GREEDY | {"max_tokens": 1}, messages=user("a"), output_config={"effort": "low"})
    most = client.messages.create(**GREEDY | {"max_tokens": 1}, messages=user("a"), output_config={"effort": "max"})
    used = [each.usage.input_tokens + each.usage.cache_read_input_tokens for each in (low, most)]
    words = [len(TOKENIZER.encode(f"Reasoning Effort: {word}")) for word in ("Low", "Max")]
    assert used[0] - used[1] == words[0] - words[1] != 0


def test_a_stream_that_is_closed_ends_its_request(client: Anthropic, server: Server, scripts: Scripts) -> None:
    scripts.pause = 0.01
    try:
        arguments = {**GREEDY, "max_tokens": 1500}
        with client.messages.stream(**arguments, messages=user(scripts.say("word " * 900))) as stream:
            next(event for event in stream if event.type == "content_block_delta")
            until(lambda: server.worker.load.running == 1)
            before = server.worker.stats.generated_tokens
        until(lambda: idle(server))
        assert server.worker.stats.generated_tokens - before < 200
    finally:
        scripts.pause = 0.0


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_an_error_inside_a_stream_is_an_event(
    client: Anthropic, server: Server, scripts: Scripts, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    def broken(request: Request) -> None:
        if len(request.output_token_ids) == 3:
            raise NumericsError("not finite", where="layer 3", found="NaN", accepted="numbers", hint="check")

    monkeypatch.setattr(scripts, "broken", broken)
    said = scripts.say("one two three four five six")
    words: Any = {"messages": user(said), "max_tokens": 50} if path == "/v1/messages" else {"input": said}
    text = httpx.post(server.url + path, json={**words, "temperature": 0, "stream": True}, timeout=60).text
    events = [dict(line.split(": ", 1) for line in part.splitlines()) for part in text.strip().split("\n\n")]
    names, last = [event["event"] for event in events], json.loads(events[-1]["data"])
    if path == "/v1/responses":
        assert "response.reasoning_text.delta" in names and names[-1] == last["type"] == "response.failed"
        assert last["response"]["status"] == "failed" and "layer 3" in last["response"]["error"]["message"]
        assert [item["status"] for item in last["response"]["output"]] == ["incomplete"]
        return
    assert "content_block_delta" in names and names[-1] == last["type"] == "error" and "message_stop" not in names
    assert last["error"]["type"] == "api_error" and "layer 3" in last["error"]["message"]
    with pytest.raises(anthropic.APIError, match="layer 3"), client.messages.stream(**GREEDY, messages=user(said)) as s:
        s.get_final_message()


def test_another_model_is_not_found(client: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="x", max_tokens=1, messages=user("a"))
