"""What `read_facts` makes of a folder: the index as allow-list, left-over files, modules, configuration."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import pytest

from conftest import ROOT, checkpoint_names
from hadron.checkpoint.facts import Facts, read_facts
from hadron.checkpoint.garbage import paused_gc
from hadron.problems import Problem, Severity
from hostile.build import checkpoint, good_shard, index

ONES = b"\0\0\x80\x3f"


def only(facts: Facts, code: str) -> Problem:
    assert [problem.code for problem in facts.problems] == [code]
    return facts.problems[0]


def first_byte(facts: Facts, name: str) -> bytes:
    """Bytes of a tensor, through the place that the facts give."""
    tensor = facts.tensors[name]
    shard = facts.shards[tensor.shard]
    assert shard.path is not None
    start = shard.data_start + tensor.data_offsets[0]
    return shard.path.read_bytes()[start : start + tensor.nbytes]


def test_single_file(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, model__safetensors=good_shard("a.weight", "a.weight_scale", "lm_head.weight", "bare"))
    facts = read_facts(folder)
    assert facts.problems == []
    assert facts.model == str(folder)
    assert facts.root == folder
    assert {module: list(of) for module, of in facts.modules.items()} == {
        "a": ["weight", "weight_scale"],
        "lm_head": ["weight"],
        "": ["bare"],
    }
    assert facts.modules["a"]["weight"] is facts.tensors["a.weight"]
    (shard,) = facts.shards
    assert (shard.name, shard.path, shard.size) == (
        "model.safetensors",
        folder / "model.safetensors",
        shard.path.stat().st_size,
    )


@pytest.mark.parametrize("winner", [1, 2])
def test_index_decides_between_two_copies(winner: int, tmp_path: Path) -> None:
    """BR-37 (a): both shards hold x.weight with different values; the index points at one."""
    folder = checkpoint(
        tmp_path,
        **{
            "model-00001-of-00002__safetensors": good_shard("x.weight", "a.weight"),
            "model-00002-of-00002__safetensors": good_shard("x.weight", "b.weight", fill=ONES),
        },
    )
    content = index(
        x__weight=f"model-0000{winner}-of-00002.safetensors",
        a__weight="model-00001-of-00002.safetensors",
        b__weight="model-00002-of-00002.safetensors",
    )
    (folder / "model.safetensors.index.json").write_bytes(content)
    facts = read_facts(folder)
    assert first_byte(facts, "x.weight") == (bytes(8) if winner == 1 else 2 * ONES)
    problem = only(facts, "HC107")
    assert problem.severity is Severity.WARNING
    assert problem.tensors == ("x.weight",)
    assert (
        f"model-0000{3 - winner}-of-00002.safetensors holds 1 tensor(s) that the index assigns to another"
        in problem.message
    )


def test_two_copies_without_an_index(tmp_path: Path) -> None:
    folder = checkpoint(
        tmp_path, **{"model-1__safetensors": good_shard("x", "a"), "model-2__safetensors": good_shard("x", fill=ONES)}
    )
    facts = read_facts(folder)
    problem = only(facts, "HC108")
    assert problem.severity is Severity.ERROR
    assert problem.tensors == ("x",)
    assert "x in model-1.safetensors and model-2.safetensors, and no index" in problem.message
    assert first_byte(facts, "x") == bytes(8)


def test_tensor_that_the_index_does_not_name(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, model__safetensors=good_shard("a", "extra"))
    (folder / "model.safetensors.index.json").write_bytes(index(a="model.safetensors"))
    facts = read_facts(folder)
    problem = only(facts, "HC107")
    assert problem.tensors == ("extra",)
    assert "does not name; they are not used: found extra" in problem.message
    assert list(facts.tensors) == ["a"]


def test_index_names_a_missing_shard(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, model__safetensors=good_shard("a"))
    content = index(a="model.safetensors", b="model-2.safetensors", c="model-2.safetensors")
    (folder / "model.safetensors.index.json").write_bytes(content)
    facts = read_facts(folder)
    problem = only(facts, "HC106")
    assert problem.severity is Severity.ERROR
    assert problem.tensors == ("b", "c")
    assert "names model-2.safetensors, which is not there: 2 tensors, from b on" in problem.message
    assert facts.unusable == {"b", "c"}


def test_index_names_a_tensor_that_its_shard_lacks(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, **{"m1__safetensors": good_shard("a"), "m2__safetensors": good_shard("b", "c")})
    (folder / "model.safetensors.index.json").write_bytes(
        index(a="m1.safetensors", b="m2.safetensors", c="m1.safetensors", d="m2.safetensors")
    )
    facts = read_facts(folder)
    assert [problem.code for problem in facts.problems] == ["HC107", "HC106", "HC106"]
    assert "m1.safetensors that are not in it: found no c (c is in m2.safetensors)" in facts.problems[1].message
    assert "found no d" in facts.problems[2].message
    assert set(facts.tensors) == {"a", "b"}
    assert facts.unusable == {"c", "d"}


def test_damaged_shard_is_one_problem(tmp_path: Path) -> None:
    """The tensors of a shard whose header cannot be read are not reported again as missing."""
    folder = checkpoint(tmp_path, m1__safetensors=good_shard("a"), m2__safetensors=b"\0")
    (folder / "model.safetensors.index.json").write_bytes(index(a="m1.safetensors", b="m2.safetensors"))
    facts = read_facts(folder)
    assert "m2.safetensors" in only(facts, "HC101").message
    assert facts.unusable == {"b"}


@pytest.mark.parametrize("indexed", [True, False])
def test_mtp_file_beside_the_checkpoint(indexed: bool, tmp_path: Path) -> None:
    """BR-37 (b): exports that leave `mtp.safetensors` out of the index."""
    folder = checkpoint(
        tmp_path, model__safetensors=good_shard("a"), mtp__safetensors=good_shard("layers.2.eh_proj.weight")
    )
    if indexed:
        (folder / "model.safetensors.index.json").write_bytes(index(a="model.safetensors"))
    facts = read_facts(folder)
    problem = only(facts, "HC107")
    assert list(facts.tensors) == ["a"]
    assert problem.tensors == ("layers.2.eh_proj.weight",)
    assert problem.severity is (Severity.WARNING if indexed else Severity.NOTE)
    assert "mtp.safetensors is not " in problem.message
    if indexed:
        assert "add them to the weight_map of model.safetensors.index.json" in problem.hint
    else:
        assert "rename it to model-mtp.safetensors" in problem.hint


def test_leftover_copy_of_the_whole_checkpoint(tmp_path: Path) -> None:
    folder = checkpoint(
        tmp_path, **{"model-1__safetensors": good_shard("a.weight"), "old__safetensors": good_shard("a.weight")}
    )
    (folder / "model.safetensors.index.json").write_bytes(index(a__weight="model-1.safetensors"))
    problem = only(read_facts(folder), "HC107")
    assert "1 of them also in the checkpoint" in problem.message
    assert "nothing is lost" in problem.hint


def test_files_of_other_use_make_no_noise(tmp_path: Path) -> None:
    folder = checkpoint(
        tmp_path, model__safetensors=good_shard("a.weight"), activations__safetensors=good_shard("a.input")
    )
    assert read_facts(folder).problems == []


def test_damaged_file_beside_the_checkpoint(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, model__safetensors=good_shard("a.weight"), mtp__safetensors=b"\0\0")
    problem = only(read_facts(folder), "HC107")
    assert problem.severity is Severity.NOTE
    assert "mtp.safetensors is not part of the checkpoint and cannot be read" in problem.message
    assert "a file of 2 bytes" in problem.message


def test_without_model_files_all_are_the_checkpoint(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, part1__safetensors=good_shard("a"), part2__safetensors=good_shard("b"))
    facts = read_facts(folder)
    assert facts.problems == []
    assert set(facts.tensors) == {"a", "b"}


def test_numbering_tells_missing_shards(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, **{"model-00002-of-00003__safetensors": good_shard("a")})
    problem = only(read_facts(folder), "HC106")
    assert problem.tensors == ("model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors")
    assert "1 of the 3 shards that their names count" in problem.message


def test_other_index_name(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, x__safetensors=good_shard("a", "b"))
    (folder / "weights.safetensors.index.json").write_bytes(index(a="x.safetensors"))
    assert only(read_facts(folder), "HC107").tensors == ("b",)


def test_configuration_files(tmp_path: Path) -> None:
    folder = checkpoint(
        tmp_path,
        model__safetensors=good_shard("a"),
        hf_quant_config__json=b'{"quantization": {"quant_algo": "NVFP4"}}',
        generation_config__json=b'{"temperature": 0.6}',
    )
    facts = read_facts(folder)
    assert facts.config["model_type"] == "glm_moe_dsa"
    assert facts.hf_quant_config == {"quantization": {"quant_algo": "NVFP4"}}
    assert facts.generation_config == {"temperature": 0.6}
    bare = read_facts(checkpoint(tmp_path / "bare", model__safetensors=good_shard("a")))
    assert (bare.hf_quant_config, bare.generation_config) == (None, {})


def test_big_config(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, model__safetensors=good_shard("a"))
    entries = {f"model.layers.{i}.mlp": {"dtype": "fp8_e4m3", "block_size": [128, 128]} for i in range(50_000)}
    (folder / "config.json").write_text(json.dumps({"quantization_config": entries}))
    assert len(read_facts(folder).config["quantization_config"]) == 50_000


@pytest.mark.parametrize("name", checkpoint_names())
def test_real_checkpoints_have_no_problems(name: str, checkpoints: Path) -> None:
    facts = read_facts(checkpoints / name)
    assert facts.problems == []
    assert [shard.name for shard in facts.shards] == ["model.safetensors"]
    assert sum(map(len, facts.modules.values())) == len(facts.tensors)


def test_progress_counts_shards(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    folder = checkpoint(tmp_path, model1__safetensors=good_shard("a"), model2__safetensors=good_shard("b"))
    read_facts(folder, progress=lambda *event: seen.append(event))
    assert seen == [("headers", 1, 2), ("headers", 2, 2)]


def test_paused_gc_leaves_the_collector_as_it_was() -> None:
    assert gc.isenabled()
    with paused_gc():
        assert not gc.isenabled()
        with paused_gc():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), paused_gc():
        raise KeyError
    assert gc.isenabled()


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import fake_checkpoints

    yield fake_checkpoints
    for module in ("fake_checkpoints", "fake_models"):
        sys.modules.pop(module, None)


@pytest.mark.parametrize(
    "kind", ["amd-glm52-mxfp4", "nvidia-glm52-nvfp4", "amd-flash-mxfp4", "zai-glm52-fp8", "zai-flash-fp8"]
)
def test_fakes_are_sound_checkpoints(kind: str, fakes, tmp_path: Path) -> None:
    fake = fakes.write(kind, tmp_path, layers=5, experts=4)
    facts = read_facts(tmp_path)
    assert facts.problems == []
    assert {name: (t.dtype, t.shape) for name, t in facts.tensors.items()} == fake.tensors


def test_fakes_have_the_published_counts(fakes) -> None:
    """The counts of FIELD-FAULTS' table: 37,338 scales, 924 kept layers, 864 of them experts of layer 45."""
    fake = fakes.build("amd-flash-mxfp4")
    entries = fake.config["quantization_config"]["layer_quant_config"]
    assert sum(name.endswith(".weight_scale") for name in fake.tensors) == 37_338
    assert len(entries) == 924
    assert sum("layers.45.mlp.experts." in name for name in entries) == 864
    assert len(fake.tensors) == 76_108
    assert 230_000 <= len(fakes.build("nvidia-glm52-nvfp4").tensors) <= 235_000
