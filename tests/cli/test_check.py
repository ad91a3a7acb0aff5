"""`hadron check` as a user meets it: output, exit codes, JSON, filters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

import hadron.preflight.build as build
from hadron.cli.main import run
from hadron.preflight.report import select
from tests.conftest import RANDOM

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A checkpoint that a test may break."""
    return Path(shutil.copytree(RANDOM, tmp_path / "copy"))


def edit_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_the_summary_of_a_sound_checkpoint(capsys: Captured) -> None:
    assert run(["check", str(RANDOM)]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == str(RANDOM)
    assert lines[-1].startswith("OK: this checkpoint can be loaded")
    assert err == ""
    assert "\x1b" not in out
    assert max(map(len, lines[1:])) <= 100


def test_json_is_the_plan(capsys: Captured) -> None:
    assert run(["check", str(RANDOM), "--json"]) == 0
    out, err = capsys.readouterr()
    assert (out.count("\n"), err) == (1, "")
    value = json.loads(out)
    plan = build.make_plan(str(RANDOM))
    assert value["ok"] is plan.ok is True
    assert value["bytes"] == plan.bytes
    assert [module["name"] for module in value["modules"]] == [module.name for module in plan.modules]
    # every tensor of the file is claimed once
    claimed = [name for module in value["modules"] for name in module["tensors"].values()]
    assert sorted(claimed) == sorted(plan.facts.tensors)


def test_the_cache_that_is_asked_for_is_counted_and_named(capsys: Captured) -> None:
    found = {}
    for asked in ("auto", "fp32", "fp8_e4m3"):
        assert run(["check", str(RANDOM), "--json", "--kv-cache-dtype", asked]) == 0
        memory = json.loads(capsys.readouterr().out)["memory"]
        found[asked] = memory["cache_per_token"], memory["cache_dtype"]
    config = build.make_plan(str(RANDOM)).config
    assert config is not None
    rows = sum(layer.attention == "mla" for layer in config.layers)
    rank, keys = config.mla.kv_rank, 2 * rows * config.indexer.head_dim // config.indexer.pool
    assert found == {
        "auto": (rows * rank * 2 + keys, "bfloat16"),
        "fp32": (rows * rank * 4 + keys, "float32"),
        "fp8_e4m3": (rows * (rank + 4) + keys, "fp8_e4m3"),
    }
    assert run(["check", str(RANDOM), "--kv-cache-dtype", "fp8_e4m3"]) == 0
    assert "a token (latents fp8_e4m3), state" in capsys.readouterr().out
    assert run(["check", str(RANDOM), "--kv-cache-dtype", "fp8"]) == 2
    assert "'auto', 'bf16', 'fp32', 'fp8_e4m3'" in capsys.readouterr().err


def test_room_is_what_the_fraction_of_the_memory_leaves(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, rooms = build.make_plan(str(RANDOM)), []
    memory = plan.memory
    size = 2 * (memory.weights + 3 * memory.state_per_sequence + 6400 * memory.cache_per_token)
    monkeypatch.setattr(build, "detect", lambda device: replace(plan.platform, memory=size))
    for part in ("0.5", "1"):
        sizes = ["--max-num-seqs", "3", "--no-enable-prefix-caching", "--memory-utilization", part]
        assert run(["check", str(RANDOM), "--json", *sizes]) == 0
        found = json.loads(capsys.readouterr().out)["memory"]
        rooms.append([found[key] for key in ("pages", "states", "snapshots", "max_context")])
    assert rooms == [[100, 3, 0, 4096], [192, 3, 0, 4096]], "at most what three requests can use"
    assert run(["check", str(RANDOM), "--kv-cache-memory-bytes", "1500000"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    found = build.make_plan(str(RANDOM), kv_cache_memory_bytes=1_500_000).memory
    assert f"a request: {found.pages} pages, 16 states, {found.snapshots} snapshots" in shown
    assert run(["check", str(RANDOM), "--kv-cache-memory-bytes", "1000"]) == 2
    assert "the bytes for caches do not hold one request" in capsys.readouterr().err
    assert run(["check", str(RANDOM), "--memory-utilization", "1.5"]) == 2
    assert "where:    --memory-utilization\n  found:    1.5" in capsys.readouterr().err


def test_modules_prints_what_matches(capsys: Captured) -> None:
    pattern = "*.layers.3.self_attn.*_proj"
    assert run(["check", str(RANDOM), "--modules", pattern]) == 0
    names = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    wanted = [module.name for module in select(build.make_plan(str(RANDOM)), pattern)]
    assert len(wanted) > 3
    assert names == wanted


def test_modules_limits_json(capsys: Captured) -> None:
    assert run(["check", str(RANDOM), "--json", "--modules", "lm_head"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert [module["name"] for module in value["modules"]] == ["lm_head"]
    assert value["parameters"] > 100_000


@pytest.mark.parametrize("as_json", [False, True])
def test_a_pattern_that_matches_nothing_is_wrong_usage(as_json: bool, capsys: Captured) -> None:
    assert run(["check", str(RANDOM), "--modules", "lm_haed", *["--json"] * as_json]) == 2
    out, err = capsys.readouterr()
    assert "no module has a name that matches" in err
    assert "--modules lm_haed" in err
    assert (json.loads(out)["error"]["where"] == "--modules lm_haed") if as_json else out == ""


def test_errors_are_found_and_exit_1(copy: Path, capsys: Captured) -> None:
    edit_config(copy, architectures=["LlamaForCausalLM"])
    assert run(["check", str(copy)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "error      HC202 the architecture is not known" in lines
    assert lines[-1].startswith("NOT OK: this checkpoint cannot be loaded (1 error")
    assert run(["check", str(copy), "--json"]) == 1
    value = json.loads(capsys.readouterr().out)
    assert (value["ok"], value["family"], value["architecture"]) == (False, None, "LlamaForCausalLM")
    (found,) = [p for p in value["problems"] if p["severity"] == "error"]
    assert found["code"] == "HC202"
    assert "Glm5NextForCausalLM" in found["message"]


def test_a_truncated_shard_exits_1_with_its_name(copy: Path, capsys: Captured) -> None:
    shard = copy / "model.safetensors"
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 1000)
    assert run(["check", str(copy), "--json"]) == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert any(p["severity"] == "error" and "model.safetensors" in p["message"] for p in problems)


@pytest.mark.parametrize("as_json", [False, True])
def test_no_checkpoint_exits_2(as_json: bool, tmp_path: Path, capsys: Captured) -> None:
    missing = str(tmp_path / "nothing")
    assert run(["check", missing, *["--json"] * as_json]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("hadron: error: ")
    assert missing in err
    for part in ("where:", "found:", "accepted:", "try:"):
        assert part in err
    if not as_json:
        assert out == ""
        return
    value = json.loads(out)
    error = value.pop("error")
    assert value == {"schema_version": 1, "model": missing, "ok": False}
    assert list(error) == ["what", "where", "found", "accepted", "hint"]
    assert all(isinstance(part, str) and part for part in error.values())


def test_a_folder_without_a_config_exits_2(tmp_path: Path, capsys: Captured) -> None:
    assert run(["check", str(tmp_path), "--json"]) == 2
    assert "config.json" in str(json.loads(capsys.readouterr().out)["error"])


def test_wrong_usage_answers_in_json_too(capsys: Captured) -> None:
    assert run(["check", "x", "--json", "--device", "abacus"]) == 2
    out, err = capsys.readouterr()
    value = json.loads(out)
    assert (value["model"], value["ok"]) == (None, False)
    assert "abacus" in value["error"]["found"]
    assert value["error"]["where"] == "hadron check x --json --device abacus"
    assert err.startswith("Usage: hadron check")


def test_kernels_that_cannot_are_refused_with_the_reason(capsys: Captured) -> None:
    assert run(["check", str(RANDOM), "--kernels", "triton"]) == 1
    out = capsys.readouterr().out
    assert "HC501 no kernel can run a module" in out


def test_data_names_tensors_with_nan_codes(copy: Path, capsys: Captured) -> None:
    assert run(["check", str(copy), "--data"]) == 0
    capsys.readouterr()
    plan = build.make_plan(str(copy))
    name = "model.language_model.norm.weight"
    begin, _ = plan.facts.tensors[name].data_offsets
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(plan.facts.shards[0].data_start + begin)
        file.write(b"\xc0\x7f")  # NaN in bfloat16
    assert run(["check", str(copy)]) == 0  # data is not read unless asked for
    capsys.readouterr()
    assert run(["check", str(copy), "--data", "--json"]) == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    (found,) = [p for p in problems if p["severity"] == "error"]
    assert (found["code"], found["tensors"]) == ("HC601", [name])
