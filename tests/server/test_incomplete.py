"""Checkpoints that lack a tokenizer or a chat template: what is served all the same, and how the rest is refused."""

from __future__ import annotations

import shutil
from typing import Any

import httpx
import pytest

from tests.conftest import DATA, RANDOM
from tests.server.running import CHAT, HELLO, error_of, running


def test_a_checkpoint_without_a_tokenizer_continues_token_ids() -> None:
    with running(DATA / "glm52-ct-w4a16") as server, httpx.Client(base_url=server.url, timeout=30) as http:
        answer = http.post("/v1/completions", json={"prompt": [5, 9], "max_tokens": 2, "logprobs": 1}).json()
        assert answer["usage"]["completion_tokens"] == 2 and answer["choices"][0]["text"] == ""
        assert all(t.startswith("token_id:") for t in answer["choices"][0]["logprobs"]["tokens"])
        for path, body in ((CHAT, HELLO), ("/v1/completions", {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
            assert error_of(http.post(path, json=body), 400)["code"] == "no_tokenizer"


def test_a_checkpoint_without_a_template_is_refused_for_chat(tmp_path: Any) -> None:
    folder = shutil.copytree(RANDOM, tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    with running(folder) as server:
        error = error_of(httpx.post(server.url + CHAT, json=HELLO), 400)
        assert error["code"] == "no_chat_template" and "chat_template.jinja" in error["message"]
        answer = httpx.post(server.url + "/v1/completions", json={"prompt": "a", "max_tokens": 1, "stream": True})
        assert answer.text.endswith("data: [DONE]\n\n")


def test_a_template_that_is_broken_is_not_called_absent(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    folder = shutil.copytree(RANDOM, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("a\n{% if %}")
    with running(folder) as server:
        error = error_of(httpx.post(server.url + CHAT, json=HELLO), 400)
    for said in (error["message"], caplog.text):
        assert "the chat template cannot be used" in said and "line 2" in said and "has no" not in said
