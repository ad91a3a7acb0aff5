"""AMD Quark: `quant_method: quark` (also `amd-quark` in older files).

`exclude` before `layer_quant_config` (names and globs, first match in order) before
`layer_type_quant_config` before `global_quant_config`. A weight spec may be a list: NVFP4 is FP4 per
group whose scales are FP8; FP8 per tensor followed by INT4 per channel is the two-stage INT4.
File-to-file writes exact names resolved from the checkpoint, in-memory export those of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hadron.checkpoint.formats.base import UNKNOWN, Declaration, Rules, bad_value, unknown_keys
from hadron.checkpoint.formats.matching import NameMatcher
from hadron.problems import Problem
from hadron.quantization import scheme as s
from hadron.quantization.dtypes import Element
from hadron.quantization.scheme import ActivationScheme, Granularity, QuantizationScheme

_KNOWN = {
    "quant_method", "global_quant_config", "layer_quant_config", "layer_type_quant_config", "exclude",
    "algo_config", "export", "softmax_quant_spec", "kv_cache_quant_config", "kv_cache_post_rope",
    "quant_mode", "version", "kv_cache_group", "pack_method", "weight_format", "custom_mode", "log_severity_level",
}  # fmt: skip
_LAYER_KEYS = {"weight", "input_tensors", "output_tensors", "bias", "target_device"}
_MX = {"fp4": Element.E2M1, "fp6_e2m3": Element.E2M3, "fp6_e3m2": Element.E3M2, "fp8_e4m3": Element.E4M3}


def parse(config: Mapping[str, Any], problems: list[Problem]) -> Rules | None:
    """The rules of a Quark configuration, or None where it is another dialect's."""
    if config.get("quant_method") not in ("quark", "amd-quark"):
        return None
    section = "quantization_config"
    unknown_keys(config, _KNOWN, section, problems)
    layers = _named(config.get("layer_quant_config"), f"{section}.layer_quant_config", problems)
    types = _named(config.get("layer_type_quant_config"), f"{section}.layer_type_quant_config", problems)
    default = config.get("global_quant_config")
    exclude = config.get("exclude") or []
    if not isinstance(exclude, list) or not all(isinstance(entry, str) for entry in exclude):
        bad_value(problems, f"{section}.exclude", exclude, "a list of names and patterns")
        exclude = []
    _check_packing(config, (*layers.values(), *types.values()), default, problems)
    linear_types = {entry: d for entry, d in types.items() if entry.rpartition(".")[2] in ("Linear", "nn.Linear")}
    return Rules(
        "quark",
        exclude_key=f"{section}.exclude",
        layers_key=f"{section}.layer_quant_config",
        exclude=NameMatcher(exclude, whole_regex=True),
        layers=layers,
        layer_names=NameMatcher(layers, whole_regex=True),
        by_type=next(iter(linear_types.items()), None),
        default=("global_quant_config", _layer(default, f"{section}.global_quant_config", problems))
        if default
        else None,
    )


def _check_packing(
    config: Mapping[str, Any], named: Iterable[Declaration], default: Any, problems: list[Problem]
) -> None:
    """INT4 words hold their codes in the order `reorder`; file-to-file claims it too, and stores none."""
    method = export.get("pack_method") if isinstance(export := config.get("export"), Mapping) else None
    schemes = [declaration.scheme for declaration in named]
    if isinstance(default, Mapping):
        schemes.append(_weight(default.get("weight"), "", []))
    if method not in (None, "reorder") and any(scheme and scheme.element is Element.INT4 for scheme in schemes):
        bad_value(problems, "quantization_config.export.pack_method", method, "reorder")


def _named(config: Any, where: str, problems: list[Problem]) -> dict[str, Declaration]:
    if not config:
        return {}
    if not isinstance(config, Mapping):
        bad_value(problems, where, config, "an object of name -> layer configuration")
        return {}
    seen: dict[str, Declaration] = {}  # the published files repeat one configuration hundreds of times
    named = {}
    for name, layer in config.items():
        key = repr(layer)
        if key not in seen:
            seen[key] = _layer(layer, f"{where}.{name}", problems)
        named[name] = seen[key]
    return named


def _layer(config: Any, where: str, problems: list[Problem]) -> Declaration:
    if not isinstance(config, Mapping):
        bad_value(problems, where, config, "an object with weight and input_tensors")
        return UNKNOWN
    unknown_keys(config, _LAYER_KEYS, where, problems)
    weight = _weight(config.get("weight"), f"{where}.weight", problems)
    activation = _activation(config.get("input_tensors"), f"{where}.input_tensors", problems)
    return Declaration(weight, activation, understood=weight is not None or config.get("weight") is None)


def _weight(spec: Any, where: str, problems: list[Problem]) -> QuantizationScheme | None:
    if spec is None:
        return None
    stages = spec if isinstance(spec, list) else [spec]
    if not all(isinstance(stage, Mapping) for stage in stages):
        bad_value(problems, where, spec, "a tensor specification or a list of two")
        return None
    names = [(stage.get("dtype"), stage.get("qscheme")) for stage in stages]
    if names == [("fp4", "per_group"), ("fp8_e4m3", "per_tensor")] and stages[0].get("group_size") == 16:
        return s.NVFP4
    if names == [("fp8_e4m3", "per_tensor"), ("int4", "per_channel")]:
        return s.INT4_CHANNEL_FP8
    if len(stages) != 1:
        bad_value(problems, where, names, "fp4 per_group 16 then fp8_e4m3 per_tensor, or fp8_e4m3 then int4")
        return None
    scheme = _one_stage(stages[0])
    if scheme is None:
        accepted = "fp8_e4m3 per_tensor/per_channel/per_block, fp4/fp6/fp8 per_group 32 e8m0, int8, int4"
        bad_value(problems, where, names[0], accepted)
    return scheme


def _one_stage(spec: Mapping[str, Any]) -> QuantizationScheme | None:
    dtype, qscheme, group = spec.get("dtype"), spec.get("qscheme"), spec.get("group_size")
    asymmetric = spec.get("symmetric") is False
    match dtype, qscheme:
        case (("fp4" | "fp6_e2m3" | "fp6_e3m2" | "fp8_e4m3"), "per_group") if (
            spec.get("scale_format") == "e8m0" and group == 32
        ):
            return QuantizationScheme(_MX[dtype], Granularity.GROUP, columns=32, scale="e8m0")
        case ("mx", _) if spec.get("mx_element_dtype") in _MX and group in (32, None):
            return QuantizationScheme(_MX[spec["mx_element_dtype"]], Granularity.GROUP, columns=32, scale="e8m0")
        case "fp8_e4m3", "per_tensor":
            return s.FP8_TENSOR
        case "fp8_e4m3", "per_channel":
            return s.FP8_CHANNEL
        case "fp8_e4m3", "per_block":
            block = spec.get("block_size")
            if isinstance(block, list) and len(block) == 2 and all(isinstance(b, int) and b > 0 for b in block):
                return s.fp8_block(*block)
        case "int8", "per_tensor":
            return s.INT8_TENSOR
        case "int8", "per_channel":
            return s.INT8_CHANNEL
        case "int4", "per_channel":
            return s.int4_channel(asymmetric)
        case "int4", "per_group" if isinstance(group, int) and group > 0:
            return s.int4_group(group, asymmetric)
    return None


def _activation(spec: Any, where: str, problems: list[Problem]) -> ActivationScheme:
    if spec is None:
        return s.NO_ACTIVATION
    stages = spec if isinstance(spec, list) else [spec]
    if not stages or not all(isinstance(stage, Mapping) for stage in stages):
        bad_value(problems, where, spec, "a tensor specification or a list of two")
        return s.NO_ACTIVATION
    first = stages[0]
    dynamic = bool(first.get("is_dynamic"))
    if len(stages) == 2 and first.get("dtype") == "fp4" and first.get("group_size") == 16:
        return ActivationScheme(Element.E2M1, Granularity.GROUP, 16, "e4m3", dynamic=False)
    if len(stages) == 1:
        dtype, qscheme, group = first.get("dtype"), first.get("qscheme"), first.get("group_size")
        mode = first.get("scale_calculation_mode") or "even"
        if mode not in ("even", "floor", "ceil"):
            bad_value(problems, f"{where}.scale_calculation_mode", mode, "even, floor or ceil")
            return s.NO_ACTIVATION
        match dtype, qscheme:
            case (("fp4" | "fp6_e2m3" | "fp6_e3m2" | "fp8_e4m3"), "per_group") if (
                first.get("scale_format") == "e8m0" and group == 32
            ):
                return ActivationScheme(_MX[dtype], Granularity.GROUP, 32, "e8m0", dynamic, mx_mode=mode)
            case "fp8_e4m3", "per_tensor":
                return ActivationScheme(Element.E4M3, Granularity.TENSOR, 0, "float", dynamic)
            case "fp8_e4m3", "per_channel":  # the "channel" of an activation is the token
                return ActivationScheme(Element.E4M3, Granularity.CHANNEL, 0, "float", dynamic)
            case "fp8_e4m3", "per_group" if isinstance(group, int) and group > 0:
                return ActivationScheme(Element.E4M3, Granularity.GROUP, group, "float", dynamic)
            case "int8", "per_tensor":
                return ActivationScheme(Element.INT8, Granularity.TENSOR, 0, "float", dynamic)
            case "int8", "per_channel":
                return ActivationScheme(Element.INT8, Granularity.CHANNEL, 0, "float", dynamic)
    bad_value(problems, where, [(st.get("dtype"), st.get("qscheme")) for st in stages], "a known activation scheme")
    return s.NO_ACTIVATION
