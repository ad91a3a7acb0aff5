"""What a plan says is wrong: the code, the names, found against accepted, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hadron.errors import UsageError
from hadron.preflight.build import make_plan, plan_facts
from hadron.preflight.plan import LoadPlan
from hadron.preflight.wishes import Wishes
from hadron.problems import Problem
from tests.conftest import DATA
from tests.tiny.draft import Draft

L = "model.layers."


@pytest.fixture
def fp8() -> Draft:
    """GLM-5.2 in DeepSeek-style block FP8 with an MTP layer."""
    return Draft.of(DATA / "glm52-fp8-block")


@pytest.fixture
def flash() -> Draft:
    """GLM-5.3-Flash by Quark."""
    return Draft.of(DATA / "glm53f-quark-mxfp4-blockfp8")


def only(plan: LoadPlan, code: str) -> Problem:
    (found,) = [p for p in plan.problems if p.code == code]
    return found


def errors(plan: LoadPlan) -> list[str]:
    return sorted({p.code for p in plan.errors})


def test_a_missing_tensor_is_named(fp8: Draft, tmp_path: Path) -> None:
    fp8.drop(f"{L}1.self_attn.o_proj", f"{L}2.mlp.gate.e_score")
    plan = make_plan(fp8.write(tmp_path))
    missing = [p for p in plan.problems if p.code == "HC301"]
    assert sorted(name for p in missing for name in p.tensors) == [
        f"{L}1.self_attn.o_proj.weight", f"{L}2.mlp.gate.e_score_correction_bias",
    ]  # fmt: skip
    assert errors(plan) == ["HC301"] and "no such tensor" in missing[0].message and "incomplete" in missing[0].hint


def test_every_tensor_of_a_missing_layer_is_one_line_a_shape(fp8: Draft, tmp_path: Path) -> None:
    fp8.drop(f"{L}3.")
    plan = make_plan(fp8.write(tmp_path))
    missing = [p for p in plan.problems if p.code == "HC301"]
    assert sum(len(p.tensors) for p in missing) > 20 and len(missing) < 12
    assert any("times, first" in p.message for p in missing)


def test_a_tensor_of_no_module_is_named(fp8: Draft, tmp_path: Path) -> None:
    fp8.tensors[f"{L}0.self_attn.surprise.weight"] = ("BF16", (4, 4))
    fp8.tensors[f"{L}0.self_attn.o_proj.mystery"] = ("BF16", (4,))
    fp8.tensors[f"{L}0.self_attn.rotary_emb.inv_freq"] = ("F32", (8,))
    plan = make_plan(fp8.write(tmp_path))
    left = [p for p in plan.problems if p.code == "HC302"]
    assert sorted(n for p in left for n in p.tensors) == [
        f"{L}0.self_attn.o_proj.mystery", f"{L}0.self_attn.surprise.weight",
    ]  # fmt: skip
    assert errors(plan) == ["HC302"]
    assert any("compare config.json with the file" in p.hint for p in left)


def test_fewer_layers_in_the_configuration_leave_tensors_over(fp8: Draft, tmp_path: Path) -> None:
    fp8.config["num_hidden_layers"] = 4
    fp8.config["num_nextn_predict_layers"] = 0
    plan = make_plan(fp8.write(tmp_path))
    assert not plan.ok and "HC302" in errors(plan)


def test_scales_of_quantized_caches_are_a_note(fp8: Draft, tmp_path: Path) -> None:
    fp8.tensors[f"{L}0.self_attn.k_scale"] = ("F32", ())
    fp8.tensors[f"{L}0.self_attn.kv_b_proj.v_scale"] = ("F32", ())
    plan = make_plan(fp8.write(tmp_path))
    notes = [p for p in plan.problems if p.code == "HC302"]
    assert plan.ok and {str(p.severity) for p in notes} == {"note"}
    assert "FP8 with a scale that each row is given when it is written" in notes[0].message


def test_a_bias_that_the_configuration_does_not_have(fp8: Draft, tmp_path: Path) -> None:
    fp8.tensors[f"{L}0.self_attn.q_a_proj.bias"] = ("BF16", (128,))
    left = only(make_plan(fp8.write(tmp_path / "a")), "HC302")
    assert left.tensors == (f"{L}0.self_attn.q_a_proj.bias",) and "attention_bias" in left.hint
    fp8.config["attention_bias"] = True
    plan = make_plan(fp8.write(tmp_path / "b"))
    assert plan.module(f"{L}0.self_attn.q_a_proj").tensors["bias"] == f"{L}0.self_attn.q_a_proj.bias"
    missing = only(plan, "HC301")
    assert f"{L}0.self_attn.o_proj.bias" in missing.tensors and len(missing.tensors) == 6 * 3 - 1


def test_a_wrong_shape_gives_both_shapes(fp8: Draft, tmp_path: Path) -> None:
    fp8.tensors["model.norm.weight"] = ("BF16", (255,))
    wrong = only(make_plan(fp8.write(tmp_path)), "HC303")
    assert wrong.tensors == ("model.norm",)
    assert "found BF16 [255]; accepted shape [256]" in wrong.message


def test_another_block_size_in_the_file(fp8: Draft, tmp_path: Path) -> None:
    name = f"{L}0.mlp.gate_proj"
    assert fp8.tensors[name + ".weight"][1] == (128, 256)
    fp8.tensors[name + ".weight_scale_inv"] = ("F32", (2, 4))
    plan = make_plan(fp8.write(tmp_path))
    differs = only(plan, "HC402")
    assert plan.ok and differs.tensors == (name,)
    assert "found fp8_e4m3_block_64x64 in the file; accepted fp8_e4m3_block_128x128" in differs.message
    assert plan.module(name).scheme.name == "fp8_e4m3_block_64x64"
    assert plan.module(name).decided_by.source == "facts"


def test_another_scheme_in_the_file(fp8: Draft, tmp_path: Path) -> None:
    name = f"{L}0.mlp.gate_proj"
    fp8.drop(name)
    fp8.tensors[name + ".weight"] = ("U8", (128, 128))
    fp8.tensors[name + ".weight_scale"] = ("U8", (128, 8))
    plan = make_plan(fp8.write(tmp_path))
    differs = only(plan, "HC401")
    assert plan.ok and "found mxfp4 in the file; accepted fp8_e4m3_block_128x128 (global" in differs.message
    assert plan.module(name).activation.name == "none", "what was declared was declared for another scheme"


def test_a_parameter_stored_twice(flash: Draft, tmp_path: Path) -> None:
    at = "model.language_model.layers.3.mlp.experts."
    flash.tensors[at + "gate_up_proj"] = ("BF16", (5, 256, 128))
    flash.tensors[at + "down_proj"] = ("BF16", (5, 128, 128))
    plan = make_plan(flash.write(tmp_path))
    twice = only(plan, "HC306")
    assert errors(plan) == ["HC306"] and at + "gate_up_proj" in twice.tensors
    assert at + "0.gate_proj" in twice.message and "remove one of the two" in twice.hint


def test_a_quantized_norm_is_refused(fp8: Draft, tmp_path: Path) -> None:
    fp8.tensors["model.norm.weight"] = ("F8_E4M3", (256,))
    fp8.tensors["model.norm.weight_scale"] = ("F32", ())
    plan = make_plan(fp8.write(tmp_path / "a"))
    assert "not a matrix" in only(plan, "HC405").message
    embedded = Draft.of(DATA / "glm52-fp8-block")
    embedded.tensors["model.embed_tokens.weight"] = ("F8_E4M3", (256, 256))
    embedded.tensors["model.embed_tokens.weight_scale"] = ("F32", ())
    plan = make_plan(embedded.write(tmp_path / "b"))
    refused = only(plan, "HC405")
    assert refused.tensors == ("model.embed_tokens",) and "found fp8_e4m3_tensor for embedding" in refused.message


@pytest.mark.parametrize("name", ["gate_up_proj", "gate_up_proj_scale_inv"])
def test_a_bank_of_another_number_of_experts_is_refused(fp8: Draft, tmp_path: Path, name: str) -> None:
    at = f"{L}2.mlp.experts."
    fp8.drop(at)
    fp8.tensors[at + "gate_up_proj"] = ("F8_E4M3", (4, 256, 256))
    fp8.tensors[at + "gate_up_proj_scale_inv"] = ("F32", (4, 2, 2))
    fp8.tensors[at + "down_proj"] = ("BF16", (4, 256, 128))
    dtype, shape = fp8.tensors[at + name]
    fp8.tensors[at + name] = (dtype, (3, *shape[1:]))
    wrong = only(make_plan(fp8.write(tmp_path)), "HC303")
    assert wrong.tensors == (at + "gate_up_proj",) and "accepted 4 experts along the first axis" in wrong.message
    assert "config.json describes another model" in wrong.hint


def test_a_file_that_cannot_be_read_is_not_also_a_list_of_missing_tensors(fp8: Draft, tmp_path: Path) -> None:
    fp8.write(tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:100])
    assert errors(make_plan(tmp_path)) == ["HC101"]


def test_lists_are_named_as_the_configuration_names_them(fp8: Draft, flash: Draft, tmp_path: Path) -> None:
    fp8.quantization["modules_to_not_convert"].append("model.layers.77.mlp.gate")
    assert (
        "quantization_config.modules_to_not_convert: 1 of"
        in only(make_plan(fp8.write(tmp_path / "a")), "HC207").message
    )
    flash.quantization["layer_quant_config"]["model.layers.77.mlp.gate"] = {"weight": None}
    assert (
        "quantization_config.layer_quant_config: 1 of" in only(make_plan(flash.write(tmp_path / "b")), "HC207").message
    )


def test_an_unknown_architecture_lists_the_known(fp8: Draft, tmp_path: Path) -> None:
    fp8.config["architectures"] = ["LlamaForCausalLM"]
    plan = make_plan(fp8.write(tmp_path / "a"))
    unknown = only(plan, "HC202")
    assert errors(plan) == ["HC202"] and plan.modules == () and plan.architecture == "LlamaForCausalLM"
    assert "found LlamaForCausalLM; accepted GlmMoeDsaForCausalLM, Glm5Next" in unknown.message
    del fp8.config["architectures"]
    assert "found None" in only(make_plan(fp8.write(tmp_path / "b")), "HC202").message


@pytest.mark.parametrize(
    ("where", "value", "code", "words"),
    [
        ("hidden_size", None, "HC201", "hidden_size: found nothing; accepted a whole number"),
        ("hidden_size", "many", "HC201", "found 'many'; accepted a whole number of at least 1"),
        ("num_hidden_layers", 0, "HC201", "found 0; accepted a whole number of at least 1"),
        ("rms_norm_eps", True, "HC201", "found True; accepted a number"),
        ("rope_parameters", {"rope_type": "yarn", "factor": 4.0}, "HC203", "rope_parameters: rope_type: found 'yarn'; accepted 'default'"),
        ("rope_scaling", {"type": "linear"}, "HC203", "rope_scaling: rope_type: found 'linear'"),
        ("rope_parameters", {"rope_theta": 1e6, "partial_rotary_factor": 0.5}, "HC203", "partial_rotary_factor"),
        ("rope_parameters", {"full_attention": {"rope_theta": 500.0}}, "HC203", "full_attention: found {'rope_theta': 500.0}; accepted 'nothing'"),
        ("rope_parameters", {"factor": 4.0}, "HC203", "rope_parameters: factor: found 4.0"),
        ("rope_theta", 5e5, "HC201", "rope_parameters: rope_theta: found 1000000.0; accepted 500000, as beside it"),
        ("hidden_act", "gelu", "HC203", "found 'gelu'; accepted 'silu'"),
        ("scoring_func", "softmax", "HC203", "found 'softmax'; accepted 'sigmoid'"),
        ("topk_method", "greedy", "HC203", "found 'greedy'; accepted 'noaux_tc'"),
        ("n_group", 3, "HC201", "n_group: found 3; accepted a divisor"),
        ("topk_group", 2, "HC201", "topk_group: found 2; accepted at most n_group (1)"),
        ("num_experts_per_tok", 9, "HC201", "accepted at most n_routed_experts (4)"),
        ("indexer_types", ["full"], "HC201", "indexer_types: found 1 entries; accepted a list of 5"),
        ("indexer_types", ["full", "half", "shared", "shared", "full"], "HC203", "found 'half'"),
        ("indexer_types", ["shared"] + ["full"] * 4, "HC201", "indexer_types[0]: found shared; accepted full, for the first"),
        ("mlp_layer_types", ["dense"] * 4 + ["wide"], "HC203", "found 'wide'; accepted 'dense' or 'sparse'"),
        ("layer_types", ["linear_attention"] * 5, "HC203", "layer_types"),
        ("eos_token_id", "end", "HC201", "found 'end'; accepted a token id or a list"),
        ("qk_rope_head_dim", 33, "HC201", "an even number up to index_head_dim"),
        ("quantization_config", [1], "HC201", "quantization_config: found [1]; accepted an object"),
    ],
)  # fmt: skip
def test_a_value_that_is_relied_on_is_refused_where_it_is_read(
    fp8: Draft, tmp_path: Path, where: str, value: Any, code: str, words: str
) -> None:
    fp8.config[where] = value
    plan = make_plan(fp8.write(tmp_path))
    assert not plan.ok
    found = [p for p in plan.problems if p.code == code]
    assert any(words in p.message for p in found), [p.message for p in plan.problems][:5]
    assert all(p.hint for p in plan.problems)


@pytest.mark.parametrize(
    ("where", "value", "words"),
    [
        ("qk_rope_head_dim", 16, "qk_rope_head_dim: found 16; accepted 0"),
        ("mla_use_nope", False, "mla_use_nope: found False; accepted True"),
        ("mhc", False, "mhc: found False"),
        ("index_kpool_compress", False, "index_kpool_compress"),
        ("index_topk", 18, "found 18; accepted a multiple of index_kpool (4)"),
        ("layer_types", ["sliding"] * 8, "layer_types: found 'sliding'"),
    ],
)
def test_flash_is_refused_where_it_differs(flash: Draft, tmp_path: Path, where: str, value: Any, words: str) -> None:
    flash.text[where] = value
    plan = make_plan(flash.write(tmp_path))
    assert not plan.ok and any(words in p.message for p in plan.problems)


def test_all_problems_come_at_once(fp8: Draft, tmp_path: Path) -> None:
    fp8.drop("model.norm.weight")
    fp8.tensors["model.extra.weight"] = ("BF16", (2, 2))
    fp8.tensors[f"{L}0.mlp.down_proj.weight_scale_inv"] = ("F32", (9, 9))
    fp8.tensors[f"{L}0.mlp.up_proj.weight_scale"] = ("F32", ())
    fp8.quantization["modules_to_not_convert"].append("model.layers.77.mlp.gate")
    fp8.quantization["shiny"] = 1
    plan = make_plan(fp8.write(tmp_path))
    assert {p.code for p in plan.problems} >= {"HC301", "HC302", "HC404", "HC305", "HC207", "HC204"}


def test_weights_beyond_the_memory_are_a_warning(fp8: Draft, tmp_path: Path) -> None:
    plan = make_plan(fp8.write(tmp_path))
    assert plan.memory.weights > 1_000_000 and plan.memory.max_context == 4096
    small = type(plan.platform)("cpu", "cpu", "a small machine", 2, 1_000_000, (), ("reference",), 1)
    tight = plan_facts(plan.facts, Wishes(), small)
    warning = only(tight, "HC503")
    assert tight.ok and "accepted up to 0.0 GB on a small machine" in warning.message and "disk" in warning.hint
    assert (tight.memory.max_context, tight.memory.pages) == (4096, 64), "so much is always offered"


def test_the_room_for_caches_is_the_fraction_that_was_asked_for(fp8: Draft, tmp_path: Path) -> None:
    memory = make_plan(fp8.write(tmp_path)).memory
    tokens = 6400  # more than one request may have
    size = 2 * (memory.weights + memory.state_per_sequence + tokens * memory.cache_per_token)
    plan = make_plan(tmp_path)
    machine = type(plan.platform)("cpu", "cpu", "a machine", 2, size, (), ("reference",), 1)
    found = [plan_facts(plan.facts, Wishes(memory_utilization=part), machine).memory for part in (0.5, 1.0)]
    assert found[0].pages == 100
    assert found[1].pages == -(-(size - memory.weights) // memory.cache_per_token // 64)


@pytest.mark.parametrize("wrong", [0, -1, 1.01, float("nan")])
def test_a_fraction_of_the_memory_that_is_none_is_refused(fp8: Draft, tmp_path: Path, wrong: float) -> None:
    with pytest.raises(UsageError) as refused:
        make_plan(fp8.write(tmp_path), memory_utilization=wrong)
    assert refused.value.where == "--memory-utilization" and repr(wrong) in refused.value.found


def test_kernels_that_are_not_there_are_refused_with_every_reason(fp8: Draft, tmp_path: Path) -> None:
    fp8.write(tmp_path)
    plan = make_plan(tmp_path, kernels="triton")
    refused = [p for p in plan.problems if p.code == "HC501"]
    assert not plan.ok and all("triton: this build has no Triton kernels" in p.message for p in refused)
    assert make_plan(tmp_path, kernels="reference").ok


def test_a_declared_static_scale_that_the_file_lacks_is_a_note(checkpoints: Path, tmp_path: Path) -> None:
    draft = Draft.of(checkpoints / "glm52-quark-fp8-static-inmemory")
    lost = f"{L}0.self_attn.o_proj.input_scale"
    del draft.tensors[lost]
    plan = make_plan(draft.write(tmp_path))
    note = only(plan, "HC407")
    assert plan.ok and note.tensors == (lost.removesuffix(".input_scale"),)
    assert "fp8_e4m3_tensor_static without input_scale" in note.message
    assert "accepted an input_scale beside the weight" in note.message and "weights-only" in note.hint
    asked = make_plan(tmp_path, activation_quantization="declared")
    refused = only(asked, "HC508")
    assert not asked.ok and refused.tensors == note.tensors and f"of {note.tensors[0]} cannot" in refused.message
    assert "found fp8_e4m3_tensor_static without a stored input_scale" in refused.message
    assert "accepted an input_scale beside every weight" in refused.message
    assert "use --activation-quantization none" in refused.hint


def test_no_attention_backend_is_refused_with_every_reason(fp8: Draft, tmp_path: Path) -> None:
    plan = make_plan(fp8.write(tmp_path))
    strange = type(plan.platform)("metal", "metal", "a machine that nothing runs on", 2, 10**9, (), ("reference",), 1)
    other = plan_facts(plan.facts, Wishes(), strange)
    refused = only(other, "HC502")
    assert not other.ok and "cpu runs on cpu, not on metal" in refused.message
    assert "reference runs on cpu, cuda, rocm, not on metal" in refused.message
    assert "accepted a backend that can serve the model" in refused.message
    assert "chosen automatically" in refused.hint


def test_conversions_are_said_with_their_cost(checkpoints: Path) -> None:
    plan = make_plan(checkpoints / "glm52-quark-int4-file2file")
    note = only(plan, "HC505")
    assert len(note.tensors) == 87 and f"{plan.memory.converted / 1e6:.1f} MB" in note.hint


def test_every_problem_that_is_made_has_a_documented_code(fp8: Draft, tmp_path: Path) -> None:
    from hadron.problems import CODES, problem

    with pytest.raises(KeyError):
        problem("HC999", "", found="", accepted="", hint="")
    fp8.drop("model.norm.weight")
    assert all(p.code in CODES for p in make_plan(fp8.write(tmp_path)).problems)
