"""The card of the model that ships, and which files are shipped; the tables of what was measured."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from recipes.tiny import ship
from tests.conftest import RANDOM, ROOT


@pytest.fixture
def small_models(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script of `benchmarks/`, which is no package."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import small_models

    return small_models


def measured(variant: str, kernels: str, activations: str = "kept", accuracy: float = 0.9) -> dict[str, Any]:
    tasks = {task: {"accuracy": accuracy, "stderr": 0.015, "rows": 400} for task in ship.TASKS}
    return {
        "variant": variant, "kernels": kernels, "activations": activations, "tasks": tasks, "perplexity": 1.25,
        "perplexity_stderr": 0.01, "bytes": 5_250_000, "tokens_per_second": 321.4,
    }  # fmt: skip


def test_the_card_says_what_the_checkpoint_holds() -> None:
    results = {"rows": [measured(RANDOM.name, "cpu"), measured("another", "cpu", accuracy=0.123)]}
    card = ship.card(RANDOM, "the-name", results)
    config = json.loads((RANDOM / "config.json").read_text())["text_config"]
    assert card.startswith("# the-name\n")
    assert f"{config['num_hidden_layers']} layers of {config['hidden_size']} hidden units: 6 of linear" in card
    assert "`mxfp4`" in card and "{" not in card
    assert "| cpu | kept | 90.0 ± 1.5 % of 400 | 90.0 ± 1.5 % of 400 | 90.0 ± 1.5 % of 400 | 1.250 |" in card
    assert "12.3" not in card
    assert "Not measured yet" in ship.card(RANDOM, "the-name", None)


def test_a_checkpoint_that_cannot_be_loaded_is_not_shipped(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(RANDOM, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] += 1
    config["text_config"]["layer_types"].append("linear_attention")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit, match="cannot be loaded"):
        ship.card(folder, "the-name", None)


def test_only_files_of_the_checkpoint_are_copied(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "old.safetensors").touch()
    ship.copy(RANDOM, target)
    kept = {*ship.NAMES, "model.safetensors", "model.safetensors.index.json"}
    assert {path.name for path in target.iterdir()} == kept
    assert (target / "model.safetensors").read_bytes() == (RANDOM / "model.safetensors").read_bytes()
    folder = Path(shutil.copytree(RANDOM, tmp_path / "model"))
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(SystemExit, match=r"lacks chat_template\.jinja"):
        ship.copy(folder, target)


def test_tasks_are_the_first_rows_that_are_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = dict.fromkeys(ship.FIELDS) | {"prompt": "é?", "messages": [], "kind": "problem"}
    (tmp_path / "data").mkdir()
    for task in ship.TASKS:
        lines = [json.dumps(row | {"level": level}) for level in range(ship.ROWS + 1)]
        (tmp_path / "data" / f"{task.removeprefix('hadron_')}.jsonl").write_text("\n".join(lines))
    (tmp_path / "data" / "text.txt").write_text("text")
    ship.tasks(tmp_path / "data", tmp_path)
    lines = (tmp_path / "tools.jsonl").read_text().splitlines()
    assert len(lines) == ship.ROWS and list(json.loads(lines[0])) == list(ship.FIELDS) and "é?" in lines[0]
    assert (tmp_path / "text.txt").read_text() == "text"


def test_a_row_takes_the_place_of_an_earlier_one(small_models: Any) -> None:
    results = {"rows": [measured("a", "cpu"), measured("b", "cpu")], "anchors": []}
    small_models.kept(results, measured("a", "reference"))
    small_models.kept(results, measured("b", "cpu", accuracy=0.5))
    assert [(row["variant"], row["kernels"]) for row in results["rows"]] == [
        ("a", "cpu"), ("a", "reference"), ("b", "cpu"),
    ]  # fmt: skip
    assert results["rows"][2]["tasks"]["hadron_tools"]["accuracy"] == 0.5


def test_tables_and_the_page(small_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share = {"accuracy": 0.5, "stderr": 0.05, "rows": 100}
    both = {
        "transformers": share,
        "reference": share,
        "identical": 99,
        "differ": [{"row": 7, "token": 3, "margin": 1e-5}],
    }
    results = {
        "rows": [measured("a", "reference"), measured("a", "cpu", "declared"), measured("a", "cpu")],
        "anchors": [{"variant": "bf16", "tasks": dict.fromkeys(ship.TASKS, both)}],
    }
    lines = list(small_models.tables(results))
    assert [line.split(" | ")[1:3] for line in lines[2:5]] == [
        ["cpu", "kept"], ["cpu", "declared"], ["reference", "kept"],
    ]  # fmt: skip
    assert lines[2].endswith("| 90.0 ± 1.5 (400) | 1.250 ± 0.010 | 5.25 | 321 |")
    assert "| tools | 50.0 ± 5.0 (100) | 50.0 ± 5.0 (100) | 99 of 100 |" in lines
    assert lines[-1].startswith("Of the 3 that differ") and "1.0e-05" in lines[-1]
    page = tmp_path / "page.md"
    monkeypatch.setattr(small_models, "PAGE", page)
    page.write_text(f"before\n{small_models.BEGIN}\nold\n{small_models.END}\nafter\n")
    small_models.write_page(["new"])
    assert page.read_text() == f"before\n{small_models.BEGIN}\nnew\n{small_models.END}\nafter\n"
    page.write_text("nothing\n")
    with pytest.raises(SystemExit, match="has no"):
        small_models.write_page(["new"])


def test_the_page_of_the_repository_has_the_place(small_models: Any) -> None:
    assert small_models.PAGE.read_text().count(small_models.BEGIN) == 1
    assert small_models.TEXT.stat().st_size > 40_000


def test_batches_hold_prompts_of_one_length(small_models: Any) -> None:
    import anchor

    prompts = [[1, 2], [3], [4, 5], [6], [7, 8]]
    assert list(anchor.batches(prompts, 2)) == [[1, 3], [0, 2], [4]]
    assert anchor.share([1.0, 0.0, 1.0, 1.0]) == {"accuracy": 0.75, "stderr": 0.25, "rows": 4}


def test_where_two_answers_part(small_models: Any) -> None:
    import anchor

    class Model:
        def logits(self, ids: list[int]) -> Any:
            assert ids == [9, 5]
            return [[0.0] * 8, [0, 0, 0, 0.5, 0, 0, 0.75, 0]]

    assert anchor.margin(Model(), [9], [5, 3, 1], [5, 6, 1]) == {"token": 1, "margin": 0.25}
    assert anchor.margin(Model(), [9], [5, 3], [5, 3, 1]) == {"token": 2, "margin": None}
