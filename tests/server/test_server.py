"""The server around the interfaces: starting, keys, limits, clients that leave or sleep, errors, logs."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from secrets import compare_digest
from typing import Any

import httpx
import pytest

from hadron.engine.request import Request
from hadron.errors import NumericsError, UsageError
from hadron.server.config import ServerConfig
from hadron.server.errors import ApiError
from hadron.server.model import Model
from hadron.server.run import Server, listen
from hadron.server.worker import Worker
from tests.server.running import (
    CHAT,
    HELLO,
    TOKENIZER,
    Scripts,
    assembled,
    error_of,
    http,
    idle,
    running,
    say,
    scripts,
    server,
    until,
)


@pytest.fixture
def slow(scripts: Scripts) -> Iterator[Scripts]:
    """Steps of at least ten milliseconds."""
    scripts.pause = 0.01
    yield scripts
    scripts.pause = 0.0


def test_it_is_alive_before_it_is_ready() -> None:
    loading = threading.Event()

    def load() -> Any:
        loading.wait(20)
        return assembled()

    with running(load=load, wait=False) as server, httpx.Client(base_url=server.url) as http:
        until(lambda: http.get("/health").status_code == 200)
        for answer in (http.get("/ready"), http.post(CHAT, json=HELLO), http.get("/v1/models")):
            assert error_of(answer, 503)["code"] == "loading"
            assert int(answer.headers["retry-after"]) > 0
        loading.set()
        until(lambda: http.get("/ready").status_code == 200)
        assert http.post(CHAT, json=HELLO).status_code == 200


def test_what_loading_raises_ends_the_server() -> None:
    def load() -> Any:
        raise UsageError("no", where="a", found="b", accepted="c", hint="d")

    server = Server(load, ServerConfig(port=0), model="m", most=1)
    with pytest.raises(UsageError):
        server.run()


def test_a_server_may_end_while_it_loads() -> None:
    loading = threading.Event()

    def load() -> Any:
        loading.wait(20)
        return assembled()

    with running(load=load, wait=False) as server:
        until(lambda: httpx.get(f"{server.url}/health").status_code == 200)
        server.stop()
        until(lambda: server.worker.draining)
        time.sleep(0.3)
        loading.set()
        assert server.worker.join(20)


def test_an_address_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UsageError) as raised:
        listen(ServerConfig(port=taken.getsockname()[1]))
    assert raised.value.where == "--host, --port" and "in use" in raised.value.found


@pytest.mark.parametrize(
    ("fields", "where"),
    [({"port": 70000}, "--port"), ({"max_queue": -1}, "--max-queue"), ({"log_format": "xml"}, "--log-format"),
     ({"api_key": ("a", "")}, "--api-key"), ({"max_request_bytes": 1}, "--max-request-bytes"),
     ({"body_timeout": 0}, "--body-timeout"), ({"header_timeout": 0}, "--header-timeout")],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(UsageError) as raised:
        ServerConfig(**fields)
    assert raised.value.where == where
    assert "('a'" not in str(raised.value)


def test_keys_open_the_server_and_nothing_else_does() -> None:
    with running(api_key=("first", "second", "schlüssel")) as server, httpx.Client(base_url=server.url) as http:
        for headers in ({}, {"authorization": "Bearer third"}, {"authorization": "first"}, {"x-api-key": "firs"},
                        {"authorization": b"Bearer \xff"}):  # fmt: skip
            for path in (CHAT, "/v1/completions", "/tokenize"):
                error = error_of(http.post(path, json=HELLO, headers=headers), 401)
                assert error["type"] == "authentication_error" and "Bearer KEY" in error["message"]
        for headers in ({"authorization": "Bearer first"}, {"authorization": "bearer second"}, {"x-api-key": "second"},
                        {"authorization": "Bearer wrong", "x-api-key": "first"}, {"x-api-key": "schlüssel".encode()}):  # fmt: skip
            assert http.post(CHAT, json=HELLO, headers=headers).status_code == 200
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert http.get(path).status_code == 200


def test_a_key_is_compared_with_all_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def watched(presented: bytes, known: bytes) -> bool:
        compared.append((presented, known))
        return compare_digest(presented, known)

    monkeypatch.setattr("hadron.server.gate.secrets.compare_digest", watched)
    with running(api_key=("first", "second")) as server:
        for key, status in (("first", 200), ("second", 200), ("secons", 401), ("", 401)):
            compared.clear()
            assert httpx.get(f"{server.url}/v1/models", headers={"x-api-key": key}).status_code == status
            assert compared == [(key.encode(), b"first"), (key.encode(), b"second")]


def test_it_listens_to_this_machine_alone_unless_told_otherwise() -> None:
    with listen(ServerConfig(port=0)) as sock:
        assert sock.getsockname()[0] == "127.0.0.1"


def test_bodies_have_a_limit() -> None:
    with running(max_request_bytes=2048) as server, httpx.Client(base_url=server.url) as http:
        large = json.dumps(say("a" * 4000)).encode()
        for content in (large, iter([large[:1000], large[1000:]])):
            error = error_of(http.post(CHAT, content=content, headers={"content-type": "application/json"}), 413)
            assert "at most 2048" in error["message"]
        assert http.post(CHAT, json=HELLO).status_code == 200


def test_requests_that_are_being_prepared_have_a_place_in_the_queue() -> None:
    worker = Worker(lambda: pytest.fail("nothing is loaded here"), most=2)
    with worker.place(), worker.place():
        with pytest.raises(ApiError) as caught:
            worker.admit(1)
        assert caught.value.status == 429 and caught.value.message == (
            "too many requests: 2 run or wait, 1 more were asked for; at most 2 may (--max-num-seqs and --max-queue)"
        )
    worker.admit(1)


def test_a_full_queue_says_when_to_come_again(slow: Scripts) -> None:
    text = slow.say("word " * 500)
    with running(engine={"max_num_seqs": 1}, max_queue=1) as server:
        with httpx.Client(base_url=server.url, timeout=30) as http:
            threads = [
                threading.Thread(target=lambda: httpx.post(server.url + CHAT, json=say(text, max_tokens=100), timeout=30))
                for _ in range(2)
            ]  # fmt: skip
            for thread in threads:
                thread.start()
            until(lambda: server.worker.active == 2)
            answer = http.post(CHAT, json=HELLO)
            error = error_of(answer, 429)
            assert error["code"] == "queue_full" and "at most 2 may" in error["message"]
            assert int(answer.headers["retry-after"]) >= 1
            until(lambda: "hadron_requests_waiting 1.0" in http.get("/metrics").text)
            for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]}),
                               ("/v1/messages/count_tokens", HELLO)):  # fmt: skip
                assert http.post(path, json=body).status_code == 200, "it takes no place in the queue"
            for thread in threads:
                thread.join()
            assert http.post(CHAT, json={**HELLO, "n": 5}).status_code == 200  # alone, it may be large
        until(lambda: idle(server))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request_within_a_step(server: Server, slow: Scripts, stream: bool) -> None:
    body = json.dumps(say(slow.say("word " * 900), stream=stream)).encode()
    with socket.create_connection(server.url.removeprefix("http://").split(":")) as connection:
        connection.sendall(request_bytes(body))
        until(lambda: server.worker.load.running == 1)
        time.sleep(0.1)
    before = server.worker.stats.steps
    until(lambda: idle(server))
    assert server.worker.stats.steps - before <= 5  # the steps that pass until the system says so


def request_bytes(body: bytes) -> bytes:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def test_one_who_does_not_read_holds_up_nobody(server: Server, http: httpx.Client, scripts: Scripts) -> None:
    body = json.dumps(say(scripts.say("word " * 400), stream=True, n=8, logprobs=True, top_logprobs=20)).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server_port(server)))
        connection.sendall(request_bytes(body))
        until(lambda: server.worker.load.running > 0)
        began = time.monotonic()
        assert http.post(CHAT, json=HELLO).status_code == 200
        assert time.monotonic() - began < 5
        until(lambda: server.worker.load.running == 0, 60)  # all is computed, and waits to be read
        assert server.worker.active == 8
    until(lambda: idle(server))


def server_port(server: Server) -> int:
    return int(server.url.rpartition(":")[2])


def test_a_stream_is_kept_alive_while_nothing_comes(
    server: Server, http: httpx.Client, slow: Scripts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hadron.server.streaming.PATIENCE", 0.02)
    slow.pause = 0.1
    text = http.post(CHAT, json=say("a", stream=True, max_tokens=3)).text
    assert text.count(": still here\n\n") > 3 and text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("content", "param", "part"),
    [
        (b"", "body", "found nothing"),
        (b"{", "body", "not JSON"),
        (b"\xff\xfe{}", "body", "JSON"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "body", "utf-8"),
        (b"[" * 100000, "body", "JSON"),
        (b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", "body", ""),
        (b'{"seed": ' + b"9" * 10000 + b"}", "body", "JSON"),
        (b"[]", "body", "dictionary"),
        (b"null", "body", ""),
        (b'"a"', "body", "dictionary"),
        (b"{}", "messages", "found nothing"),
        (b'{"messages": {}}', "messages", "list"),
        (b'{"messages": [7]}', "messages[0]", "dictionary"),
        (b'{"messages": [{"content": "a"}]}', "messages[0].role", "found nothing"),
        (b'{"messages": [{"role": "user", "content": 7}]}', "messages[0].content", "found 7"),
        (b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "messages[0].content[0].text", "has none"),
        (b'{"messages": [{"role": "user", "content": "a"}], "stream": "yes"}', "stream", "'yes'"),
        (b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1e400}', "max_tokens", "inf"),
        (b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}', "temperature", "nan"),
        (b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 99999999999999999999}', "max_tokens", ""),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "messages[0].content", "lone surrogate"),
        (b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": {"name": "a b"}}]}', "tools[0].function.name", "'a b'"),
        (b'{"messages": [{"role": "user", "content": "a"}], "stop_token_ids": [-1]}', "stop_token_ids[0]", "-1"),
        (b'{"messages": [{"role": "user", "content": "a"}], "structured_outputs": {"regex": "("}}', "structured_outputs.regex", "("),
    ],
)  # fmt: skip
def test_malformed_bodies_are_refused_by_field(http: httpx.Client, content: bytes, param: str, part: str) -> None:
    answer = http.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert 400 <= answer.status_code < 500, answer.text
    error = error_of(answer, answer.status_code)
    assert error["param"].startswith(param) and part in error["message"], error


def test_paths_and_methods_that_are_not_there(http: httpx.Client) -> None:
    assert "/nowhere" in error_of(http.get("/nowhere"), 404)["message"]
    assert "GET" in error_of(http.get(CHAT), 405)["message"]
    error = http.get("/v1/messages/nowhere").json()
    assert error["type"] == "error" and error["error"]["type"] == "not_found_error"


def test_a_request_that_fails_fails_alone(
    http: httpx.Client, scripts: Scripts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(request: Request) -> None:
        if "say:numbers" in (request.prompt or ""):
            raise NumericsError("not finite", where="layer 3", found="NaN", accepted="numbers", hint="check")
        if "say:bug" in (request.prompt or ""):
            raise RuntimeError("a bug")

    monkeypatch.setattr(scripts, "broken", broken)
    error = error_of(http.post(CHAT, json=say("say:numbers")), 500)
    assert error["type"] == "server_error" and error["code"] == "NumericsError" and "layer 3" in error["message"]
    streamed = http.post(CHAT, json=say("say:numbers", stream=True))
    assert streamed.status_code == 200 and '"code":"NumericsError"' in streamed.text
    assert streamed.text.endswith("data: [DONE]\n\n")
    error = error_of(http.post(CHAT, json=say("say:bug")), 500)
    assert error["code"] == "internal_error" and "a bug" not in error["message"]
    assert http.post(CHAT, json=HELLO).status_code == 200


def test_a_bug_in_a_step_ends_what_took_part_and_not_the_server(server: Server, http: httpx.Client) -> None:
    engine = server.service.model.engine
    run = engine._runner.run
    try:
        engine._runner.run = lambda *rest: (_ for _ in ()).throw(RuntimeError("a bug"))
        error = error_of(http.post(CHAT, json=HELLO), 500)
        assert error["code"] == "internal_error" and "a bug" not in error["message"]
    finally:
        engine._runner.run = run
    assert http.post(CHAT, json=HELLO).status_code == 200
    until(lambda: idle(server))


def test_a_bug_in_a_command_ends_what_was_there_and_not_the_server(server: Server, http: httpx.Client) -> None:
    def broken(engine: Any) -> None:
        raise AssertionError("a bug")

    server.worker._commands.put(broken)
    assert http.post(CHAT, json=HELLO).status_code == 200


@pytest.mark.parametrize(("path", "body"), [(CHAT, HELLO), ("/v1/completions", {"prompt": "a", "max_tokens": 1})])
def test_a_request_that_is_being_prepared_when_the_server_drains_is_answered(
    monkeypatch: pytest.MonkeyPatch, path: str, body: Any
) -> None:
    preparing, may_go_on = threading.Event(), threading.Event()
    check = Model.check_name

    def waiting(model: Model, name: str | None) -> str:
        preparing.set()
        may_go_on.wait(20)
        return check(model, name)

    monkeypatch.setattr(Model, "check_name", waiting)
    with running() as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(httpx.post, server.url + path, json=body, timeout=30)
        assert preparing.wait(20)
        server.stop()
        may_go_on.set()
        assert asked.result().status_code == 200


def test_metrics_count(http: httpx.Client, server: Server) -> None:
    before = http.get("/metrics").text
    http.post(CHAT, json={**HELLO, "max_tokens": 5})
    until(lambda: idle(server))
    after = http.get("/metrics").text

    def grown(name: str) -> float:
        pages = [re.search(rf"^{re.escape(name)} (\S+)$", page, re.M) for page in (before, after)]
        return float(pages[1][1]) - (float(pages[0][1]) if pages[0] else 0)

    assert grown("hadron_generated_tokens_total") == 5
    assert grown("hadron_time_to_first_token_seconds_count") == 1
    assert grown("hadron_inter_token_seconds_count") == 4
    assert grown("hadron_request_seconds_count") == 1
    assert grown('hadron_finished_total{reason="length"}') == 1
    assert grown(f'hadron_http_requests_total{{path="{CHAT}",status="200"}}') == 1
    for name in ("requests_waiting", "requests_running", "cache_usage_ratio", "preemptions_total", "prefix_hits_total"):
        assert f"hadron_{name} " in after


def test_texts_to_tokens_and_back(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "The river", "return_token_strs": True}).json()
    assert answer["tokens"] == TOKENIZER.encode("The river") and answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 4096 and "".join(answer["token_strs"]) == "The river"
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "The river"}
    chat = http.post("/tokenize", json={"messages": HELLO["messages"]}).json()
    text = http.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
    assert text.endswith("<|user|>Hello<|assistant|><think>")
    used = http.post(CHAT, json=HELLO).json()["usage"]["prompt_tokens"]
    assert used == chat["count"]
    for body in ({}, {"prompt": "a", "messages": HELLO["messages"]}):
        assert error_of(http.post("/tokenize", json=body), 400)["param"] == "prompt"


def test_versions_and_the_description(http: httpx.Client) -> None:
    assert re.match(r"\d+\.\d+", http.get("/version").json()["version"])
    paths = http.get("/openapi.json").json()["paths"]
    assert {CHAT, "/v1/completions", "/v1/models", "/tokenize", "/detokenize", "/health", "/ready"} <= set(paths)


def test_other_origins_are_refused_unless_they_are_named(http: httpx.Client) -> None:
    origin = {"origin": "http://a.example"}
    assert "access-control-allow-origin" not in http.post(CHAT, json=HELLO, headers=origin).headers
    with running(allowed_origins=("http://a.example",), api_key=("k",)) as server:
        asked = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        refused = httpx.get(f"{server.url}/v1/models", headers=origin)
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == origin["origin"]
        allowed = httpx.options(server.url + CHAT, headers=asked)
        assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == origin["origin"]
