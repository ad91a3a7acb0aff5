"""What the chat interface refuses: the status, the field, and what to do, as the openai client shows them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import openai
import pytest
from openai import OpenAI

from hadron.server.run import Server
from hadron.tokenizer.chat_template import ChatTemplate
from tests.server.running import GREEDY, LOOK, NOW, client, scripts, server, user

BAD = {
    "type": "function",
    "function": {"name": "bad", "parameters": {"properties": {"p": {"type": "string", "pattern": "(?=a)b"}}}},
}


@pytest.mark.parametrize(
    ("arguments", "param", "part"),
    [
        ({"max_tokens": 0}, "max_tokens", "an integer of at least 1"),
        ({"max_tokens": 10**30}, "max_tokens", "accepted"),
        ({"temperature": -1}, "temperature", "from 0 to 1000"),
        ({"top_p": 2}, "top_p", "not 0"),
        ({"n": 1000}, "n", "at most 128"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ({"logprobs": True, "top_logprobs": 1000}, "top_logprobs", "at most"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", "token ids"),
        ({"logit_bias": {"5": 1, "99999": 1}}, "logit_bias.99999", "an integer from 0"),
        ({"max_tokens": 5, "max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        ({"tools": [NOW, BAD], "tool_choice": "required"}, "tools[1].function.parameters", "look-around"),
        ({"extra_body": {"guided_choice": ["a"]}}, "guided_choice", "accepted: structured_outputs"),
        ({"stop": [""]}, "stop", "none of them empty"),
        ({"tool_choice": "required"}, "tool_choice", "with tools"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name", "'x'"),
        ({"tools": [NOW, NOW]}, "tools[1].function.name", "a second time"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema.schema", "a JSON schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": 7}}}}, "response_format.json_schema.schema", "7"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role", "'king'"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [*user("a"), {"role": "tool", "tool_call_id": "1"}]}, "messages[1].content", "its result"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages[0].content[0].type", "pictures"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, None, "audio"),
        ({"extra_body": {"chat_template_kwargs": {"tools": 1}}}, "chat_template_kwargs.tools", "a field of its own"),
        ({"extra_body": {"continue_final_message": True}}, "continue_final_message", "an assistant's"),
        ({"extra_body": {"functions": [{"name": "look"}]}}, "functions", "accepted: tools"),
        ({"extra_body": {"thinking_budget": -1}}, "thinking_budget", "at least 0"),
        ({"extra_body": {"top_k": "5"}}, "top_k", "'5'"),
    ],
)  # fmt: skip
def test_errors_name_the_field(client: OpenAI, arguments: dict[str, Any], param: str | None, part: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(**{**GREEDY, "messages": user("a"), **arguments})
    error = raised.value
    assert error.status_code == 400 and error.type == "invalid_request_error"
    assert param is None or error.param == param, error
    assert part in error.message and (param or "") in error.message, error


def test_a_context_that_is_too_small_is_said_with_its_numbers(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(**GREEDY, messages=user("word " * 6000))
    error = raised.value
    assert error.code == "context_length_exceeded" and error.param == "messages" and "at most 4096" in error.message
    tokens = int(error.message.partition(" tokens of the prompt")[0].rpartition(" ")[2])
    assert tokens > 6000
    with pytest.raises(openai.BadRequestError, match="4090 of the answer"):
        client.chat.completions.create(**GREEDY, messages=user("word " * 30), max_tokens=4090)


def test_br71_pictures_are_refused(client: OpenAI) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    for content in ([{"type": "text", "text": "What is this?"}, picture], "<|image|>"):
        with pytest.raises(openai.BadRequestError, match="pictures and films cannot be read") as raised:
            client.chat.completions.create(**GREEDY, messages=[{"role": "user", "content": content}])
        assert raised.value.code == "no_vision"


@pytest.mark.parametrize(
    "source", ["{{ messages | length }}", "{{ messages[0].content | map(attribute='text') | join }}"]
)
def test_br71_pictures_are_refused_whatever_the_template_makes_of_them(
    client: OpenAI, server: Server, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    blind = replace(server.service.model, template=ChatTemplate(source, where="blind"), placeholders={})
    monkeypatch.setattr(server.service, "_model", blind)
    parts: Any = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(openai.BadRequestError, match="pictures and films cannot be read") as raised:
        client.chat.completions.create(**GREEDY, messages=[{"role": "user", "content": parts}])
    assert (raised.value.code, raised.value.param) == ("no_vision", "messages[0].content[1].type")
    assert client.chat.completions.create(**GREEDY, messages=[{"role": "user", "content": parts[:1]}], max_tokens=1)


def test_parts_of_other_types_that_are_text_reach_the_template_as_text(client: OpenAI) -> None:
    used = []
    for part in (
        {"type": "text", "text": "No."},
        {"type": "input_text", "text": "No."},
        {"type": "refusal", "refusal": "No."},
    ):
        messages: Any = [{"role": "user", "content": [part]}]
        used.append(client.chat.completions.create(**GREEDY, messages=messages, max_tokens=1).usage.prompt_tokens)
    assert len(set(used)) == 1


def test_another_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="accepted: tiny, other"):
        client.chat.completions.create(model="gpt", messages=user("a"))
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")
