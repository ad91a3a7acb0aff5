"""Bodies that are slow, or wrong, at every path: answered with what is wrong with them, and nothing is held."""

from __future__ import annotations

import json
import socket
import time
from http.client import HTTPResponse
from typing import Any

import httpx
import pytest

from hadron.server import head
from hadron.server.errors import ApiError
from hadron.server.protocol import CompletionRequest
from hadron.server.run import Server
from tests.server.running import Scripts, http, idle, running, scripts, server, until

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
PATHS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, COUNT, "/tokenize", "/detokenize")
TALK = [{"role": "user", "content": "a"}]


def refused(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert len(error["message"]) > 10
    return error


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "found nothing"),
        (b"{", "not JSON"),
        (b"{'model': 1}", "not JSON"),
        (b"\xff\xfe{}", "JSON"),
        (b'{"model": "\xff"}', "utf-8"),
        (b'{"model": "\xc3("}', "utf-8"),
        (b"[" * 100_000, "JSON"),
        (b'{"a":' * 100_000, "JSON"),
        (b'{"model": ' + b"9" * 10_000 + b"}", "JSON"),
        (b"[]", "dictionary"),
        (b"7", "dictionary"),
    ],
    ids=lambda value: repr(value[:24]),
)  # fmt: skip
def test_what_is_no_body_is_refused_at_every_path(http: httpx.Client, path: str, content: bytes, part: str) -> None:
    error = refused(http.post(path, content=content, headers={"content-type": "application/json"}))
    assert part in error["message"]


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_of_another_type_is_refused_by_its_header(http: httpx.Client, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    error = refused(http.post(CHAT, content=b'{"messages": []}', headers=headers))
    assert error["param"] == "content-type" and "accepted: application/json" in error["message"]
    assert repr(kind or "nothing") in error["message"]


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_who_watches_may_ask_for_the_head_alone(http: httpx.Client, path: str) -> None:
    answer = http.head(path)
    assert answer.status_code == 200 and answer.content == b""


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": 7}, "prompt"),
        (COMPLETIONS, {"prompt": [2**31]}, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt"),
        (COMPLETIONS, {"prompt": [True]}, "prompt"),
        (COMPLETIONS, {"prompt": [5, "a"]}, "prompt"),
        (COMPLETIONS, {"prompt": [10**6]}, "prompt[0]"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 10**30}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "5"}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 10**9}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "n": 10**9}, "n"),
        (COMPLETIONS, {"prompt": "a", "n": 0}, "n"),
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature"),
        (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, "temperature"),
        (COMPLETIONS, {"prompt": "a", "top_p": 2}, "top_p"),
        (COMPLETIONS, {"prompt": "a", "top_k": -10**20}, "top_k"),
        (COMPLETIONS, {"prompt": "a", "priority": 10**6}, "priority"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"1": "x"}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "stop": 7}, "stop"),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": [10**9]}, "stop_token_ids[0]"),
        (COMPLETIONS, {"prompt": "a", "response_format": {"type": "poem"}}, "response_format.type"),
        (COMPLETIONS, {"prompt": "a", "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        (COMPLETIONS, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "stream_options": {}}, "stream_options"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": TALK, "max_completion_tokens": -1}, "max_completion_tokens"),
        (CHAT, {"messages": TALK, "model": 7}, "model"),
        (CHAT, {"messages": TALK, "tools": [{}]}, "tools[0].function"),
        (CHAT, {"messages": TALK, "top_logprobs": 10**9, "logprobs": True}, "top_logprobs"),
        (CHAT, {"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
        (CHAT, {"messages": TALK, "max_completion_tokens": []}, "max_completion_tokens"),
        (RESPONSES, {}, "input"),
        (RESPONSES, {"input": 7}, "input"),
        (RESPONSES, {"input": "a", "model": {"a": [[[[]]]]}}, "model"),
        (RESPONSES, {"input": "a", "top_logprobs": 10**9}, "top_logprobs"),
        (RESPONSES, {"input": "a", "max_output_tokens": "many"}, "max_output_tokens"),
        (RESPONSES, {"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        (MESSAGES, {"messages": TALK}, "max_tokens"),
        (MESSAGES, {"max_tokens": 5}, "messages"),
        (MESSAGES, {"messages": TALK, "max_tokens": 0.5}, "max_tokens"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": 7}]}], "max_tokens": 5}, "messages[0].content"),
        (COUNT, {"messages": 7}, "messages"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [2**31]}, "tokens[0]"),
        ("/detokenize", {"tokens": [10**6]}, "tokens[0]"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)  # fmt: skip
def test_the_message_names_the_field(http: httpx.Client, path: str, body: dict[str, Any], field: str) -> None:
    error = refused(http.post(path, json=body))
    assert field in error["message"]
    if path not in (MESSAGES, COUNT):  # Anthropic's errors have no field for it
        assert error["param"].startswith(field), error


def test_options_of_a_stream_that_is_none_are_refused_with_what_to_do(http: httpx.Client) -> None:
    error = refused(http.post(CHAT, json={"messages": TALK, "stream_options": {"include_usage": True}}))
    assert error["message"] == "stream_options: found without a stream; accepted: beside stream: true"


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        (RESPONSES, {"input": "a", "metadata": {"a": "\ud800"}}, "metadata.a"),
        (RESPONSES, {"input": "a", "reasoning": {"effort": "\ud800"}}, "reasoning.effort"),
        (CHAT, {"messages": TALK, "logit_bias": {"\ud800": 1}}, "logit_bias"),
        (CHAT, {"messages": TALK, "stop": ["a", "\udfff"]}, "stop[1]"),
        (COMPLETIONS, {"prompt": "a", "\ud800": 1}, "body"),
        (COMPLETIONS, {"prompt": 7, "user": "\ud800"}, "user"),
        (MESSAGES, {"messages": TALK, "max_tokens": 1, "system": "\ud800"}, "system"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
    ],
    ids=ascii,
)  # fmt: skip
def test_a_lone_surrogate_is_refused_wherever_it_is(http: httpx.Client, path: str, body: Any, where: str) -> None:
    content = json.dumps(body).encode()
    error = refused(http.post(path, content=content, headers={"content-type": "application/json"}))
    assert error["message"] == f"{where}: found a lone surrogate; accepted: Unicode text"


def test_a_body_of_too_many_levels_is_refused(http: httpx.Client) -> None:
    """By what reads JSON, or, where that goes deeper than what writes it, before anything is made of it."""
    content = b'{"prompt": "a", "metadata": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    error = refused(http.post("/v1/completions", content=content, headers={"content-type": "application/json"}))
    assert "cannot be read as JSON: maximum recursion depth" in error["message"]
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(ApiError, match="nested too deeply; accepted: fewer levels") as caught:
        CompletionRequest.model_validate({"prompt": "a", "metadata": nested})
    assert caught.value.status == 400


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_long_chain_of_references_is_no_error_of_the_server(
    http: httpx.Client, scripts: Scripts, choice: str
) -> None:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1000)} | {"d1000": {"type": "string"}}
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": chain}
    said = scripts.say("</think><tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>")
    body = {"messages": [{"role": "user", "content": said}], "max_tokens": 60, "tool_choice": choice,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}  # fmt: skip
    answer = http.post(CHAT, json=body)
    assert answer.status_code == 200 or refused(answer)


@pytest.mark.parametrize(
    ("framing", "piece"),
    [("content-length: 900000", b" " * 2000), ("transfer-encoding: chunked", b"1\r\n \r\n" * 199)],
)
def test_who_still_sends_when_we_hang_up_can_read_why(
    framing: str, piece: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that come to a closed socket make a reset, and a reset takes the answer that was not read yet."""
    first = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n{framing}\r\n\r\n".encode()
    with running(max_request_bytes=1024) as server:
        host, port = server.url.removeprefix("http://").split(":")
        for seconds in (60.0, 0.1):
            monkeypatch.setattr(head, "LINGER", seconds)
            with socket.create_connection((host, int(port)), timeout=20) as eager:
                eager.sendall(first)
                if seconds == 60.0:
                    for _ in range(40):  # without reading, beyond the answer's leaving
                        eager.sendall(piece)
                        time.sleep(0.01)
                    assert status(eager) == 413
                    assert eager.recv(1) == b""  # no more is said, and yet no reset
                else:
                    with pytest.raises(ConnectionError):  # nobody is listened to for ever
                        for _ in range(2000):
                            eager.sendall(piece)
                            time.sleep(0.01)
            until(lambda: not server._server.server_state.connections)


def test_a_body_that_is_sent_byte_by_byte_is_answered_408_and_hung_up_on() -> None:
    with running(body_timeout=1) as server:
        host, port = server.url.removeprefix("http://").split(":")
        head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 1000000\r\n\r\n"
        with socket.create_connection((host, int(port)), timeout=20) as dripping:
            began, answer = time.monotonic(), b""
            dripping.sendall(head.encode())
            dripping.settimeout(0.05)
            while time.monotonic() < began + 20:
                try:
                    piece = dripping.recv(65536)
                except TimeoutError:
                    dripping.sendall(b" ")
                    continue
                if not piece:
                    break
                answer += piece
            took = time.monotonic() - began
        assert answer.startswith(b"HTTP/1.1 408 ") and b"\r\nconnection: close\r\n" in answer.lower()
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert error["code"] == "request_timeout" and "within 1 s (--body-timeout)" in error["message"]
        assert 1 <= took < 15
        until(lambda: not server._server.server_state.connections)
        assert httpx.post(server.url + CHAT, json={"messages": TALK, "max_tokens": 1}).status_code == 200


def status(connection: socket.socket) -> int:
    """Of the next response, which is read to its end."""
    response = HTTPResponse(connection)
    response.begin()
    response.read()
    return response.status


def test_a_head_that_does_not_end_is_answered_408_and_hung_up_on() -> None:
    with running(header_timeout=1) as server:
        host, port = server.url.removeprefix("http://").split(":")
        first = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
        with (
            socket.create_connection((host, int(port)), timeout=20) as silent,
            socket.create_connection((host, int(port)), timeout=20) as dripping,
            socket.create_connection((host, int(port)), timeout=20) as kept,
        ):
            dripping.sendall(first[:9])
            kept.sendall(first)
            assert status(kept) == 200
            answer = b"".join(iter(lambda: dripping.recv(65536), b""))
            assert silent.recv(65536) == b""
            time.sleep(1.5)  # between requests there is no hurry
            kept.sendall(first)
            assert status(kept) == 200
            kept.sendall(first[:9])
            assert status(kept) == 408
        assert answer.startswith(b"HTTP/1.1 408 ") and b"\r\nconnection: close\r\n" in answer.lower()
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert error["code"] == "request_timeout"
        assert "found 9 bytes and no end" in error["message"] and "within 1 s (--header-timeout)" in error["message"]
        until(lambda: not server._server.server_state.connections)


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_may_take_longer_than_its_request(scripts: Scripts, stream: bool) -> None:
    with running(body_timeout=1, header_timeout=1) as server:
        scripts.pause = 0.3
        try:
            body = {"messages": TALK, "max_tokens": 6, "ignore_eos": True, "stream": stream}
            answer = httpx.post(server.url + CHAT, json=body, timeout=60)
        finally:
            scripts.pause = 0.0
        assert answer.status_code == 200 and '"length"' in answer.text
        until(lambda: idle(server))
