"""Faults that engines had with published checkpoints: the smallest input of each, and the right plan.

Numbers are those of `docs/field-faults.md`. Drafts start from headers that real quantizers wrote.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hadron.models.inventory import ModuleKind
from hadron.preflight.build import make_plan
from hadron.preflight.plan import LoadPlan, ModulePlan
from hadron.problems import Problem
from tests.conftest import DATA
from tests.tiny.draft import Draft, write_safetensors

GLM = "glm52-quark-mxfp4-attnptpc"
FLASH = "glm53f-quark-mxfp4-blockfp8"
L = "model.layers."
FL = "model.language_model.layers."
BLOCK = {
    "weight": {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [128, 128], "is_dynamic": False},
    "input_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_group", "group_size": 128, "is_dynamic": True},
}


@pytest.fixture
def glm() -> Draft:
    """GLM-5.2 by Quark: MXFP4 experts, per-channel FP8 attention, an MTP layer."""
    return Draft.of(DATA / GLM)


@pytest.fixture
def flash() -> Draft:
    """GLM-5.3-Flash by Quark: MXFP4 experts, block FP8 elsewhere and in the MTP layer, vision."""
    return Draft.of(DATA / FLASH)


@pytest.fixture
def fp8() -> Draft:
    """GLM-5.2 in DeepSeek-style block FP8 with an MTP layer."""
    return Draft.of(DATA / "glm52-fp8-block")


def problems(plan: LoadPlan, code: str) -> list[Problem]:
    return [p for p in plan.problems if p.code == code]


def row(module: ModulePlan) -> tuple[str, str, str, str | None]:
    return module.scheme.name, module.activation.name, str(module.decided_by.source), module.decided_by.entry


def scheme(plan: LoadPlan, name: str) -> str:
    return plan.module(name).scheme.name


def unquantize(draft: Draft, *parts: str) -> None:
    """Store every module whose name contains one of `parts` in BF16, and forget its scales."""
    from hadron.preflight.build import make_plan as plan_of  # the shapes of what is replaced

    folder = DATA / (GLM if "model.embed_tokens.weight" in draft.tensors else FLASH)
    shapes = {m.name: m.shape for m in plan_of(folder).modules}
    for name, shape in shapes.items():
        if any(part in name for part in parts) and f"{name}.weight_scale" in draft.tensors:
            del draft.tensors[f"{name}.weight_scale"]
            draft.tensors[f"{name}.weight"] = ("BF16", shape)


def test_br01_block_fp8_is_known_by_its_scale_not_by_the_suffix(flash: Draft, tmp_path: Path) -> None:
    attention, expert = f"{FL}3.self_attn.q_a_proj", f"{FL}3.mlp.experts.0.up_proj"
    assert flash.tensors[attention + ".weight_scale"][0] == "F32"
    plan = make_plan(flash.write(tmp_path / "a"))
    assert scheme(plan, attention) == "fp8_e4m3_block_128x128" and scheme(plan, expert) == "mxfp4"
    flash.rename("self_attn.q_a_proj.weight_scale", "self_attn.q_a_proj.weight_scale_inv")
    renamed = make_plan(flash.write(tmp_path / "b"))
    assert renamed.ok and row(renamed.module(attention)) == row(plan.module(attention))
    # the same tensors, excluded instead of declared
    for entry in [e for e in flash.quantization["layer_quant_config"] if "q_a_proj" in e]:
        del flash.quantization["layer_quant_config"][entry]
        flash.quantization["exclude"].append(entry)
    excluded = make_plan(flash.write(tmp_path / "c"))
    assert excluded.ok and scheme(excluded, attention) == "fp8_e4m3_block_128x128"
    assert "exclude" in problems(excluded, "HC401")[0].message


def test_br02_each_half_of_a_pair_has_its_own_entry(flash: Draft, tmp_path: Path) -> None:
    plan = make_plan(flash.write(tmp_path))
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        name = f"{FL}0.mlp.{leaf}"
        assert row(plan.module(name)) == ("fp8_e4m3_block_128x128", "fp8_e4m3_group128_dynamic", "layer", name)


def test_br03_exclusions_are_matched_on_checkpoint_names(flash: Draft, tmp_path: Path) -> None:
    plan = make_plan(flash.write(tmp_path))
    for name in (f"{FL}0.self_attn.q_proj", "model.visual.blocks.0.attn.qkv", "lm_head"):
        assert row(plan.module(name)) == ("bf16", "none", "exclude", name)
    assert not problems(plan, "HC207")


@pytest.mark.parametrize("listed", ["all", "all but one", "bank"])
def test_br04_excluding_expert_leaves_says_nothing_about_the_others(glm: Draft, tmp_path: Path, listed: str) -> None:
    experts = f"{L}2.mlp.experts."
    leaves = [f"{experts}{e}.{leaf}" for e in range(4) for leaf in ("gate_proj", "up_proj", "down_proj")]
    odd = leaves[-1]
    unquantized = leaves[:-1] if listed == "all but one" else leaves
    unquantize(glm, *unquantized)
    glm.quantization["exclude"] += [experts[:-1]] if listed == "bank" else unquantized
    plan = make_plan(glm.write(tmp_path))
    assert plan.ok
    for name in unquantized:
        assert row(plan.module(name))[:3] == ("bf16", "none", "exclude")
    assert scheme(plan, odd) == ("mxfp4" if listed == "all but one" else "bf16")
    pairs = [p.message for p in problems(plan, "HC403")]
    assert not any("experts" in message for message in pairs), "down_proj alone is odd, no pair is"


def test_br05_the_mtp_layer_resolves_by_the_same_rules(glm: Draft, tmp_path: Path) -> None:
    before = str(glm.config)
    plan = make_plan(glm.write(tmp_path))
    assert (plan.mtp.present, plan.mtp.layer) == (True, 5)
    assert row(plan.module(f"{L}5.eh_proj")) == ("bf16", "none", "exclude", f"{L}5.eh_proj")
    assert row(plan.module(f"{L}5.mlp.experts.0.up_proj"))[:3] == ("mxfp4", "mxfp4_dynamic", "global")
    assert row(plan.module(f"{L}5.self_attn.o_proj"))[:3] == ("fp8_e4m3_channel", "fp8_e4m3_token_dynamic", "layer")
    assert str(glm.config) == before


def test_br05_a_quantized_eh_proj_is_legal(glm: Draft, tmp_path: Path) -> None:
    glm.tensors[f"{L}5.eh_proj.weight"] = ("U8", (256, 256))
    glm.tensors[f"{L}5.eh_proj.weight_scale"] = ("U8", (256, 16))
    glm.quantization["exclude"].remove(f"{L}5.eh_proj")
    plan = make_plan(glm.write(tmp_path))
    assert plan.ok and row(plan.module(f"{L}5.eh_proj"))[:3] == ("mxfp4", "mxfp4_dynamic", "global")


def test_br06_an_exclusion_may_name_the_fused_tensor(flash: Draft, tmp_path: Path) -> None:
    qkv = "model.visual.blocks.0.attn.qkv"
    assert flash.tensors[qkv + ".weight"] == ("BF16", (96, 32))
    assert row(make_plan(flash.write(tmp_path)).module(qkv)) == ("bf16", "none", "exclude", qkv)


def test_br06_a_fused_weight_follows_its_parts_when_they_agree(glm: Draft, tmp_path: Path) -> None:
    fused = f"{L}0.mlp.gate_up_proj"
    glm.drop(f"{L}0.mlp.gate_proj", f"{L}0.mlp.up_proj")
    glm.tensors[fused + ".weight"] = ("BF16", (512, 256))
    plan = make_plan(glm.write(tmp_path / "a"))
    assert plan.ok and row(plan.module(fused)) == ("bf16", "none", "exclude", f"{L}0.mlp.gate_proj")
    assert plan.bindings["layers.0.mlp.up_proj"].part == 1
    glm.quantization["exclude"].remove(f"{L}0.mlp.up_proj")
    odd = make_plan(glm.write(tmp_path / "b"))
    assert scheme(odd, fused) == "bf16" and "declared differently" in problems(odd, "HC401")[0].message


def test_br07_layer_entries_keep_their_names_and_a_miss_is_not_the_global_default(flash: Draft, tmp_path: Path) -> None:
    entries = flash.quantization["layer_quant_config"]
    plan = make_plan(flash.write(tmp_path / "a"))
    for name in entries:
        assert row(plan.module(name)) == ("fp8_e4m3_block_128x128", "fp8_e4m3_group128_dynamic", "layer", name)
    entries["language_model.model.layers.3.self_attn.o_proj"] = entries.pop(f"{FL}3.self_attn.o_proj")
    missed = make_plan(flash.write(tmp_path / "b"))
    assert scheme(missed, f"{FL}3.self_attn.o_proj") == "fp8_e4m3_block_128x128"
    (unmatched,) = problems(missed, "HC207")
    assert unmatched.tensors == ("language_model.model.layers.3.self_attn.o_proj",)
    assert "match no module" in unmatched.message and unmatched.severity == "warning"
    (differs,) = problems(missed, "HC401")
    assert differs.tensors == (f"{FL}3.self_attn.o_proj",) and "mxfp4 (global" in differs.message


def test_br08_one_suffix_means_what_its_dtype_says(flash: Draft, tmp_path: Path) -> None:
    plan = make_plan(flash.write(tmp_path))
    kinds = {
        (plan.facts.tensors[m.tensors["scale"]].dtype, m.scheme.name) for m in plan.modules if "scale" in m.tensors
    }
    assert kinds == {("U8", "mxfp4"), ("F32", "fp8_e4m3_block_128x128")}
    assert all(m.tensors["scale"].endswith(".weight_scale") for m in plan.modules if "scale" in m.tensors)


def test_br10_shared_and_routed_experts_keep_their_own_schemes(glm: Draft, tmp_path: Path) -> None:
    unquantize(glm, "2.mlp.shared_experts")
    glm.quantization["exclude"].append(f"{L}2.mlp.shared_experts")
    plan = make_plan(glm.write(tmp_path))
    assert plan.ok and scheme(plan, f"{L}2.mlp.experts.0.up_proj") == "mxfp4"
    assert row(plan.module(f"{L}2.mlp.shared_experts.up_proj")) == (
        "bf16",
        "none",
        "exclude",
        f"{L}2.mlp.shared_experts",
    )


def modelopt_flash(**changes: Any) -> Draft:
    draft = Draft.of(DATA / "glm53f-modelopt-nvfp4")
    draft.files.clear()
    draft.quantization.update(changes)
    return draft


def test_br11_kda_projections_are_excluded_one_by_one(tmp_path: Path) -> None:
    ignore = ["lm_head", "model.visual*", "*.mlp.gate", "*shared_experts*", "*layers.[012].mlp*", "*.indexer.*"]
    leaves = ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "o_proj")
    leaves += ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
    plan = make_plan(modelopt_flash(ignore=ignore + [f"*.self_attn*.{leaf}" for leaf in leaves]).write(tmp_path))
    assert plan.ok and row(plan.module(f"{FL}4.self_attn.q_proj")) == ("bf16", "none", "ignore", "*.self_attn*.q_proj")
    assert not problems(plan, "HC406") and scheme(plan, f"{FL}4.mlp.experts.0.up_proj") == "nvfp4"


def test_br12_globs_start_with_the_tower_of_the_file(tmp_path: Path) -> None:
    ignore = [f"{FL}*.self_attn*", "model.visual*", "*shared_experts*", f"{FL}[012].mlp*", "*.mlp.gate", "lm_head"]
    plan = make_plan(modelopt_flash(ignore=ignore).write(tmp_path))
    assert plan.ok and not problems(plan, "HC207") and not problems(plan, "HC406")
    assert row(plan.module(f"{FL}5.self_attn.q_proj"))[2:] == ("ignore", f"{FL}*.self_attn*")
    assert row(plan.module(f"{FL}5.mlp.shared_experts.up_proj"))[2:] == ("ignore", "*shared_experts*")


def test_br14_a_misspelt_exclusion_changes_nothing_and_is_named(fp8: Draft, tmp_path: Path) -> None:
    listed = fp8.quantization["modules_to_not_convert"]
    listed.remove(f"{L}0.self_attn.indexer.weights_proj")
    listed.append(f"{L}0.self_attn.indexers_proj")
    plan = make_plan(fp8.write(tmp_path))
    assert plan.ok and scheme(plan, f"{L}0.self_attn.indexer.weights_proj") == "bf16"
    (unmatched,) = problems(plan, "HC207")
    assert unmatched.tensors == (f"{L}0.self_attn.indexers_proj",) and unmatched.severity == "warning"
    (inconsistent,) = problems(plan, "HC406")
    assert inconsistent.tensors == (f"{L}0.self_attn.indexer.weights_proj",)


def test_br15_indexer_parts_are_never_one_parameter(fp8: Draft, tmp_path: Path) -> None:
    plan = make_plan(fp8.write(tmp_path))
    wk, weights = (plan.module(f"{L}0.self_attn.indexer.{leaf}") for leaf in ("wk", "weights_proj"))
    assert (wk.scheme.name, weights.scheme.name) == ("fp8_e4m3_block_128x128", "bf16")
    assert wk.tensors["scale"] == f"{L}0.self_attn.indexer.wk.weight_scale_inv"
    assert any(p.severity == "note" and "wk fp8" in p.message for p in problems(plan, "HC403"))


def test_br16_every_scale_is_claimed_once_and_a_leftover_is_an_error(fp8: Draft, tmp_path: Path) -> None:
    wk = f"{L}0.self_attn.indexer.wk"
    fp8.tensors[wk + ".weight"] = ("BF16", (32, 256))
    plan = make_plan(fp8.write(tmp_path))
    (left,) = problems(plan, "HC305")
    assert not plan.ok and left.tensors == (wk + ".weight_scale_inv",) and "bf16 weight" in left.message


@pytest.mark.parametrize("weight_first", [True, False])
def test_br17_weight_and_scale_may_lie_in_different_shards(fp8: Draft, tmp_path: Path, weight_first: bool) -> None:
    expected = {m.name: m.scheme for m in make_plan(fp8.write(tmp_path / "one")).modules}
    scales = {n: e for n, e in fp8.tensors.items() if n.endswith("_inv")}
    rest = {n: e for n, e in fp8.tensors.items() if n not in scales}
    fp8.write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    halves = (rest, scales) if weight_first else (scales, rest)
    weight_map = {}
    for i, tensors in enumerate(halves, 1):
        shard = f"model-{i:05}-of-00002.safetensors"
        write_safetensors(tmp_path / shard, tensors)
        weight_map |= dict.fromkeys(tensors, shard)
    import json

    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    plan = make_plan(tmp_path)
    assert plan.ok and {m.name: m.scheme for m in plan.modules} == expected


def test_br18_the_last_block_of_rows_is_partial(fp8: Draft, tmp_path: Path) -> None:
    kv_a = f"{L}0.self_attn.kv_a_proj_with_mqa"
    assert fp8.tensors[kv_a + ".weight"][1][0] % 128, "not a multiple of 128"
    assert scheme(make_plan(fp8.write(tmp_path / "a")), kv_a) == "fp8_e4m3_block_128x128"
    rows, columns = fp8.tensors[kv_a + ".weight_scale_inv"][1]
    fp8.tensors[kv_a + ".weight_scale_inv"] = ("F32", (rows - 1, columns))
    short = make_plan(fp8.write(tmp_path / "b"))
    (refused,) = problems(short, "HC404")
    assert not short.ok and kv_a in refused.tensors and f"[{rows - 1}, {columns}]" in refused.message


@pytest.mark.parametrize("shape", [(256,), (256, 1)])
def test_br20_a_scale_per_row_has_one_or_two_dimensions(glm: Draft, tmp_path: Path, shape: tuple[int, ...]) -> None:
    kv_b = f"{L}0.self_attn.kv_b_proj"
    assert glm.tensors[kv_b + ".weight"][1] == (256, 128)
    glm.tensors[kv_b + ".weight_scale"] = ("F32", shape)
    assert scheme(make_plan(glm.write(tmp_path)), kv_b) == "fp8_e4m3_channel"


def test_br22_activations_follow_the_layers_own_specification(glm: Draft, flash: Draft, tmp_path: Path) -> None:
    ptpc, block = make_plan(glm.write(tmp_path / "a")), make_plan(flash.write(tmp_path / "b"))
    assert ptpc.module(f"{L}0.self_attn.o_proj").activation.name == "fp8_e4m3_token_dynamic"
    assert block.module(f"{FL}3.self_attn.o_proj").activation.name == "fp8_e4m3_group128_dynamic"


def test_br23_block_fp8_experts_are_as_good_as_block_fp8_linears(flash: Draft, tmp_path: Path) -> None:
    experts = f"{FL}4.mlp.experts."
    for name in [n for n in flash.tensors if n.startswith(experts)]:
        del flash.tensors[name]
    for e in range(5):
        for leaf in ("gate_proj", "up_proj", "down_proj"):
            flash.tensors[f"{experts}{e}.{leaf}.weight"] = ("F8_E4M3", (128, 128))
            flash.tensors[f"{experts}{e}.{leaf}.weight_scale"] = ("F32", (1, 1))
    flash.quantization["layer_quant_config"][f"{experts}*"] = BLOCK
    plan = make_plan(flash.write(tmp_path))
    assert plan.ok and plan.module(f"{experts}0.up_proj").kernel is not None
    assert row(plan.module(f"{experts}0.up_proj")) == (
        "fp8_e4m3_block_128x128", "fp8_e4m3_group128_dynamic", "layer", f"{experts}*",
    )  # fmt: skip


def test_br26_the_companions_of_an_nvfp4_expert_come_from_its_scheme(tmp_path: Path) -> None:
    draft = modelopt_flash()
    expert = f"{FL}3.mlp.experts.0.up_proj"
    plan = make_plan(draft.write(tmp_path / "a"))
    assert set(plan.module(expert).tensors) == {"weight", "scale", "global_scale", "input_scale"}
    del draft.tensors[expert + ".weight_scale_2"]
    short = make_plan(draft.write(tmp_path / "b"))
    (missing,) = problems(short, "HC304")
    assert not short.ok and missing.tensors == (expert,) and "no global scale" in missing.message


def test_br32_dense_layers_that_are_excluded_have_no_input_scale(tmp_path: Path) -> None:
    plan = make_plan(modelopt_flash().write(tmp_path))
    dense = plan.module(f"{FL}0.mlp.gate_proj")
    assert "input_scale" not in dense.tensors and row(dense)[:2] == ("bf16", "none")
    assert row(plan.module(f"{FL}3.mlp.experts.0.gate_proj"))[:2] == ("nvfp4", "nvfp4_static")


def test_br38_parts_of_unequal_schemes_are_a_note_not_a_refusal(glm: Draft, tmp_path: Path) -> None:
    unquantize(glm, "2.mlp.experts.0.gate_proj")
    plan = make_plan(glm.write(tmp_path))
    (pair,) = problems(plan, "HC403")
    assert plan.ok and pair.severity == "note" and "gate_proj bf16, up_proj mxfp4" in pair.message
    assert pair.tensors == (f"{L}2.mlp.experts.0",)


def test_br41_the_layer_number_decides_what_is_the_mtp_layer(flash: Draft, tmp_path: Path) -> None:
    for name in [n for n in flash.tensors if n.startswith(f"{FL}8.mlp.experts.") and n.endswith("scale")]:
        del flash.tensors[name]
        flash.tensors[name.removesuffix("_scale")] = ("BF16", (128, 128))
    plan = make_plan(flash.write(tmp_path))
    mtp = [m for m in plan.modules if m.spec.section == "mtp"]
    assert plan.ok and mtp and all(m.name.startswith(f"{FL}8.") and m.kernel is None for m in mtp)
    assert scheme(plan, f"{FL}8.mlp.experts.0.up_proj") == "bf16"
    assert scheme(plan, f"{FL}7.mlp.experts.0.up_proj") == "mxfp4"


def test_br42_a_stored_head_of_the_draft_is_used_and_an_absent_one_is_not_missing(glm: Draft, tmp_path: Path) -> None:
    assert make_plan(glm.write(tmp_path / "a")).ok
    vocabulary = (256, 256)
    glm.tensors[f"{L}5.shared_head.head.weight"] = ("BF16", vocabulary)
    glm.tensors[f"{L}5.embed_tokens.weight"] = ("BF16", vocabulary)
    plan = make_plan(glm.write(tmp_path / "b"))
    assert plan.ok and plan.module(f"{L}5.shared_head.head").kind == "lm_head"
    assert "layers.5.embed_tokens" in plan.bindings


def test_br43_an_orphan_scale_is_an_error_and_needed_ones_are_claimed(glm: Draft, tmp_path: Path) -> None:
    glm.tensors[f"{L}5.shared_head.head.weight_scale"] = ("F32", (256,))
    plan = make_plan(glm.write(tmp_path))
    (orphan,) = problems(plan, "HC305")
    assert orphan.tensors == (f"{L}5.shared_head.head.weight_scale",) and "without its weight" in orphan.message
    assert plan.module(f"{L}5.mlp.experts.3.up_proj").tensors["scale"].endswith("experts.3.up_proj.weight_scale")


def test_br49_an_mtp_layer_that_is_declared_and_absent_is_said(glm: Draft, tmp_path: Path) -> None:
    glm.drop(f"{L}5.")
    plan = make_plan(glm.write(tmp_path))
    assert plan.ok and (plan.mtp.present, plan.mtp.usable, plan.mtp.layer) == (False, False, 5)
    assert "the file has no layer 5" in problems(plan, "HC504")[0].message
    asked = make_plan(tmp_path, num_speculative_tokens=2)
    (refused,) = problems(asked, "HC507")
    assert not asked.ok and asked.mtp.drafts == 0 and not problems(asked, "HC504")
    assert "found config.json declares one, the file has no layer 5" in refused.message
    assert "leave --num-speculative-tokens" in refused.hint


def test_an_mtp_layer_without_an_indexer_cannot_draft(glm: Draft, tmp_path: Path) -> None:
    glm.drop(f"{L}5.self_attn.indexer")
    plan = make_plan(glm.write(tmp_path))
    assert plan.ok and plan.mtp.present and not plan.mtp.usable
    assert "no indexer tensors" in plan.mtp.reason
    asked = make_plan(tmp_path, num_speculative_tokens=1)
    assert not asked.ok and "no indexer tensors" in problems(asked, "HC507")[0].message


def test_a_plan_counts_the_layer_that_drafts_only_where_it_is_asked_for(
    glm: Draft, flash: Draft, tmp_path: Path
) -> None:
    for name, draft, layer in (("glm", glm, 5), ("flash", flash, 8)):
        folder = draft.write(tmp_path / name)
        without, drafting = make_plan(folder), make_plan(folder, num_speculative_tokens=3)
        assert without.ok and drafting.ok and (without.mtp.drafts, drafting.mtp.drafts) == (0, 3)
        own = [m for m in drafting.modules if f"layers.{layer}." in m.name]
        assert drafting.memory.weights - without.memory.weights == sum(m.nbytes for m in own) > 0
        assert drafting.memory.cache_per_token > without.memory.cache_per_token
        assert not any(without.runs(m) for m in without.modules if f"layers.{layer}." in m.name)
        for module in own:
            assert drafting.runs(module)
            assert (module.kernel is None) == (module.kind is ModuleKind.PARAMETER), module.name
            assert without.module(module.name).kernel is None
        tail = drafting.memory.state_per_sequence - without.memory.state_per_sequence
        assert tail == (2 * 3 * drafting.config.indexer.head_dim * 4 if name == "flash" else 0)


def test_br58_parameters_that_must_be_float32_are_noticed_when_they_are_not(flash: Draft, tmp_path: Path) -> None:
    flash.tensors[f"{FL}0.hc_attn_base"] = ("BF16", (24,))
    plan = make_plan(flash.write(tmp_path))
    (narrow,) = problems(plan, "HC307")
    assert narrow.tensors == (f"{FL}0.hc_attn_base",) and "less than float32" in narrow.message


def test_br73_a_declared_tower_that_is_absent_is_said(flash: Draft, tmp_path: Path) -> None:
    flash.drop("model.visual.")
    plan = make_plan(flash.write(tmp_path))
    assert plan.ok and not plan.vision_present and "images will be refused" in problems(plan, "HC506")[0].hint


def test_br73_a_tower_of_another_layout_is_an_error_and_not_left_out(flash: Draft, tmp_path: Path) -> None:
    """Patches with their channels last, the one layout seen beside that of the releases."""
    name = "model.visual.patch_embed.proj.weight"
    dtype, (out, channels, *patch) = flash.tensors[name]
    flash.tensors[name] = dtype, (out, *patch, channels)
    plan = make_plan(flash.write(tmp_path))
    (error,) = plan.errors
    assert name.removesuffix(".weight") in error.tensors and str([out, *patch, channels]) in error.message
    assert str([out, channels, *patch]) in error.message and error.hint


def test_a_tower_without_layers_is_none(flash: Draft, tmp_path: Path) -> None:
    flash.drop("model.visual.")
    flash.config["vision_config"]["depth"] = 0
    plan = make_plan(flash.write(tmp_path))
    assert plan.ok and not problems(plan, "HC506")


def test_br79_one_module_of_another_scheme_changes_no_other_modules_kernel(flash: Draft, tmp_path: Path) -> None:
    whole = make_plan(flash.write(tmp_path / "a"))
    odd = f"{FL}3.mlp.experts."
    unquantize(flash, odd)
    mixed = make_plan(flash.write(tmp_path / "b"))
    assert {m.scheme.name for m in mixed.modules if m.name.startswith(odd)} == {"bf16"}
    kernels = [{m.name: m.kernel for m in plan.modules if not m.name.startswith(odd)} for plan in (whole, mixed)]
    assert kernels[0] == kernels[1] and len(kernels[0]) > 100
