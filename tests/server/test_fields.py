"""Fields of requests: each reaches the engine, or is refused, or the log names it."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from hadron import LLM, SamplingParams
from hadron.server.run import Server
from tests.conftest import RANDOM
from tests.server.running import TOKENIZER, Scripts, http, idle, running, scripts, server, until

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
TALK = [{"role": "user", "content": "a"}]
LOOK = {"name": "look", "parameters": {"type": "object", "properties": {}}, "strict": True}
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": TALK, "max_tokens": 1},
    COMPLETIONS: {"prompt": "a", "max_tokens": 1},
    RESPONSES: {"input": "a", "max_output_tokens": 1},
    MESSAGES: {"messages": TALK, "max_tokens": 1},
}


@pytest.mark.parametrize("path", LEAST)
def test_fields_of_vllm_reach_the_engine_by_every_interface(
    server: Server, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    seen: list[Any] = []
    generate = server.worker.generate

    def watched(ids: Any, params: Any, *rest: Any, **options: Any) -> Any:
        seen.append((ids, params, options["priority"]))
        return generate(ids, params, *rest, **options)

    monkeypatch.setattr(server.worker, "generate", watched)
    given: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 5,
        "frequency_penalty": 0.2, "presence_penalty": 0.3, "min_tokens": 1, "stop_token_ids": [9], "ignore_eos": True,
        "skip_special_tokens": False,
    }  # fmt: skip
    own: dict[str, Any] = {"stop_sequences": ["x"]} if path == MESSAGES else {"stop": ["x"], "thinking_budget": 3}
    switch = {} if path == COMPLETIONS else {"chat_template_kwargs": {"enable_thinking": False}}
    answer = http.post(path, json={**LEAST[path], **given, **own, **switch, "priority": 4, "logit_bias": {"9": -1}})
    assert answer.status_code == 200, answer.text
    ((ids, params, priority),) = seen
    for name, value in given.items():
        wanted = tuple(value) if isinstance(value, list) else value
        assert getattr(params, name) in (value, wanted), name
    assert list(params.stop) == ["x"] and dict(params.logit_bias) == {9: -1.0} and priority == 4
    assert path == MESSAGES or params.thinking_budget == 3
    assert path == COMPLETIONS or TOKENIZER.decode(ids, skip_special_tokens=False).endswith("<think></think>")


def test_what_nothing_is_done_with_is_named_by_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    failed = [{"type": "tool_result", "tool_use_id": "1", "content": "no", "is_error": True}]
    called = [{"type": "tool_use", "id": "1", "name": "look", "input": {}}]
    talk = [*TALK, {"role": "assistant", "content": called}, {"role": "user", "content": failed}]
    flat = {"type": "function", **LOOK}
    tool = {"type": "function", "function": LOOK}
    form = {"type": "json_object"}
    cases: list[tuple[str, dict[str, Any], list[str]]] = [
        (CHAT, {"store": True, "tools": [tool]}, ["store", "tools.function.strict"]),
        (CHAT, {"tools": [tool], "tool_choice": "required", "response_format": form}, ["response_format"]),
        (COMPLETIONS, {"best": 1}, ["best"]),
        (CHAT, {"stream": True, "stream_options": {"pace": 1}, "messages": [{"role": "user", "content": "a", "x": 1}],
                "response_format": {"type": "text", "form": 1}}, ["response_format.form", "stream_options.pace"]),
        (MESSAGES, {"tools": [{"name": "look", "input_schema": {"type": "object"}, "cost": 1}],
                    "thinking": {"type": "disabled", "depth": 2}}, ["thinking.depth", "tools.cost"]),
        (RESPONSES, {"n": 2, "include": ["reasoning.encrypted_content"], "text": {"verbosity": "low"},
                     "reasoning": {"summary": "auto"}, "truncation": "auto", "tools": [flat]},
         ["n", "include", "reasoning.summary", "text.verbosity", "tools.strict", "truncation"]),
        (RESPONSES, {"include": ["message.output_text.logprobs"], "tools": [flat], "tool_choice": "required"}, [""]),
        (MESSAGES, {"n": 2, "messages": talk}, ["n", "tool_result.is_error"]),
    ]  # fmt: skip
    with running(log_format="json") as server:
        for path, body, _ in cases:
            answer = httpx.post(server.url + path, json={**LEAST[path], **body})
            assert answer.status_code == 200, answer.text
    said = [record.getMessage() for record in caplog.records if record.name == "hadron.server.requests"]
    lines = [json.loads(line) for line in said if line.startswith("{")]  # others are late, from another server
    assert [line.get("ignored", "").split(", ") for line in lines] == [names for _, _, names in cases]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "function", "function": LOOK}], "tool_choice": "required",
          "structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_together_is_refused(http: httpx.Client, body: Any, param: str) -> None:
    answer = http.post(CHAT, json={**LEAST[CHAT], **body})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param
    assert error["message"].startswith(f"{param}: ") and "accepted: " in error["message"]


def test_tokens_of_a_conversation_that_goes_on(http: httpx.Client) -> None:
    talk = [*TALK, {"role": "assistant", "content": "On"}]
    body = {"messages": talk, "continue_final_message": True}
    ids = http.post("/tokenize", json=body).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": ids}).json()["prompt"].endswith("<think></think>On")
    assert http.post(CHAT, json={**body, "max_tokens": 1}).json()["usage"]["prompt_tokens"] == len(ids)
    none = http.post("/tokenize", json={"messages": [], "continue_final_message": True})
    assert none.status_code == 400 and none.json()["error"]["param"] == "messages"


def test_priorities_decide_who_goes_first(scripts: Scripts) -> None:
    with running(engine={"max_num_seqs": 1}) as server, ThreadPoolExecutor(3) as pool:
        ended: list[str] = []

        def ask(name: str, priority: int) -> None:
            body = {**LEAST[CHAT], "max_tokens": 20, "ignore_eos": True, "priority": priority}
            assert httpx.post(server.url + CHAT, json=body, timeout=60).status_code == 200
            ended.append(name)

        scripts.pause = 0.05
        try:
            asked = []
            for name, priority in (("first", 0), ("patient", 5), ("urgent", -5)):
                asked.append(pool.submit(ask, name, priority))
                until(lambda: server.worker.active == len(asked))
        finally:
            scripts.pause = 0.0
        for each in asked:
            each.result()
        assert ended.index("urgent") < ended.index("patient")
        until(lambda: idle(server))


def test_prompt_logprobs_of_a_chat(http: httpx.Client) -> None:
    """Of the prompt that the template made; streamed once, with the first piece of the answer."""
    ids = http.post("/tokenize", json={"messages": TALK}).json()["tokens"]
    params = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=2)
    (expected,) = LLM(RANDOM, threads=1).generate([{"prompt_token_ids": ids}], params)
    body = {"messages": TALK, "max_tokens": 3, "temperature": 0, "n": 2, "prompt_logprobs": 2}
    rows = http.post(CHAT, json=body).json()["prompt_logprobs"]
    assert rows[0] is None and len(rows) == len(ids)
    for got, row in zip(rows[1:], expected.prompt_logprobs[1:], strict=True):
        assert {int(token): entry["logprob"] for token, entry in got.items()} == {
            token: entry.logprob for token, entry in row.items()
        }
    with http.stream("POST", CHAT, json={**body, "stream": True}) as stream:
        chunks = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    assert [chunk["prompt_logprobs"] for chunk in chunks if "prompt_logprobs" in chunk] == [rows]
    assert "prompt_logprobs" not in http.post(CHAT, json={**body, "prompt_logprobs": None}).json()
    refused = http.post(CHAT, json={**body, "prompt_logprobs": -1}).json()["error"]
    assert refused["param"] == "prompt_logprobs" and "accepted" in refused["message"]


def test_prompt_logprobs_and_several_continuations_of_several_prompts(http: httpx.Client) -> None:
    llm = LLM(RANDOM, threads=1)
    prompts = ["The river", "A"]
    settings: dict[str, Any] = {"max_tokens": 4, "temperature": 1.0, "seed": 3, "n": 2, "prompt_logprobs": 2}
    expected = llm.generate(prompts, SamplingParams(**settings))
    body = {"prompt": prompts, **settings}
    choices = http.post(COMPLETIONS, json=body).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["text"] for choice in choices] == [each.text for output in expected for each in output.outputs]
    for number, output in enumerate(expected):
        rows = choices[2 * number]["prompt_logprobs"]
        assert rows[0] is None and len(rows) == len(output.prompt_token_ids)
        for got, row in zip(rows[1:], output.prompt_logprobs[1:], strict=True):
            assert {int(token): entry["logprob"] for token, entry in got.items()} == {
                token: entry.logprob for token, entry in row.items()
            }
    texts = [""] * 4
    with http.stream("POST", COMPLETIONS, json={**body, "stream": True}) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in choices]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_streamed_usage_has_cached_tokens_and_comes_with_every_piece_if_asked(http: httpx.Client, path: str) -> None:
    long = f"{path} " + "word " * 200
    words: dict[str, Any] = (
        {"prompt": long} if path == COMPLETIONS else {"messages": [{"role": "user", "content": long}]}
    )
    body = {**words, "max_tokens": 5, "ignore_eos": True}
    assert http.post(path, json=body).status_code == 200
    for always in (False, True):
        options = {"include_usage": True, "continuous_usage_stats": always}
        text = http.post(path, json={**body, "stream": True, "stream_options": options}).text
        usages = [json.loads(line[6:])["usage"] for line in text.splitlines() if line.startswith("data: {")]
        last = usages.pop()
        assert last["completion_tokens"] == 5 and last["prompt_tokens_details"]["cached_tokens"] >= 64
        if not always:
            assert set(usages) == {None}
            continue
        counts = [usage["completion_tokens"] for usage in usages]
        assert counts == sorted(counts) and counts[-1] == 5
        assert all(usage["prompt_tokens"] == last["prompt_tokens"] for usage in usages)
