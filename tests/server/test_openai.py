"""OpenAI's own client against a running server."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from hadron import LLM, SamplingParams
from hadron.server.run import Server
from hadron.tokenizer.chat_template import ChatTemplate
from tests.conftest import RANDOM
from tests.server.running import GREEDY, LOOK, NAME, NOW, TOKENIZER, Scripts, client, idle, scripts, server, until, user

CALLS = (
    "I must look.</think>Looking.<tool_call>look<arg_key>what</arg_key><arg_value>a \"b\"\n{}</arg_value>"
    "<arg_key>times</arg_key><arg_value>3</arg_value></tool_call><tool_call>now</tool_call>"
)  # fmt: skip


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(RANDOM, threads=1)


def gathered(stream: Any) -> dict[str, Any]:
    """What a client puts together from the pieces of one answer."""
    out: dict[str, Any] = {"reasoning": "", "content": "", "calls": [], "finish": None, "usage": None, "tokens": []}
    for chunk in stream:
        out["usage"] = chunk.usage or out["usage"]
        for choice in chunk.choices:
            out["content"] += choice.delta.content or ""
            out["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                if call.index == len(out["calls"]):
                    assert call.id and call.type == "function"
                    out["calls"].append([call.function.name, ""])
                out["calls"][call.index][1] += call.function.arguments
            out["tokens"] += [entry.token for entry in (choice.logprobs.content if choice.logprobs else None) or ()]
            if choice.finish_reason:
                assert out["finish"] is None
                out["finish"] = choice.finish_reason
    return out


def both_ways(client: OpenAI, **arguments: Any) -> Any:
    """A request at once and as a stream, which must agree; the whole answer."""
    whole = client.chat.completions.create(**{**GREEDY, **arguments})
    streamed = gathered(
        client.chat.completions.create(
            **{**GREEDY, **arguments}, stream=True, stream_options={"include_usage": True}
        )
    )  # fmt: skip
    (choice,) = whole.choices
    calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or ()]
    assert streamed["content"] == (choice.message.content or "")
    assert streamed["reasoning"] == getattr(choice.message, "reasoning_content", "")
    assert streamed["calls"] == calls
    assert streamed["finish"] == choice.finish_reason
    assert streamed["usage"].completion_tokens == whole.usage.completion_tokens
    assert streamed["usage"].completion_tokens_details == whole.usage.completion_tokens_details
    if choice.logprobs:
        assert streamed["tokens"] == [entry.token for entry in choice.logprobs.content]
    return whole


def test_chat_is_what_the_python_interface_says(client: OpenAI, llm: LLM) -> None:
    whole = both_ways(client, messages=user("The river"), max_tokens=12)
    (expected,) = llm.chat(user("The river"), SamplingParams(max_tokens=12, temperature=0))
    message = whole.choices[0].message
    assert message.reasoning_content == expected.outputs[0].text.strip() and message.content == ""
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert whole.usage.completion_tokens_details.reasoning_tokens == 12
    assert whole.model == NAME and whole.id.startswith("chatcmpl-")


def test_models_are_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME, "other"]
    assert client.models.retrieve("other").max_model_len == 4096


def test_a_thought_and_an_answer(client: OpenAI, scripts: Scripts) -> None:
    whole = both_ways(client, messages=user(scripts.say("So.\n</think>\n\nYes: é\U0001f600.")), max_tokens=100)
    message = whole.choices[0].message
    assert (message.reasoning_content, message.content) == ("So.", "Yes: é\U0001f600.")
    assert whole.choices[0].finish_reason == "stop"
    length = len(TOKENIZER.encode("So.\n", add_special_tokens=False))
    assert whole.usage.completion_tokens_details.reasoning_tokens == length


def test_br67_a_thought_that_never_closes(client: OpenAI, scripts: Scripts) -> None:
    message = both_ways(client, messages=user(scripts.say("42")), max_tokens=100).choices[0].message
    assert (message.reasoning_content, message.content) == ("42", "42")
    message = both_ways(client, messages=user(scripts.say("42" * 20)), max_tokens=3).choices[0].message
    assert message.reasoning_content and message.content == ""


def test_br66_switches_are_for_the_template_and_the_prompt_decides(client: OpenAI, scripts: Scripts) -> None:
    said = user(scripts.say("Yes."))
    whole = both_ways(client, messages=said, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert whole.choices[0].message.content == "Yes." and not hasattr(whole.choices[0].message, "reasoning_content")
    whole = both_ways(client, messages=said, reasoning_effort="none")
    assert whole.choices[0].message.content == "Yes."


def test_br66_a_switch_that_the_template_ignores_switches_nothing(
    client: OpenAI, server: Server, scripts: Scripts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GLM-5.3's template always opens a thought."""
    source = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|assistant|><think>"
    always = replace(server.service.model, template=ChatTemplate(source, where="5.3"))
    monkeypatch.setattr(server.service, "_model", always)
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    whole = both_ways(client, messages=user(scripts.say("abc</think>answer")), extra_body=off)
    message = whole.choices[0].message
    assert (message.reasoning_content, message.content) == ("abc", "answer")
    said = user(scripts.say("abc</think>yes"))
    whole = both_ways(client, messages=said, extra_body={**off, "structured_outputs": {"choice": ["yes"]}})
    assert whole.choices[0].message.content == "yes"  # and the grammar begins after the thought


def test_reasoning_effort_reaches_the_template(client: OpenAI, server: Server) -> None:
    low = client.chat.completions.create(**GREEDY, messages=user("a"), max_tokens=1, reasoning_effort="low")
    most = client.chat.completions.create(**GREEDY, messages=user("a"), max_tokens=1)
    words = [len(TOKENIZER.encode(f"Reasoning Effort: {word}")) for word in ("Low", "Max")]
    assert low.usage.prompt_tokens - most.usage.prompt_tokens == words[0] - words[1] != 0


def test_a_thinking_budget_closes_the_thought(client: OpenAI) -> None:
    whole = both_ways(client, messages=user("The river"), max_tokens=20, extra_body={"thinking_budget": 4})
    assert whole.usage.completion_tokens_details.reasoning_tokens == 4
    assert whole.choices[0].message.content


def test_calls_of_tools(client: OpenAI, scripts: Scripts) -> None:
    whole = both_ways(client, messages=user(scripts.say(CALLS)), tools=[LOOK, NOW], max_tokens=200)
    message = whole.choices[0].message
    assert (message.reasoning_content, message.content) == ("I must look.", "Looking.")
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
    assert calls == [("look", {"what": 'a "b"\n{}', "times": 3}), ("now", {})]
    assert len({call.id for call in message.tool_calls}) == 2
    assert whole.choices[0].finish_reason == "tool_calls"


def test_a_call_that_is_cut_ends_by_length(client: OpenAI, scripts: Scripts) -> None:
    text = CALLS.partition("\n")[0]
    length = len(TOKENIZER.encode(text, add_special_tokens=False))
    whole = both_ways(client, messages=user(scripts.say(CALLS)), tools=[LOOK], max_tokens=length)
    assert whole.choices[0].finish_reason == "length"
    (call,) = whole.choices[0].message.tool_calls
    assert call.function.arguments == '{"what": "a \\"b\\"'


def test_a_call_that_a_stop_string_cuts_is_no_call_to_make(client: OpenAI, scripts: Scripts) -> None:
    said = user(scripts.say(CALLS))
    whole = both_ways(client, messages=said, tools=[LOOK, NOW], stop=["{}"], max_tokens=200)
    assert whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].message.tool_calls[0].function.arguments == '{"what": "a \\"b\\"\\n'


def test_without_tools_or_with_none_no_calls_are_read(client: OpenAI, scripts: Scripts) -> None:
    said = user(scripts.say(CALLS))
    for more in ({}, {"tools": [LOOK], "tool_choice": "none"}):
        message = both_ways(client, messages=said, max_tokens=200, **more).choices[0].message
        assert message.tool_calls is None and message.content == CALLS.partition("</think>")[2]


def test_one_call_where_several_are_not_wanted(client: OpenAI, scripts: Scripts) -> None:
    said = user(scripts.say(CALLS))
    whole = both_ways(client, messages=said, tools=[LOOK, NOW], parallel_tool_calls=False, max_tokens=200)
    (call,) = whole.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["times"] == 3
    assert whole.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
@pytest.mark.parametrize("seed", range(3))
def test_a_call_can_be_demanded(client: OpenAI, choice: Any, seed: int) -> None:
    """Of a model with random weights, which would never call anything by itself."""
    whole = both_ways(
        client, messages=user("Look."), tools=[LOOK, NOW], tool_choice=choice, max_tokens=400, temperature=1, seed=seed,
        extra_body={"thinking_budget": 3},
    )  # fmt: skip
    calls = whole.choices[0].message.tool_calls
    assert calls and all(call.function.name in ("look", "now") for call in calls)
    assert choice == "required" or {call.function.name for call in calls} == {"look"}
    if whole.choices[0].finish_reason != "length":
        assert whole.choices[0].finish_reason == "tool_calls"
        for call in calls:
            arguments = json.loads(call.function.arguments)
            assert call.function.name == "now" or isinstance(arguments["what"], str)


def test_results_of_tools_go_back_to_the_model(client: OpenAI) -> None:
    messages = [
        *user("Look."),
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"what": "x"}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "found"},
    ]  # fmt: skip
    assert both_ways(client, messages=messages, tools=[LOOK], max_tokens=2).usage.completion_tokens == 2


@pytest.mark.parametrize(("arguments", "part"), [("{", "tool_calls[0].function.arguments"), ("[1]", "a JSON object")])
def test_br68_arguments_that_are_no_object_are_refused_by_place(client: OpenAI, arguments: str, part: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    messages = [*user("a"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(openai.BadRequestError, match="messages") as raised:
        client.chat.completions.create(**GREEDY, messages=messages)
    assert part in raised.value.message and raised.value.param.startswith("messages[1].tool_calls[0]")


def test_br68_arguments_are_given_to_the_template_as_an_object(client: OpenAI, server: Server) -> None:
    """As text, empty or not, and as the object that it spells: one prompt."""

    def prompt(*arguments: Any) -> set[str]:
        texts = set()
        for value in arguments:
            call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": value}}
            talk = [*user("a"), {"role": "assistant", "content": "", "tool_calls": [call]}]
            answer = httpx.post(f"{server.url}/tokenize", json={"messages": talk, "add_generation_prompt": False})
            texts.add(TOKENIZER.decode(answer.json()["tokens"], skip_special_tokens=False).rpartition("</think>")[2])
        return texts

    assert prompt("{}", "", {}, " {} ") == {"<tool_call>look</tool_call>"}
    look = "<tool_call>look<arg_key>what</arg_key><arg_value>x</arg_value></tool_call>"
    assert prompt('{"what": "x"}', {"what": "x"}) == {look}


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["anna", "bob"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_by_a_json_schema(client: OpenAI, seed: int) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    whole = both_ways(
        client, messages=user("Who?"), response_format=wanted, max_tokens=200, temperature=1, seed=seed,
        extra_body={"thinking_budget": 2},
    )  # fmt: skip
    assert whole.choices[0].finish_reason == "stop"
    value = json.loads(whole.choices[0].message.content)
    assert value["name"] in ("anna", "bob") and 1 <= value["age"] <= 99


def test_any_json_object_and_structures_of_ones_own(client: OpenAI) -> None:
    whole = both_ways(
        client, messages=user("Who?"), response_format={"type": "json_object"}, max_tokens=8,
        extra_body={"thinking_budget": 0},
    )  # fmt: skip
    assert whole.choices[0].message.content.startswith("{")
    whole = both_ways(
        client, messages=user("Who?"), max_tokens=30,
        extra_body={"thinking_budget": 0, "structured_outputs": {"choice": ["yes", "no"]}},
    )  # fmt: skip
    assert whole.choices[0].message.content in ("yes", "no") and whole.choices[0].finish_reason == "stop"


def test_a_schema_beside_tools_leaves_the_choice(client: OpenAI) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}
    for seed in range(3):
        whole = both_ways(
            client, messages=user("Who?"), tools=[NOW], response_format=wanted, max_tokens=200, seed=seed,
            temperature=1, extra_body={"thinking_budget": 0},
        )  # fmt: skip
        message = whole.choices[0].message
        assert message.tool_calls or message.content.startswith("{")


def test_logprobs_of_every_token(client: OpenAI, llm: LLM) -> None:
    whole = both_ways(client, messages=user("The river"), max_tokens=6, logprobs=True, top_logprobs=2)
    (expected,) = llm.chat(user("The river"), SamplingParams(max_tokens=6, temperature=0, logprobs=2))
    content = whole.choices[0].logprobs.content
    for entry, token, row in zip(content, expected.outputs[0].token_ids, expected.outputs[0].logprobs, strict=True):
        assert entry.logprob == row[token].logprob and bytes(entry.bytes) == TOKENIZER.token_bytes(token)
        assert [top.logprob for top in entry.top_logprobs] == [each.logprob for each in list(row.values())[:2]]
    assert both_ways(client, messages=user("a"), max_tokens=2, logprobs=True).choices[0].logprobs.content[0]


def test_several_answers(client: OpenAI) -> None:
    arguments: Any = {"messages": user("The river"), "max_tokens": 5, "n": 3, "temperature": 1.0, "seed": 5}
    whole = client.chat.completions.create(model=NAME, **arguments)
    texts = [choice.message.reasoning_content for choice in whole.choices]
    assert len(set(texts)) == 3 and [choice.index for choice in whole.choices] == [0, 1, 2]
    assert whole.usage.completion_tokens == 15
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(model=NAME, **arguments, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += getattr(choice.delta, "reasoning_content", None) or ""
    assert streamed == texts


def test_stop_strings_end_an_answer_and_are_no_part_of_it(client: OpenAI, scripts: Scripts) -> None:
    said = user(scripts.say("So.</think>one two three"))
    whole = both_ways(client, messages=said, stop=[" thr"])
    assert whole.choices[0].message.content == "one two" and whole.choices[0].finish_reason == "stop"
    message = both_ways(client, messages=said, stop="</th").choices[0].message
    assert (message.reasoning_content, message.content) == ("So.", "")


def test_an_answer_that_was_begun_is_continued(client: OpenAI, scripts: Scripts) -> None:
    begun = [*user(scripts.say(" and on")), {"role": "assistant", "content": "On"}]
    whole = both_ways(client, messages=begun, extra_body={"continue_final_message": True})
    assert whole.choices[0].message.content == " and on"
    thought = [*user(scripts.say(" so</think>Yes")), {"role": "assistant", "content": "", "reasoning_content": "If"}]
    message = both_ways(client, messages=thought, extra_body={"continue_final_message": True}).choices[0].message
    assert (message.reasoning_content, message.content) == (" so", "Yes")


def test_seeds_repeat_and_cached_tokens_are_counted(client: OpenAI) -> None:
    arguments: Any = {"messages": user("word " * 200), "max_tokens": 6, "temperature": 1.0, "seed": -3}
    one, two = (client.chat.completions.create(model=NAME, **arguments) for _ in range(2))
    assert one.choices[0].message == two.choices[0].message
    assert two.usage.prompt_tokens_details.cached_tokens >= 64


def test_completions_at_once_and_as_a_stream(client: OpenAI, llm: LLM) -> None:
    arguments: Any = {**GREEDY, "prompt": ["The river", "A"], "max_tokens": 6, "logprobs": 2}
    whole = client.completions.create(**arguments)
    expected = llm.generate(["The river", "A"], SamplingParams(max_tokens=6, temperature=0, logprobs=2))
    assert [choice.text for choice in whole.choices] == [output.outputs[0].text for output in expected]
    rows = [output.outputs[0] for output in expected]
    for choice, row in zip(whole.choices, rows, strict=True):
        chosen = [entry[token].logprob for token, entry in zip(row.token_ids, row.logprobs, strict=True)]
        assert choice.logprobs.token_logprobs == chosen
        assert choice.finish_reason == "length"
    texts, tokens = ["", ""], [[], []]
    for chunk in client.completions.create(**arguments, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]


def test_completions_of_token_ids_with_echo(client: OpenAI, llm: LLM) -> None:
    """What lm-eval asks for: log-probabilities of the prompt, and one token more, or none."""
    ids = TOKENIZER.encode("The river is")
    (expected,) = llm.generate(
        [{"prompt_token_ids": ids}], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1, logprobs=1)
    )
    for most in (1, 0):
        whole = client.completions.create(**GREEDY, prompt=ids, echo=True, max_tokens=most, logprobs=1)
        values = whole.choices[0].logprobs.token_logprobs
        rows = [row[token].logprob for token, row in zip(ids[1:], expected.prompt_logprobs[1:], strict=True)]
        assert values[0] is None and values[1 : len(ids)] == rows
        assert len(values) == len(ids) + most and whole.usage.completion_tokens == most
        assert whole.choices[0].finish_reason == "length"
        assert whole.choices[0].text.startswith("The river is")
        offsets, tokens = whole.choices[0].logprobs.text_offset, whole.choices[0].logprobs.tokens
        assert [whole.choices[0].text[o : o + len(t)] for o, t in zip(offsets, tokens, strict=True)][:3] == tokens[:3]


def test_offsets_of_tokens_that_are_parts_of_characters(client: OpenAI) -> None:
    text = "日本 é x"
    whole = client.completions.create(**GREEDY, prompt=text, echo=True, max_tokens=0, logprobs=1)
    offsets = whole.choices[0].logprobs.text_offset
    ids = TOKENIZER.encode(text)
    assert len(ids) > len(text), "no character is of several tokens"
    ends = [len(TOKENIZER.decode(ids[:n]).rstrip("\ufffd")) for n in range(len(ids))]
    assert offsets == ends


def test_a_stream_that_is_closed_ends_its_request(client: OpenAI, server: Server, scripts: Scripts) -> None:
    scripts.pause = 0.01
    try:
        stream = client.chat.completions.create(**GREEDY, messages=user(scripts.say("word " * 900)), stream=True)
        next(iter(stream))
        until(lambda: server.worker.load.running == 1)
        before = server.worker.stats.generated_tokens
        stream.close()
        until(lambda: idle(server))
        assert server.worker.stats.generated_tokens - before < 200
    finally:
        scripts.pause = 0.0
