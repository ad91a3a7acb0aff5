"""Every checkpoint of the full set plans without an error, to the schemes its provenance gives."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from hadron.kernels.catalog import Catalog, Kernel
from hadron.kernels.select import CATALOGS, select
from hadron.preflight.build import make_plan
from hadron.preflight.plan import LoadPlan
from hadron.quantization.dtypes import Element
from tests.conftest import DATA, checkpoint_names
from tests.tiny.draft import Draft

#: the set's words for its formats, and the scheme each is (its README says so)
WORDS = {
    "fp8_block": "fp8_e4m3_block_128x128", "fp8_per_channel": "fp8_e4m3_channel", "fp8_per_tensor": "fp8_e4m3_tensor",
    "mxfp4": "mxfp4", "ct_mxfp4": "mxfp4", "nvfp4": "nvfp4", "ct_nvfp4": "nvfp4", "mxfp6_e2m3": "mxfp6_e2m3",
    "mxfp6_e3m2": "mxfp6_e3m2", "int8": "int8_tensor", "int4_quark_file2file": "int4_group_32",
    "int4_quark_inmemory": "int4_group_32", "ct_int4": "int4_group_128",
}  # fmt: skip


def documented_counts(folder: Path) -> Counter[str]:
    """scheme -> number of weights, from the line `Dequantized: WORD: N weights, …`."""
    text = (folder / "PROVENANCE.md").read_text()
    return Counter(
        {WORDS[word]: int(count) for word, count in re.findall(r"(?:Dequantized: |; )(\w+): (\d+) weights", text)}
    )


def documented_dtypes(folder: Path) -> dict[str, str]:
    """tensor name -> dtype, from the rows `name | dtype | shape | layers` of the table of tensors."""
    text = (folder / "PROVENANCE.md").read_text()
    stored = Draft.of(folder).tensors
    rows = re.findall(r"^\| `([^`]+)` \| (\w+) \| \[[^\]]*\] \| ([\d,]*) \|", text, re.M)
    found = {}
    for pattern, dtype, layers in rows:
        for layer in layers.split(",") if layers else [""]:
            regex = re.escape(pattern).replace(r"\{l\}", layer)
            regex = re.sub(r"\\\{\w\\\}", r"\\d+", regex)
            found |= {name: dtype for name in stored if re.fullmatch(regex, name)}
    return found


@pytest.mark.parametrize("name", checkpoint_names())
def test_a_real_checkpoint_plans_to_its_documented_schemes(checkpoints: Path, name: str) -> None:
    folder = checkpoints / name
    plan = make_plan(folder)
    assert not plan.errors and plan.ok
    assert Counter(m.scheme.name for m in plan.modules if m.scheme.quantized) == documented_counts(folder)
    claimed = [tensor for module in plan.modules for tensor in module.tensors.values()]
    assert sorted(claimed) == sorted(Draft.of(folder).tensors), "every tensor is claimed exactly once"
    documented = documented_dtypes(folder)
    assert len(documented) == len(claimed)
    for module in plan.modules:
        dtype = documented[module.tensors["weight"]]
        assert module.scheme.quantized == (dtype not in ("BF16", "F32"))
        assert module.scheme.quantized or module.scheme.name == dtype.lower()


@pytest.mark.parametrize("name", checkpoint_names())
def test_layers_towers_and_the_mtp_layer_are_seen(checkpoints: Path, name: str) -> None:
    plan = make_plan(checkpoints / name, kernels="reference")
    has_mtp = (checkpoints / name / "goldens_mtp.json").exists()
    assert (plan.mtp.present, plan.mtp.usable) == (has_mtp, has_mtp)
    assert plan.vision_present == name.startswith("glm53f")
    assert plan.attention.backend == "reference" and plan.attention.prefill_path == "mqa"
    assert plan.family == ("glm5_next" if name.startswith("glm53f") else "glm_moe_dsa")


def test_attention_runs_where_every_kv_b_proj_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native backend reads `kv_b_proj` as it is stored; where one of them cannot be, the reference attends."""
    rows = (Kernel("mla", "toy.mla", (Element.E4M3,)),)
    monkeypatch.setitem(CATALOGS, "cpu", Catalog("cpu", rows, completed_by="reference"))
    select.cache_clear()
    try:
        quantized = make_plan(DATA / "glm52-quark-mxfp4-attnptpc").attention
        mixed = make_plan(DATA / "glm53f-modelopt-nvfp4").attention
    finally:
        select.cache_clear()
    assert quantized.backend == "cpu"
    assert mixed.backend == "reference"
    assert mixed.reasons[0] == "cpu needs the mla kernels of cpu, not of reference"


def schemes(plan: LoadPlan) -> dict[str, str]:
    return {module.name: module.scheme.name for module in plan.modules}


def test_globs_and_exact_names_resolve_every_module_alike(checkpoints: Path, tmp_path: Path) -> None:
    """The same weights with a second configuration, whose layer entries are globs."""
    folder = checkpoints / "glm53f-quark-mxfp4-blockfp8"
    for file in folder.iterdir():
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").write_text((folder / "config_globs.json").read_text())
    exact, globs = make_plan(folder), make_plan(tmp_path)
    assert not globs.errors
    assert schemes(exact) == schemes(globs)
    activations = [{m.name: m.activation for m in plan.modules} for plan in (exact, globs)]
    assert activations[0] == activations[1]
    expert = "model.language_model.layers.8.mlp.experts.0.gate_proj"
    assert globs.module(expert).decided_by.entry == "model.language_model.layers.8.mlp.*"
    assert exact.module(expert).decided_by.entry == expert


def test_both_configurations_of_one_modelopt_checkpoint_agree(checkpoints: Path, tmp_path: Path) -> None:
    """`hf_quant_config.json` alone gives what `config.json` gives; where they differ, that is said."""
    folder = checkpoints / "glm52-modelopt-nvfp4"
    draft = Draft.of(folder)
    expected = schemes(make_plan(draft.write(tmp_path / "both")))
    del draft.config["quantization_config"]
    alone = make_plan(draft.write(tmp_path / "alone"))
    assert schemes(alone) == expected
    assert {str(m.decided_by.source) for m in alone.modules if m.scheme.quantized} == {"global"}
    other = Draft.of(folder)
    other.files["hf_quant_config.json"]["quantization"]["exclude_modules"].remove("lm_head")
    plan = make_plan(other.write(tmp_path / "other"))
    assert [p.code for p in plan.problems if p.code == "HC206"] == ["HC206"]
    assert "exclusions" in next(p.message for p in plan.problems if p.code == "HC206")


def test_the_goldens_are_not_taken_for_shards(checkpoints: Path) -> None:
    plan = make_plan(checkpoints / "glm52-bf16")
    assert [shard.name for shard in plan.facts.shards] == ["model.safetensors"]
    assert json.loads((checkpoints / "glm52-bf16" / "goldens.json").read_text())
