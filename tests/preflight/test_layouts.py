"""The same model under every naming and stacking that vendors, exporters and transformers write."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hadron.preflight.build import make_plan
from hadron.preflight.plan import LoadPlan
from tests.conftest import DATA
from tests.tiny.draft import Draft

FLASH = "glm53f-modelopt-nvfp4"  # transformers' own names: attn_hc.fn, forget_gate, one conv1d
VENDOR = "glm53f-quark-mxfp4-blockfp8"  # the vendor's


def parameters(plan: LoadPlan) -> set[str]:
    return set(plan.bindings)


def test_both_spellings_of_flash_fill_the_same_parameters(tmp_path: Path) -> None:
    theirs = make_plan(DATA / FLASH)
    draft = Draft.of(DATA / VENDOR)
    draft.drop("layers.8.", ".experts.")
    draft.text["num_nextn_predict_layers"] = 0
    ours = make_plan(draft.write(tmp_path))
    kda = {n for n in parameters(ours) if ".experts." not in n}
    assert kda == {n for n in parameters(theirs) if ".experts." not in n}
    assert theirs.bindings["layers.0.self_attn.k_conv1d"].part == 1
    assert theirs.bindings["layers.0.self_attn.k_conv1d"].parts == 3


def test_a_text_only_resave_drops_the_tower_from_every_name(tmp_path: Path) -> None:
    draft = Draft.of(DATA / VENDOR)
    before = parameters(make_plan(draft.write(tmp_path / "a")))
    text = draft.copy()
    text.drop("model.visual.")
    text.rename("model.language_model.", "model.")
    quantization = text.config["quantization_config"]
    text.config = text.text | {"architectures": ["Glm5NextForCausalLM"], "model_type": "glm5_next_text"}
    strip = "model.language_model."
    quantization["exclude"] = [e.replace(strip, "model.") for e in quantization["exclude"] if "visual" not in e]
    quantization["layer_quant_config"] = {
        e.replace(strip, "model."): v for e, v in quantization["layer_quant_config"].items()
    }
    text.config["quantization_config"] = quantization
    plan = make_plan(text.write(tmp_path / "b"))
    assert plan.ok and not plan.problems and plan.architecture == "Glm5NextForCausalLM"
    assert parameters(plan) == before and not plan.vision_present


@pytest.mark.parametrize(
    ("layers", "head", "vision"),
    [
        ("model.language_model.", "", "model.visual."),
        ("language_model.model.", "language_model.", "visual."),
        ("model.", "", "model.visual."),
    ],
)
@pytest.mark.parametrize("name", [VENDOR, "glm52-quark-mxfp4-attnptpc"])
def test_the_tower_is_found_under_every_prefix(tmp_path: Path, name: str, layers: str, head: str, vision: str) -> None:
    draft = Draft.of(DATA / name)
    before = make_plan(draft.write(tmp_path / "a"))
    published = "model.language_model." if name == VENDOR else "model."

    def moved(tensor: str) -> str:
        if tensor.startswith("model.visual."):
            return vision + tensor.removeprefix("model.visual.")
        return layers + tensor.removeprefix(published) if tensor.startswith(published) else head + tensor

    draft.tensors = {moved(n): entry for n, entry in draft.tensors.items()}
    plan = make_plan(draft.write(tmp_path / "b"))
    assert plan.ok and parameters(plan) == parameters(before)
    assert {n: b.module.scheme for n, b in plan.bindings.items()} == {
        n: b.module.scheme for n, b in before.bindings.items()
    }
    assert plan.vision_present == before.vision_present


@pytest.mark.parametrize("stored", ["gate_up", "apart"])
def test_stacked_experts_are_one_module_with_a_leading_axis(tmp_path: Path, stored: str) -> None:
    draft = Draft.of(DATA / VENDOR)
    before = parameters(make_plan(draft.write(tmp_path / "a")))
    at = "model.language_model.layers.3.mlp.experts."
    draft.drop(at)
    if stored == "gate_up":
        draft.tensors[at + "gate_up_proj"] = ("BF16", (5, 256, 128))
    else:
        draft.tensors |= {at + leaf: ("BF16", (5, 128, 128)) for leaf in ("gate_proj", "up_proj")}
    draft.tensors[at + "down_proj"] = ("BF16", (5, 128, 128))
    plan = make_plan(draft.write(tmp_path / "b"))
    assert plan.ok and parameters(plan) == before
    bank = plan.module(at + ("gate_up_proj" if stored == "gate_up" else "up_proj"))
    assert bank.shape[0] == 5 and bank.kind == "expert" and bank.tensors == {"weight": bank.name}
    up = plan.bindings["layers.3.mlp.experts.4.up_proj"]
    assert (up.expert, up.part, up.parts) == (4, *((1, 2) if stored == "gate_up" else (0, 1)))


def test_a_stacked_bank_may_be_quantized(tmp_path: Path) -> None:
    """A re-save of block FP8 by transformers: scales lie beside the bank under its own name."""
    draft = Draft.of(DATA / "glm52-fp8-block")
    at = "model.layers.2.mlp.experts."
    draft.drop(at)
    draft.tensors[at + "gate_up_proj"] = ("F8_E4M3", (4, 256, 256))
    draft.tensors[at + "gate_up_proj_scale_inv"] = ("F32", (4, 2, 2))
    draft.tensors[at + "down_proj"] = ("F8_E4M3", (4, 256, 128))
    draft.tensors[at + "down_proj_scale_inv"] = ("F32", (4, 2, 1))
    plan = make_plan(draft.write(tmp_path))
    assert plan.ok
    bank = plan.module(at + "gate_up_proj")
    assert bank.scheme.name == "fp8_e4m3_block_128x128" and bank.activation.name == "fp8_e4m3_group128_dynamic"
    assert bank.tensors == {"weight": at + "gate_up_proj", "scale": at + "gate_up_proj_scale_inv"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"indexer_types": ["full", "shared", "full", "shared", "full"]}, "FSFSF"),
        ({"index_topk_pattern": "FFSSF"}, "FFSSF"),
        ({"index_topk_pattern": ["full", "full", "shared", "shared", "full"]}, "FFSSF"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 2}, "FFSFS"),
        ({"index_topk_freq": 4}, "FFSSS"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, "FSFSF"),
        ({}, "FFFFF"),
        ({"indexer_types": ["full"] * 5, "index_topk_pattern": "FSSSS"}, "FFFFF"),
    ],
)
def test_which_layers_have_an_indexer(tmp_path: Path, given: dict[str, Any], expected: str) -> None:
    """The expected letters are transformers' own reading of the same keys."""
    from transformers import GlmMoeDsaConfig

    draft = Draft.of(DATA / "glm52-fp8-block")
    indexer = {
        n.split(".", 3)[3]: e for n, e in draft.tensors.items() if n.startswith("model.layers.0.self_attn.indexer")
    }
    draft.drop(*(f"layers.{i}.self_attn.indexer" for i in range(5)))
    del draft.config["indexer_types"]
    draft.config |= given
    for i, letter in enumerate(expected):
        if letter == "F":
            draft.tensors |= {f"model.layers.{i}.{rest}": entry for rest, entry in indexer.items()}
    plan = make_plan(draft.write(tmp_path))
    assert plan.ok
    assert plan.config is not None
    ours = [layer.indexer for layer in plan.config.layers]
    assert ours == GlmMoeDsaConfig(num_hidden_layers=5, **given).indexer_types
    assert "".join("F" if kind == "full" else "S" for kind in ours) == expected


def tiny_glm() -> Any:
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    return GlmMoeDsaForCausalLM(
        GlmMoeDsaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3,
            num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, kv_lora_rank=16,
            q_lora_rank=16, qk_rope_head_dim=8, v_head_dim=16, qk_nope_head_dim=16, index_topk=4, index_head_dim=16,
            index_n_heads=2, first_k_dense_replace=1, indexer_types=["full", "shared", "full"],
        )
    )  # fmt: skip


def tiny_flash() -> Any:
    from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration

    text = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
        "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "kv_lora_rank": 16, "q_lora_rank": 16, "v_head_dim": 16, "qk_nope_head_dim": 16,
        "index_topk": 8, "index_kpool": 4, "index_head_dim": 16, "index_n_heads": 2, "linear_head_dim": 8,
        "linear_num_heads": 2, "pad_token_id": 0,
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32,
        "projection_intermediate_size": 24, "patch_size": 4,
    }  # fmt: skip
    return Glm5NextForConditionalGeneration(Glm5NextConfig(text_config=text, vision_config=vision))


@pytest.mark.parametrize("make", [tiny_glm, tiny_flash])
def test_what_transformers_saves_is_understood_without_a_remark(make: Any, tmp_path: Path) -> None:
    model = make()
    model.save_pretrained(tmp_path)
    plan = make_plan(tmp_path)
    assert plan.ok and [p.message for p in plan.problems] == []
    assert plan.parameters == sum(p.numel() for p in model.parameters()) + sum(
        b.numel() for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")
    )
    assert not any(re.search(r"forget_gate|_hc\.", name) for name in plan.bindings)
