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
from hadron.cli.generate import SHIPPED
from hadron.engine import assemble as module
from hadron.engine.assemble import LEAST_CONTEXT, assemble, context_size
from hadron.engine.config import EngineConfig
from hadron.errors import CapacityError, PlanError
from hadron.preflight.build import make_plan
from hadron.preflight.plan import LoadPlan

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
    hub = FakeHub(SHIPPED)
    made = assemble("org/model", CONFIG, silent, hub)
    assert hub.downloads == ["org/model"]  # type: ignore[attr-defined]
    assert made.plan.root == SHIPPED
    assert made.tokenizer is not None


def test_a_plan_with_errors_downloads_nothing(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(SHIPPED, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["OtherForCausalLM"]}))
    hub = FakeHub(folder)
    with pytest.raises(PlanError, match="HC202"):
        assemble("org/model", CONFIG, silent, hub)
    assert hub.downloads == []  # type: ignore[attr-defined]


def test_a_folder_asks_no_hub() -> None:
    hub = FakeHub(Path("nowhere"))
    assert assemble(SHIPPED, CONFIG, silent, hub).plan.root == SHIPPED
    assert hub.downloads == []  # type: ignore[attr-defined]


def plan_with(*, fits: int, longest: int) -> LoadPlan:
    plan = make_plan(str(SHIPPED))
    assert plan.config is not None
    memory = type(plan.memory)(
        weights=1,
        converted=0,
        cache_per_token=1000,
        state_per_sequence=0,
        max_context=fits,
        available=10**9,
        cache_dtype="bfloat16",
    )
    config = dataclasses.replace(plan.config, max_position=longest)  # type: ignore[type-var]
    platform = type(plan.platform)("cuda", "cuda", "", 1, 10**9, (), ("reference",), 1)
    return dataclasses.replace(plan, memory=memory, config=config, platform=platform)


@pytest.mark.parametrize(
    ("fits", "longest", "asked", "device", "expected"),
    [
        (50_000, 1_000_000, None, "cpu", 50_000),
        (50_000, 20_000, None, "cpu", 20_000),
        (50_000, 1_000_000, 70_000, "cpu", 70_000),
        (50_000, 20_000, 70_000, "cpu", 20_000),
        (0, 1_000_000, None, "cpu", LEAST_CONTEXT),
        (0, 100, None, "cpu", 100),
        (500_000, 1_000_000, None, "cuda", 400_000),
    ],
)
def test_the_context_is_what_fits(fits: int, longest: int, asked: int | None, device: str, expected: int) -> None:
    plan = plan_with(fits=fits, longest=longest)
    assert context_size(plan, EngineConfig(device=device, max_context=asked)) == expected


def test_caches_that_do_not_fit_are_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("not enough memory: you tried to allocate a lot")

    monkeypatch.setattr(module, "Runner", refuse)
    with pytest.raises(CapacityError, match="no memory for the caches") as caught:
        assemble(SHIPPED, dataclasses.replace(CONFIG, max_context=3000), silent)
    assert caught.value.where == "a context of 3000 tokens"
    assert "you tried to allocate a lot" in caught.value.found
    assert "--max-context" in caught.value.hint
