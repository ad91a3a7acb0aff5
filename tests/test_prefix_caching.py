"""What is found of earlier prompts, through `LLM`: how much, and that it is counted."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from hadron import LLM, SamplingParams
from hadron.engine.snapshots import places
from tests.conftest import DATA, RANDOM

FAMILIES = ("glm52-quark-mxfp4-attnptpc", "glm53f-quark-mxfp4-blockfp8")
TEXT = random.Random(1).choices(range(256), k=6000)


@pytest.fixture(params=FAMILIES)
def llm(request: pytest.FixtureRequest, tmp_path: Path) -> LLM:
    """A checkpoint whose configuration allows longer contexts than it was made with."""
    folder = Path(shutil.copytree(DATA / request.param, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (config.get("text_config") or config)["max_position_embeddings"] = 10_000
    (folder / "config.json").write_text(json.dumps(config))
    return LLM(folder, threads=1)


def ask(llm: LLM, ids: list[int], **params: Any) -> Any:
    greedy = SamplingParams(**({"max_tokens": 2, "temperature": 0, "ignore_eos": True} | params))
    (output,) = llm.generate({"prompt_token_ids": ids}, greedy)
    return output


def test_a_short_beginning_of_a_long_prompt_is_found(llm: LLM) -> None:
    assert ask(llm, TEXT[:5000]).num_cached_tokens == 0
    assert ask(llm, [*TEXT[:300], *TEXT[5500:5600]]).num_cached_tokens == 256
    shared = {n: ask(llm, [*TEXT[:n], *TEXT[5500:5600]]).num_cached_tokens for n in (600, 1100, 2500, 4500)}
    assert all(found >= n // 2 and found % 64 == 0 for n, found in shared.items()), shared
    assert ask(llm, TEXT[:5000]).num_cached_tokens == 4992


def test_the_next_turn_takes_all_but_its_new_tokens(llm: LLM) -> None:
    history, known = TEXT[:1000], 0
    for turn in range(3):
        output = ask(llm, history, max_tokens=100 + turn)
        if turn:
            assert output.num_cached_tokens == known // 64 * 64
        history = [*history, *output.outputs[0].token_ids]
        known = len(history) - 1  # the last token was never run
        history += TEXT[5000 + 30 * turn : 5030 + 30 * turn]


def test_conversations_share_their_system_prompt_and_go_on_from_their_last_turn() -> None:
    """Through the chat template: the places are where turns begin, not where distances fall."""
    llm = LLM(RANDOM, threads=1)
    system = {"role": "system", "content": "You answer in verse, briefly and with care. " * 16}
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)

    def chat(*turns: str) -> Any:
        roles = ("user", "assistant") * len(turns)
        messages = [system, *({"role": role, "content": text} for role, text in zip(roles, turns, strict=False))]
        return llm.chat(messages, params)[0]

    first = chat("Why is the sky blue?")
    user = llm.tokenizer.token_id("<|user|>")
    begin = first.prompt_token_ids.index(user)
    assert begin > 320 and begin % 64, "the test is about a place that is no power of two"
    other = chat("Something else entirely, and at some length: " + "what is a lake? " * 6)
    assert other.num_cached_tokens == begin // 64 * 64
    second = chat("Why is the sky blue?", first.outputs[0].text, "And at night?")
    assert second.num_cached_tokens >= len(first.prompt_token_ids) // 64 * 64 - 64


def test_without_prefix_caching_nothing_is_found() -> None:
    llm = LLM(DATA / FAMILIES[0], threads=1, enable_prefix_caching=False)
    assert [ask(llm, TEXT[:300]).num_cached_tokens for _ in range(2)] == [0, 0]


def test_places_of_a_prompt_without_turns() -> None:
    assert places(TEXT[:5000], 64, (), 99) == [256, 512, 1024, 2048, 4096, 4992]
    assert places(TEXT[:64], 64, (), 99) == []
    assert places(TEXT[:65], 64, (), 99) == [64]
    assert places(TEXT[:128], 64, (), 99) == [64]


def test_places_of_turns() -> None:
    """The first two turns and the last four, at the whole page before each."""
    text = [1 if i in (0, 100, 210, 340, 470, 600, 700, 800, 900) else 0 for i in range(1000)]
    assert places(text, 64, {1}, 99) == [64, 192, 256, 512, 576, 640, 768, 896, 960]


def test_fewer_places_keep_the_end_and_the_turns() -> None:
    text = [1 if i in (100, 210) else 0 for i in range(1000)]
    assert places(text, 64, {1}, 99) == [64, 192, 256, 512, 960]
    assert places(text, 64, {1}, 4) == [64, 192, 512, 960]
    assert places(text, 64, {1}, 1) == [960]
    assert places(text, 64, {1}, 0) == []
