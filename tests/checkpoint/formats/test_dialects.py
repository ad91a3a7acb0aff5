"""Each dialect's configuration: what it claims for a module, what it refuses to understand."""

from __future__ import annotations

from typing import Any

import pytest

from hadron.checkpoint.formats import DIALECTS, parse_rules
from hadron.checkpoint.formats.base import Rules
from hadron.problems import Problem

P = "model.layers.3.mlp.up_proj"


def quark(weight: Any, inputs: Any = None, **rest: Any) -> dict[str, Any]:
    layer = {"weight": weight, "input_tensors": inputs}
    return {"quant_method": "quark", "global_quant_config": layer, **rest}


def spec(dtype: str, qscheme: str, **rest: Any) -> dict[str, Any]:
    return {"dtype": dtype, "qscheme": qscheme, "is_dynamic": False, "symmetric": True, **rest}


def mx(dtype: str, **rest: Any) -> dict[str, Any]:
    return spec(dtype, "per_group", group_size=32, scale_format="e8m0", **rest)


def groups(weights: Any = None, inputs: Any = None, targets: Any = "Linear", **rest: Any) -> dict[str, Any]:
    group = {"weights": weights, "input_activations": inputs, "targets": [targets]}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **rest}


def args(kind: str, bits: int, strategy: str, **rest: Any) -> dict[str, Any]:
    return {"type": kind, "num_bits": bits, "strategy": strategy, "symmetric": True, "dynamic": False, **rest}


def parsed(config: dict[str, Any]) -> tuple[Rules, list[Problem]]:
    problems: list[Problem] = []
    return parse_rules(config, problems), problems


def names(rules: Rules, module: str = P) -> tuple[str, str, str, str | None]:
    claim = rules.claim(module, linear=True)
    assert claim is not None
    declared = claim.declaration
    scheme = declared.scheme.name if declared.scheme else "unquantized"
    return scheme, declared.activation.name, str(claim.decided_by.source), claim.decided_by.entry


NVFP4 = [spec("fp4", "per_group", group_size=16, scale_format="float32"), spec("fp8_e4m3", "per_tensor")]
TWO_STAGE = [spec("fp8_e4m3", "per_tensor"), spec("int4", "per_channel", ch_axis=0)]


@pytest.mark.parametrize(
    ("config", "scheme", "activation"),
    [
        (quark(mx("fp4"), mx("fp4") | {"is_dynamic": True}), "mxfp4", "mxfp4_dynamic"),
        (quark(mx("fp6_e2m3"), mx("fp6_e2m3") | {"is_dynamic": True}), "mxfp6_e2m3", "mxfp6_e2m3_dynamic"),
        (quark(mx("fp6_e3m2")), "mxfp6_e3m2", "none"),
        (quark(NVFP4, NVFP4), "nvfp4", "nvfp4_static"),
        (quark(TWO_STAGE, spec("fp8_e4m3", "per_tensor") | {"is_dynamic": True}), "int4_channel_fp8", "fp8_e4m3_tensor_dynamic"),
        (quark(spec("fp8_e4m3", "per_tensor"), spec("fp8_e4m3", "per_tensor")), "fp8_e4m3_tensor", "fp8_e4m3_tensor_static"),
        (quark(spec("fp8_e4m3", "per_channel"), spec("fp8_e4m3", "per_channel") | {"is_dynamic": True}), "fp8_e4m3_channel", "fp8_e4m3_token_dynamic"),
        (quark(spec("fp8_e4m3", "per_block", block_size=[64, 128])), "fp8_e4m3_block_64x128", "none"),
        (quark(spec("int8", "per_tensor")), "int8_tensor", "none"),
        (quark(spec("int8", "per_channel")), "int8_channel", "none"),
        (quark(spec("int4", "per_group", group_size=128)), "int4_group_128", "none"),
        (quark(spec("int4", "per_group", group_size=128, symmetric=False)), "int4_group_128_asym", "none"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_e4m3_block_128x128", "fp8_e4m3_group128_dynamic"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8_e4m3_tensor", "fp8_e4m3_tensor_static"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8_e4m3_tensor", "fp8_e4m3_tensor_static"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4", "nvfp4_static"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, "nvfp4", "none"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "mxfp8_e4m3", "mxfp8_e4m3_dynamic"),
        ({"quantization": {"quant_algo": "NVFP4"}, "producer": {}}, "nvfp4", "nvfp4_static"),
        (groups(args("float", 4, "tensor_group", group_size=16), args("float", 4, "tensor_group", dynamic="local")), "nvfp4", "nvfp4_static"),
        (groups(args("float", 4, "group", group_size=32)), "mxfp4", "none"),
        (groups(args("float", 8, "channel"), args("float", 8, "token", dynamic=True)), "fp8_e4m3_channel", "fp8_e4m3_token_dynamic"),
        (groups(args("float", 8, "tensor"), args("float", 8, "tensor")), "fp8_e4m3_tensor", "fp8_e4m3_tensor_static"),
        (groups(args("float", 8, "block", block_structure=[128, 128]), args("float", 8, "group", group_size=128, dynamic=True)), "fp8_e4m3_block_128x128", "fp8_e4m3_group128_dynamic"),
        (groups(args("int", 8, "channel"), args("int", 8, "token", dynamic=True)), "int8_channel", "int8_token_dynamic"),
        (groups(args("int", 4, "channel")), "int4_channel", "none"),
        (groups(args("int", 4, "group", group_size=64, symmetric=False)), "int4_group_64_asym", "none"),
    ],
)  # fmt: skip
def test_a_declaration_becomes_a_scheme(config: dict[str, Any], scheme: str, activation: str) -> None:
    rules, problems = parsed(config)
    assert problems == []
    assert names(rules)[:2] == (scheme, activation)


def test_quark_looks_at_exclude_then_layer_then_type_then_global() -> None:
    fp8, int8 = {"weight": spec("fp8_e4m3", "per_channel")}, {"weight": spec("int8", "per_tensor")}
    config = quark(
        mx("fp4"),
        exclude=["lm_head", "re:.*gate", "*.layers.3.self_attn.o_proj"],
        layer_quant_config={"*self_attn*": fp8, "model.layers.3.self_attn.wk": int8, "*attn*": int8},
        layer_type_quant_config={"torch.nn.Linear": int8},
    )
    rules, problems = parsed(config)
    assert problems == []
    at = "model.layers.3.self_attn."
    assert names(rules, at + "q_proj") == ("fp8_e4m3_channel", "none", "layer", "*self_attn*")
    assert names(rules, at + "wk") == ("int8_tensor", "none", "layer", "model.layers.3.self_attn.wk")
    assert names(rules, at + "o_proj") == ("unquantized", "none", "exclude", "*.layers.3.self_attn.o_proj")
    assert names(rules, "model.layers.3.mlp.gate") == ("unquantized", "none", "exclude", "re:.*gate")
    assert names(rules) == ("int8_tensor", "none", "type", "torch.nn.Linear")
    del config["layer_type_quant_config"]
    assert names(parsed(config)[0]) == ("mxfp4", "none", "global", "global_quant_config")


def test_nothing_that_applies_is_not_the_global_default() -> None:
    layers = {"model.layers.0.mlp.up_proj": {"weight": mx("fp4")}}
    rules, _ = parsed({"quant_method": "quark", "layer_quant_config": layers})
    assert rules.claim(P, linear=True) is None
    assert parsed({})[0].claim(P, linear=True) is None
    assert parsed(quark(mx("fp4")))[0].claim("model.norm", linear=False) is None


def test_modelopt_mixed_precision_lists_every_layer() -> None:
    layers = {P: {"quant_algo": "FP8"}, "model.layers.4*": {"quant_algo": "NVFP4", "group_size": 16}}
    rules, problems = parsed(
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "exclude_modules": ["x"]}
    )  # fmt: skip
    assert problems == []
    assert names(rules) == ("fp8_e4m3_tensor", "fp8_e4m3_tensor_static", "layer", P)
    assert names(rules, "model.layers.4.mlp.up_proj")[0] == "nvfp4"
    assert rules.claim("model.layers.5.mlp.up_proj", linear=True) is None


def test_compressed_tensors_targets_and_ignore() -> None:
    config = groups(args("float", 8, "channel"), ignore=["lm_head", "re:.*gate$"])
    config["config_groups"]["experts"] = {
        "weights": args("float", 4, "group", group_size=32), "targets": ["re:.*experts.*", P],
    }  # fmt: skip
    rules, problems = parsed(config)
    assert problems == []
    assert names(rules) == ("mxfp4", "none", "layer", P)
    assert names(rules, "model.layers.3.mlp.experts.0.up_proj")[2:] == ("layer", "re:.*experts.*")
    assert names(rules, "model.layers.3.self_attn.o_proj") == ("fp8_e4m3_channel", "none", "type", "group_0: Linear")
    assert names(rules, "model.layers.3.mlp.gate") == ("unquantized", "none", "ignore", "re:.*gate$")


def test_fp8_lists_have_two_names() -> None:
    rules, _ = parsed({"quant_method": "fp8", "ignored_layers": ["mlp.gate", P]})
    assert names(rules)[2:] == ("ignore", P)
    assert names(rules, "model.layers.3.mlp.gate")[2:] == ("ignore", "mlp.gate")
    rules, _ = parsed({"quant_method": "fp8", "modules_to_not_convert": [P]})
    assert names(rules)[2:] == ("exclude", P)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (quark(spec("fp3", "per_group")), "global_quant_config.weight: found ('fp3', 'per_group')"),
        (quark(spec("int4", "per_group", group_size=32), export={"pack_method": "order"}), "pack_method: found 'order'; accepted reorder"),
        (quark(mx("fp4"), mx("fp4") | {"group_size": 64}), "input_tensors"),
        (quark(mx("fp4"), mx("fp4") | {"scale_calculation_mode": ["x"]}), "scale_calculation_mode: found ['x']; accepted even, floor or ceil"),
        # unsigned codes would be read as signed ones, off by 16 wherever a code and its zero point straddle 8
        (quark(spec("uint4", "per_group", group_size=128, symmetric=False)), "found ('uint4', 'per_group')"),
        (quark([spec("int8", "per_tensor"), spec("int4", "per_channel")]), "fp4 per_group 16 then fp8_e4m3"),
        (quark([]), "fp4 per_group 16 then"),
        (quark(7), "a tensor specification"),
        (quark(mx("fp4"), spec("int2", "per_tensor")), "input_tensors"),
        ({"quant_method": "quark", "layer_quant_config": [1]}, "layer_quant_config: found [1]"),
        (quark(mx("fp4"), exclude="lm_head"), "exclude: found 'lm_head'; accepted a list of names"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size: found [128]; accepted two positive"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt: found 'e5m2'; accepted e4m3"),
        ({"quant_method": "fp8", "modules_to_not_convert": {"a": 1}}, "a list of module names"),
        ({"quant_method": "modelopt", "quant_algo": "INT2"}, "quant_algo: found 'INT2'; accepted FP8,"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quantized_layers: found None"),
        (groups(args("float", 3, "group")), "config_groups.group_0.weights: found 'float 3 bits, strategy group"),
        (groups(args("float", 8, "tensor"), args("float", 2, "token")), "input_activations: found 'float 2 bits"),
        (groups(args("float", 8, "tensor"), format="marlin-24"), "format: found 'marlin-24'; accepted dense,"),
        (groups(args("float", 8, "tensor"), sparsity_config={"a": 1}), "sparsity and transforms are not implemented"),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, "config_groups: found [1]"),
        ({"quant_method": "awq"}, "quant_method: found 'awq'; accepted quark, modelopt, compressed-tensors, fp8"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_by_name(config: dict[str, Any], words: str) -> None:
    _, problems = parsed(config)
    assert [p.code for p in problems] == ["HC205"]
    assert words in problems[0].message and problems[0].severity == "error" and problems[0].hint


@pytest.mark.parametrize(
    "config",
    [
        quark(mx("fp4"), shiny=1),
        {"quant_method": "fp8", "shiny": 1},
        {"quant_method": "modelopt", "quant_algo": "FP8", "shiny": 1},
        groups(args("float", 8, "tensor"), shiny=1),
    ],
)
def test_an_unknown_key_is_a_note(config: dict[str, Any]) -> None:
    _, problems = parsed(config)
    assert [(p.code, str(p.severity), p.tensors) for p in problems] == [("HC204", "note", ("shiny",))]
    assert "found shiny" in problems[0].message


def test_what_is_not_understood_claims_nothing() -> None:
    rules, _ = parsed({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"})
    claim = rules.claim(P, linear=True)
    assert claim is not None and not claim.declaration.understood
    rules, _ = parsed(quark(spec("fp3", "per_group")))
    assert not names_understood(rules)
    rules, _ = parsed(groups(args("float", 3, "group")))
    assert not names_understood(rules)


def names_understood(rules: Rules) -> bool:
    claim = rules.claim(P, linear=True)
    assert claim is not None
    return claim.declaration.understood


def test_a_group_size_that_the_algorithm_does_not_have_is_a_warning() -> None:
    for config in (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32},
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {P: {"quant_algo": "NVFP4", "group_size": 32}},
        },
    ):
        _, problems = parsed(config)
        assert [(p.code, str(p.severity)) for p in problems] == [("HC402", "warning")]
        assert "group_size: found 32; accepted 16, as NVFP4 has" in problems[0].message
    assert parsed({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16})[1] == []


def test_a_pattern_that_is_no_pattern_is_an_error() -> None:
    rules, _ = parsed(quark(mx("fp4"), exclude=["re:[", "lm_head"]))
    (bad,) = [p for p in rules.check(["lm_head"]) if p.severity == "error"]
    assert bad.code == "HC205" and bad.tensors == ("re:[",) and "unterminated" in bad.message


def test_the_table_names_every_dialect_once() -> None:
    assert list(DIALECTS) == ["quark", "modelopt", "compressed-tensors", "fp8"]
