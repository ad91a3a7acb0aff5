"""Chat templates: the environment against transformers, the refusals, and our own GLM markup."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from conftest import DATA
from hadron.errors import RequestError, TokenizerError
from hadron.tokenizer.chat_template import ChatTemplate, decode_tool_arguments

FOLDER = DATA / "tokenizer"
OPEN = "[gMASK]<sop><|system|>Reasoning Effort: Max"
USER = {"role": "user", "content": "hi"}


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, where="test.jinja")


def oracle(source: str, messages: list[dict[str, Any]], **names: Any) -> str:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(FOLDER / "tokenizer.json"), eos_token="<|endoftext|>")
    return str(tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, **names))


ENVIRONMENT = {
    "blocks are trimmed": "a\n  {% if true %}\n b\n  {% endif %}\n{% for m in messages %}\n{{ m.role }}\n{% endfor %}",
    "loop controls": (
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}"
        "{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    ),
    "tojson": "{{ {'z': 1, 'a': ['<é>&\\'', none, true, 1.5]} | tojson }} {{ {'b': 1} | tojson(indent=2) }}",
    "tojson options": "{{ {'z': 'é', 'a': 1} | tojson(ensure_ascii=true, sort_keys=true, separators=(',', ':')) }}",
    "macros and namespaces": (
        "{% macro m(x) %}[{{ x }}]{% endmacro %}{% set n = namespace(v=1) %}"
        "{% for i in range(3) %}{% set n.v = n.v + i %}{% endfor %}{{ m(n.v) }}"
    ),
    "generation blocks": "{% for m in messages %}x{% generation %}{{ m.content }}{% endgeneration %}y{% endfor %}",
    "undefined is empty": "[{{ nothing }}][{{ messages[0].nothing }}][{{ tools is none }}]",
    "special tokens": "{{ eos_token }}",
    "string methods": "{{ messages[0].content.upper().strip('H') }}{{ messages[0]['content'] | trim }}",
    "generation prompt": "{% if add_generation_prompt %}>{% endif %}",
}


@pytest.mark.parametrize("source", ENVIRONMENT.values(), ids=ENVIRONMENT)
def test_the_environment_is_the_hubs(source: str) -> None:
    ours = ChatTemplate(source, where="test.jinja", variables={"eos_token": "<|endoftext|>"})
    for prompt in (True, False):
        assert ours.render([USER], add_generation_prompt=prompt) == oracle(source, [USER], add_generation_prompt=prompt)


def test_strftime_now_formats_the_present() -> None:
    assert template("{{ strftime_now('%Y') }}").render([]).isdigit()


CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "a question": ([USER], {}, f"{OPEN}<|user|>hi<|assistant|><think>"),
    "low effort": ([USER], {"reasoning_effort": "low"}, f"{OPEN[:-3]}Low<|user|>hi<|assistant|><think>"),
    "another effort": ([USER], {"reasoning_effort": "medium"}, f"{OPEN}<|user|>hi<|assistant|><think>"),
    "no thinking": ([USER], {"enable_thinking": False}, f"{OPEN}<|user|>hi<|assistant|><think></think>"),
    "past thoughts are cleared": (
        [USER, {"role": "assistant", "content": "yo", "reasoning_content": "hm"}, USER],
        {},
        f"{OPEN}<|user|>hi<|assistant|><think></think>yo<|user|>hi<|assistant|><think>",
    ),
    "past thoughts are kept on request": (
        [USER, {"role": "assistant", "content": "<think>hm</think>yo"}, USER],
        {"clear_thinking": False},
        f"{OPEN}<|user|>hi<|assistant|><think>hm</think>yo<|user|>hi<|assistant|><think>",
    ),
    "an image between texts": (
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}, "b"]}],
        {"add_generation_prompt": False},
        f"{OPEN}<|user|>a<|begin_of_image|><|image|><|end_of_image|>b",
    ),
    "results follow the calls when every id matches once": (
        [
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "1", "function": {"name": "f", "arguments": '{"x": "001", "y": [1, "é"]}'}},
                {"id": "2", "function": {"name": "g", "arguments": ""}},
            ]},
            {"role": "tool", "tool_call_id": "2", "content": "second"},
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "first"}]},
        ],
        {},
        f"{OPEN}<|assistant|><think></think><tool_call>f<arg_key>x</arg_key><arg_value>001</arg_value>"
        '<arg_key>y</arg_key><arg_value>[1, "é"]</arg_value></tool_call><tool_call>g</tool_call>'
        "<|observation|><tool_response>first</tool_response><tool_response>second</tool_response><|assistant|><think>",
    ),
    "results stay as sent when an id is there twice": (
        [
            {"role": "assistant", "content": "", "tool_calls": [
                {"id": "1", "function": {"name": "f", "arguments": {}}},
                {"id": "1", "function": {"name": "g", "arguments": {}}},
            ]},
            {"role": "tool", "tool_call_id": "2", "content": "second"},
            {"role": "tool", "tool_call_id": "1", "content": "first"},
        ],
        {"add_generation_prompt": False},
        f"{OPEN}<|assistant|><think></think><tool_call>f</tool_call><tool_call>g</tool_call>"
        "<|observation|><tool_response>second</tool_response><tool_response>first</tool_response>",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("messages", "switches", "expected"), CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_our_markup(messages: list[dict[str, Any]], switches: dict[str, Any], expected: str) -> None:
    assert ChatTemplate.load(FOLDER).render(messages, **switches) == expected
    names = {"add_generation_prompt": True} | switches
    source = (FOLDER / "chat_template.jinja").read_text()
    assert oracle(source, decode_tool_arguments(messages), **names) == expected


def test_an_empty_conversation_is_the_opening() -> None:
    assert ChatTemplate.load(FOLDER).render([], add_generation_prompt=False) == OPEN


def test_tools_are_listed_as_they_were_sent() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "<&>", "a": {"z": 1, "b": "é"}}}
    text = ChatTemplate.load(FOLDER).render([USER], tools=[tool])
    assert '\n{"name": "f", "description": "<&>", "a": {"z": 1, "b": "é"}}\n</tools>' in text


def test_messages_are_not_changed_by_rendering() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    before = json.dumps(messages)
    assert decode_tool_arguments(messages)[0]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert json.dumps(messages) == before


@pytest.mark.parametrize("arguments", ["{", "[1]", "3", '"text"', '{"a": NaN}', "{'a': 1}", "[" * 5000])
def test_tool_arguments_that_are_no_object_are_refused_by_place(arguments: str) -> None:
    messages = [USER, {"role": "assistant", "tool_calls": [{}, {"function": {"name": "f", "arguments": arguments}}]}]
    with pytest.raises(RequestError, match="a message is malformed") as caught:
        ChatTemplate.load(FOLDER).render(messages)
    assert caught.value.where == "messages[1].tool_calls[1].function.arguments"
    assert caught.value.accepted == "a JSON object"


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ("hi", "messages[1]"),
        ({"role": "assistant", "tool_calls": "f()"}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": ["f()"]}, "messages[1].tool_calls[0]"),
    ],
)
def test_malformed_messages_are_named(message: Any, where: str) -> None:
    with pytest.raises(RequestError) as caught:
        decode_tool_arguments([USER, message])
    assert caught.value.where == where


def test_what_the_template_refuses_is_passed_on() -> None:
    with pytest.raises(RequestError, match="refuses these messages") as caught:
        ChatTemplate.load(FOLDER).render([{"role": "wizard", "content": "x"}])
    assert caught.value.found == "messages[0] has the role wizard, which has no markup"


@pytest.mark.parametrize(
    "source",
    ["{{ messages[0].content + 1 }}", "{{ messages[0].a.b }}", "{{ 1 // 0 }}", "{{ nothing() }}", "{{ range(10**9) }}"],
)
def test_a_failing_render_is_a_typed_error(source: str) -> None:
    with pytest.raises(RequestError, match="cannot render these messages"):
        template(source).render([USER])


def test_a_syntax_error_gives_the_line() -> None:
    with pytest.raises(TokenizerError, match="the chat template cannot be used") as caught:
        template("one\n{% if %}")
    assert caught.value.where == "test.jinja, line 2"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages[0].update({'a': 1}) }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(source: str) -> None:
    messages = [dict(USER)]
    try:
        assert template(source).render(messages) == ""  # unsafe attributes are undefined
    except TokenizerError as error:
        assert "SecurityError" in error.found
    except RequestError as error:
        assert "UndefinedError" in error.found
    assert messages == [USER]


def test_the_template_may_lie_in_the_settings(tmp_path: Path) -> None:
    settings = {"chat_template": "{{ bos_token }}{{ eos_token }}", "bos_token": "B", "eos_token": {"content": "E"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert ChatTemplate.load(tmp_path).render([]) == "BE"
    settings["chat_template"] = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]  # type: ignore[assignment]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert ChatTemplate.load(tmp_path).render([]) == "d"
    shutil.copy(FOLDER / "chat_template.jinja", tmp_path)
    assert ChatTemplate.load(tmp_path).render([]).startswith(OPEN)


def test_no_template_is_an_error_with_both_places(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="has no chat template") as caught:
        ChatTemplate.load(tmp_path)
    assert "chat_template.jinja" in caught.value.found
    assert "tokenizer_config.json" in caught.value.found


@pytest.mark.parametrize(
    ("name", "content"),
    [("tokenizer_config.json", b"{"), ("tokenizer_config.json", b"[]"), ("chat_template.jinja", b"\xff\xfe")],
)
def test_unreadable_files_are_typed_errors(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=f"{name} cannot be read"):
        ChatTemplate.load(tmp_path)
