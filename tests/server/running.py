"""A server in a thread of the test's process, on a small model with random weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from openai import OpenAI

from hadron.engine import sampler
from hadron.engine.assemble import assemble
from hadron.engine.config import EngineConfig
from hadron.engine.engine import Engine
from hadron.engine.sampler import Choice, choose
from hadron.server.config import ServerConfig
from hadron.server.run import Server
from hadron.tokenizer.tokenizer import Tokenizer
from tests.conftest import RANDOM

TOKENIZER = Tokenizer.load(RANDOM)
EOS = 480
NAME = "tiny"
GREEDY: dict[str, Any] = {"model": NAME, "temperature": 0, "seed": 1}
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, "temperature": 0}
CHAT = "/v1/chat/completions"
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {"what": {"type": "string"}, "times": {"type": "integer"}},
            "required": ["what"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


def assembled(model: Any = RANDOM, **options: Any) -> Any:
    return assemble(model, EngineConfig(**{"threads": 1} | options), lambda what, done, total: None)


@contextmanager
def running(
    model: Any = RANDOM, engine: dict[str, Any] | None = None, load: Any = None, wait: bool = True, **config: Any
) -> Iterator[Server]:
    """A server that takes requests, unless `wait` is off. engine: fields of `EngineConfig`."""
    settings = ServerConfig(**{"port": 0, "served_model_name": (NAME, "other"), "drain_timeout": 20} | config)
    options = {"threads": 1} | (engine or {})
    most = EngineConfig(**options).max_num_seqs + settings.max_queue
    server = Server(load or (lambda: assembled(model, **options)), settings, model="model", most=most)
    thread = threading.Thread(target=server.run, name="server")
    thread.start()
    try:
        until(lambda: not wait or server.service.ready)
        yield server
    finally:
        server.stop(at_once=True)
        thread.join(20)
        assert not thread.is_alive()


def until(condition: Any, seconds: float = 30) -> None:
    """Wait for something to become true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.005)


def idle(server: Server) -> bool:
    """Whether nothing runs and everything was given back."""
    load = server.worker.load
    return not (server.worker.active or load.waiting or load.running or load.pages_used)


class Scripts:
    """What the model says: after a prompt that holds `say:NAME`, the tokens of that script, else its own."""

    def __init__(self) -> None:
        self.texts: dict[str, list[int]] = {}
        self.pause = 0.0
        self.request: Any = None  # whose token is chosen

    def say(self, text: str, *, end: bool = True) -> str:
        """What a user must write so that the model answers with `text`, and its end token."""
        name = f"say:{len(self.texts)}."
        self.texts[name] = TOKENIZER.encode(text, add_special_tokens=False) + [EOS] * end
        return name

    def choose(self, *given: Any, **options: Any) -> Choice:
        """In place of `sampler.choose`."""
        time.sleep(self.pause)
        choice, request = choose(*given, **{**options, "known": None}), self.request
        written = request.prompt or ""
        last = max(self.texts, key=written.rfind, default="")
        if not last or last not in written:
            return choice
        token, row = self.texts[last][len(request.output_token_ids)], choice.logprobs
        if row is not None:
            row.setdefault(token, next(iter(row.values())))
        return Choice(token, row)


@pytest.fixture(scope="module")
def scripts() -> Iterator[Scripts]:
    """Answers that a test chooses; in force for the module."""
    made, accept, likeliest = Scripts(), Engine._accept, Engine._likeliest

    def accept_scripted(engine: Engine, request: Any, *rest: Any) -> Any:
        made.request = request
        return accept(engine, request, *rest)

    def undecided(*given: Any) -> Any:  # so that every token comes by `choose`
        return {key: [known._replace(token=None) for known in own] for key, own in likeliest(*given).items()}

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Engine, "_accept", accept_scripted)
        patched.setattr(Engine, "_likeliest", undecided)
        patched.setattr(sampler, "choose", made.choose)
        yield made


@pytest.fixture(scope="module")
def server(scripts: Scripts) -> Iterator[Server]:
    """One server for the module."""
    with running() as made:
        yield made
        until(lambda: idle(made))


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    """A plain client of it."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def say(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **more}


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error
