"""From a name to an engine: what is fetched when, and how large the caches become."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hadron.checkpoint.hub import Hub
from hadron.checkpoint.source import LocalFolder
from hadron.engine import assemble as module
from hadron.engine.assemble import (
    TURNS,
    assemble,
    end_tokens,
    prompt_only_tokens,
    turn_tokens,
)
from hadron.engine.config import EngineConfig
from hadron.errors import CapacityError, PlanError
from hadron.preflight.build import make_plan
from hadron.tokenizer.tokenizer import Tokenizer
from tests.conftest import RANDOM

CONFIG = EngineConfig(kernels="reference", dtype="float32", threads=1)


class Headers(LocalFolder):
    """A folder of which only headers can be had."""

    def __init__(self, root: Path, model: str) -> None:
        super().__init__(root, model)
        self.root = None  # type: ignore[assignment]
        self._folder = root

    def files(self) -> list[str]:
        return LocalFolder(self._folder, self.model).files()

    def read(self, name: str, limit: int) -> bytes:
        return LocalFolder(self._folder, self.model).read(name, limit)

    def headers(self, names: Any) -> Any:
        return LocalFolder(self._folder, self.model).headers(names)


class FakeHub(Hub):
    """A Hub with one checkpoint, counting downloads."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        object.__setattr__(self, "folder", folder)
        object.__setattr__(self, "downloads", [])

    def source(self, model: str, progress: Any = None) -> Any:
        return Headers(self.folder, model)  # type: ignore[attr-defined]

    def download(self, model: str, progress: Any = None) -> Path:
        self.downloads.append(model)  # type: ignore[attr-defined]
        return self.folder  # type: ignore[attr-defined,no-any-return]


def silent(what: str, done: int, total: int) -> None:
    del what, done, total


def test_a_hub_id_is_planned_then_downloaded_then_built() -> None:
    hub = FakeHub(RANDOM)
    made = assemble("org/model", CONFIG, silent, hub)
    assert hub.downloads == ["org/model"]  # type: ignore[attr-defined]
    assert made.plan.root == RANDOM
    assert made.tokenizer is not None


def test_a_plan_with_errors_downloads_nothing(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(RANDOM, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["OtherForCausalLM"]}))
    hub = FakeHub(folder)
    with pytest.raises(PlanError, match="HC202"):
        assemble("org/model", CONFIG, silent, hub)
    assert hub.downloads == []  # type: ignore[attr-defined]


def test_a_folder_asks_no_hub() -> None:
    hub = FakeHub(Path("nowhere"))
    assert assemble(RANDOM, CONFIG, silent, hub).plan.root == RANDOM
    assert hub.downloads == []  # type: ignore[attr-defined]


def test_br79_a_log_tells_which_kernels_run_modules_of_each_kind_and_scheme(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "hadron.engine"):
        plan = assemble(RANDOM, CONFIG, silent).plan
    said = [record.message for record in caplog.records if " runs " in record.message]
    ran = {(m.kind.value, m.scheme.name, m.kernel.name) for m in plan.modules if m.kernel is not None}
    assert len(said) == len(ran) > 5
    for kind, scheme, kernel in ran:
        count = sum((m.kind.value, m.scheme.name) == (kind, scheme) and m.kernel is not None for m in plan.modules)
        assert f"{kernel} runs {count} modules: {kind}, {scheme}" in said


def test_caches_that_do_not_fit_are_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("not enough memory: you tried to allocate a lot")

    monkeypatch.setattr(module, "Runner", refuse)
    with pytest.raises(CapacityError, match="no memory for the caches") as caught:
        assemble(RANDOM, dataclasses.replace(CONFIG, num_pages=3000, enable_prefix_caching=False), silent)
    assert caught.value.where == "3000 pages of 64 tokens and 16 states"
    assert "you tried to allocate a lot" in caught.value.found
    assert "--max-model-len" in caught.value.hint


def test_turns_are_what_the_tokenizer_has() -> None:
    tokenizer = Tokenizer.load(RANDOM)
    assert turn_tokens(tokenizer) == {tokenizer.token_id(word) for word in TURNS} - {None}
    assert len(turn_tokens(tokenizer)) == 4
    assert turn_tokens(None) == frozenset()


def test_ends_are_those_of_every_source(tmp_path: Path) -> None:
    """config.json names one, generation_config.json another, the tokenizer a third."""
    folder = Path(shutil.copytree(RANDOM, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["eos_token_id"] = 11
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(
        '{"eos_token_id": [12, 13, -1, 1000000]}'
    )  # some the model never says
    for value in ("<|user|>", {"content": "<|user|>"}):
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": value}))
        tokenizer = Tokenizer.load(folder)
        assert end_tokens(make_plan(folder), tokenizer) == {11, 12, 13, tokenizer.token_id("<|user|>")}
    for text in ("{", "[]", '{"eos_token": 5}', '{"eos_token": "no such token"}'):
        (folder / "tokenizer_config.json").write_text(text)
        assert end_tokens(make_plan(folder), Tokenizer.load(folder)) == {11, 12, 13}
    assert end_tokens(make_plan(folder), None) == {11, 12, 13}


def test_what_only_prompts_hold() -> None:
    tokenizer = Tokenizer.load(RANDOM)
    plan = make_plan(RANDOM)
    assert {tokenizer.token_id(word) for word in ("<|user|>", "<|observation|>")} <= end_tokens(plan, tokenizer)
    words = {
        tokenizer.token_id(word)
        for word in (
            "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|assistant|>", "<tool_response>",
            "</tool_response>",
        )
    }  # fmt: skip
    assert None not in words
    assert prompt_only_tokens(plan, tokenizer) == words | {500, 501, 502, 503, 504, 505}
    assert prompt_only_tokens(plan, None) == {500, 501, 502, 503, 504, 505}
