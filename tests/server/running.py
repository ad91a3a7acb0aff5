"""A server in a thread of the test's process, on a small model with random weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from openai import OpenAI

from hadron.engine.assemble import assemble
from hadron.engine.choosing import Chooser
from hadron.engine.config import EngineConfig
from hadron.engine.request import Request
from hadron.engine.sampler import Choice, Likeliest
from hadron.engine.scheduler import Scheduled
from hadron.layers.logits import Logits
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
        self.broken: Callable[[Request], None] | None = None  # asked before every token; what it raises is the model's

    def say(self, text: str, *, end: bool = True) -> str:
        """What a user must write so that the model answers with `text`, and its end token."""
        name = f"say:{len(self.texts)}."
        self.texts[name] = TOKENIZER.encode(text, add_special_tokens=False) + [EOS] * end
        return name

    def token(self, request: Request, own: int) -> int:
        """What comes next. own: what the model would say."""
        written = request.prompt or ""
        last = max(self.texts, key=written.rfind, default="")
        return self.texts[last][len(request.output_token_ids)] if last and last in written else own


@pytest.fixture(scope="module")
def scripts() -> Iterator[Scripts]:
    """Answers that a test chooses; in force for the module."""
    made, gather, choose = Scripts(), Chooser.gather, Chooser.choose

    def gathered(chooser: Chooser, steps: Sequence[Scheduled], rows: Sequence[range]) -> Any:
        asked = gather(chooser, steps, rows)

        def answers(logits: Logits | None) -> dict[int, Sequence[Likeliest | None]]:
            found = asked.answers(logits)
            time.sleep(made.pause * len(found))
            for i, (known,) in found.items():
                assert known is not None and known.token is not None
                said = known._replace(token=made.token(steps[i].request, known.token))
                found[i] = [said if made.broken is None else said._replace(token=None)]
            return found

        return SimpleNamespace(answers=answers)

    def chosen(chooser: Chooser, request: Request, logits: Logits, known: Likeliest | None) -> Choice:
        if made.broken is not None:
            made.broken(request)
            known = None
        choice = choose(chooser, request, logits, known)
        return replace(choice, token=made.token(request, choice.token))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Chooser, "gather", gathered)
        patched.setattr(Chooser, "choose", chosen)
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
