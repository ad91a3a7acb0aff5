"""compressed-tensors (llmcompressor): `quant_method: compressed-tensors`.

`config_groups` give a scheme, its targets (exact names, `re:` patterns matched from the start, or the
class `Linear`) and perhaps a format of their own; `ignore` takes precedence. Global scales of
`nvfp4-pack-quantized` are reciprocals: they are divided by.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hadron.checkpoint.formats.base import Declaration, Rules, Source, bad_value, unknown_keys
from hadron.checkpoint.formats.matching import NameMatcher
from hadron.problems import Problem
from hadron.quantization import scheme as s
from hadron.quantization.dtypes import Element
from hadron.quantization.scheme import ActivationScheme, Granularity, QuantizationScheme

_KNOWN = {
    "quant_method", "config_groups", "format", "ignore", "global_compression_ratio", "kv_cache_scheme",
    "quantization_status", "transform_config", "version", "sparsity_config",
}  # fmt: skip
FORMATS = (
    "dense", "naive-quantized", "float-quantized", "int-quantized", "pack-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision",
)  # fmt: skip


def parse(config: Mapping[str, Any], problems: list[Problem]) -> Rules | None:
    """The rules of a compressed-tensors configuration, or None where it is another dialect's."""
    if config.get("quant_method") not in ("compressed-tensors", "compressed_tensors"):
        return None
    section = "quantization_config"
    unknown_keys(config, _KNOWN, section, problems)
    _check_format(config.get("format"), f"{section}.format", problems)
    for key in ("sparsity_config", "transform_config"):
        if config.get(key):
            bad_value(problems, f"{section}.{key}", config[key], "nothing: sparsity and transforms are not implemented")
    groups = config.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        bad_value(problems, f"{section}.config_groups", groups, "an object of group name -> scheme")
        groups = {}
    layers: dict[str, Declaration] = {}
    by_type: tuple[str, Declaration] | None = None
    for name, group in groups.items():
        where = f"{section}.config_groups.{name}"
        if not isinstance(group, Mapping):
            bad_value(problems, where, group, "an object with targets, weights and input_activations")
            continue
        _check_format(group.get("format"), f"{where}.format", problems)
        scheme = _weights(group.get("weights"), where, problems)
        declaration = Declaration(
            scheme,
            _inputs(group.get("input_activations"), where, problems),
            understood=scheme is not None or group.get("weights") is None,
        )
        targets = group.get("targets") or []
        if not isinstance(targets, str | list):
            bad_value(problems, f"{where}.targets", targets, "names, re: patterns or Linear")
            targets = []
        for target in [targets] if isinstance(targets, str) else targets:
            if target == "Linear":
                by_type = by_type or (f"{name}: Linear", declaration)
            elif isinstance(target, str):
                layers.setdefault(target, declaration)
            else:
                bad_value(problems, f"{where}.targets", target, "names, re: patterns or Linear")
    ignore = config.get("ignore") or []
    if not isinstance(ignore, list) or not all(isinstance(entry, str) for entry in ignore):
        bad_value(problems, f"{section}.ignore", ignore, "a list of names and re: patterns")
        ignore = []
    return Rules(
        "compressed-tensors",
        exclude_key=f"{section}.ignore",
        layers_key=f"{section}.config_groups: targets",
        exclude=NameMatcher(ignore),
        exclude_source=Source.IGNORE,
        layers=layers,
        layer_names=NameMatcher(layers),
        by_type=by_type,
    )


def _check_format(name: Any, where: str, problems: list[Problem]) -> None:
    if name is not None and name not in FORMATS:
        bad_value(problems, where, name, ", ".join(FORMATS))


def _weights(args: Any, where: str, problems: list[Problem]) -> QuantizationScheme | None:
    if args is None:
        return None
    if isinstance(args, Mapping):
        key = (args.get("type", "int"), args.get("num_bits"), args.get("strategy"))
        group = args.get("group_size")
        asymmetric = args.get("symmetric") is False
        match key:
            case "float", 4, "tensor_group":
                return s.NVFP4
            case "float", 4, "group" if group == 32:
                return s.MXFP4
            case "float", 8, "group" if group == 32:
                return s.MXFP8
            case "float", 8, "block":
                block = args.get("block_structure")
                if isinstance(block, list) and len(block) == 2 and all(isinstance(b, int) and b > 0 for b in block):
                    return s.fp8_block(*block)
            case "float", 8, ("channel" | "tensor"):
                return s.FP8_CHANNEL if key[2] == "channel" else s.FP8_TENSOR
            case "int", 8, ("channel" | "tensor") if not asymmetric:
                return s.INT8_CHANNEL if key[2] == "channel" else s.INT8_TENSOR
            case "int", 4, "channel":
                return s.int4_channel(asymmetric)
            case "int", 4, "group" if isinstance(group, int) and group > 0:
                return s.int4_group(group, asymmetric)
        args = f"{key[0]} {key[1]} bits, strategy {key[2]}, group_size {group}"
    bad_value(problems, f"{where}.weights", args, "a strategy of the formats " + ", ".join(FORMATS))
    return None


def _inputs(args: Any, where: str, problems: list[Problem]) -> ActivationScheme:
    if args is None:
        return s.NO_ACTIVATION
    if isinstance(args, Mapping):
        key = (args.get("type", "int"), args.get("num_bits"), args.get("strategy"))
        group, dynamic = args.get("group_size"), bool(args.get("dynamic"))
        element = {"float": Element.E4M3, "int": Element.INT8}.get(key[0]) if key[1] == 8 else None
        match key:
            case "float", 4, "tensor_group":
                return ActivationScheme(
                    Element.E2M1, Granularity.GROUP, 16, "e4m3", dynamic=args.get("dynamic") is True, reciprocal=True
                )
            case "float", (4 | 8), "group" if group == 32:
                mx = Element.E2M1 if key[1] == 4 else Element.E4M3
                return ActivationScheme(mx, Granularity.GROUP, 32, "e8m0", dynamic)
            case _, _, "tensor" if element:
                return ActivationScheme(element, Granularity.TENSOR, 0, "float", dynamic)
            case _, _, ("token" | "channel") if element:
                return ActivationScheme(element, Granularity.CHANNEL, 0, "float", dynamic)
            case "float", 8, "group" if isinstance(group, int) and group > 0:
                return ActivationScheme(Element.E4M3, Granularity.GROUP, group, "float", dynamic)
        args = f"{key[0]} {key[1]} bits, strategy {key[2]}, group_size {group}"
    bad_value(problems, f"{where}.input_activations", args, "a known activation scheme")
    return s.NO_ACTIVATION
