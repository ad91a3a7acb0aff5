"""NVIDIA ModelOpt: `hf_quant_config.json`, and the same inside `config.json` (`quant_method: modelopt`).

`quant_algo` names the scheme of every linear module that `exclude_modules` (`ignore` in config.json,
globs with a trailing star) does not match; `MIXED_PRECISION` lists every quantized layer in
`quantized_layers`. The second NVFP4 scale (`weight_scale_2`) is multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hadron.checkpoint.formats.base import UNKNOWN, Declaration, Rules, Source, bad_value, unknown_keys
from hadron.checkpoint.formats.matching import NameMatcher
from hadron.problems import Problem, problem
from hadron.quantization import scheme as s
from hadron.quantization.dtypes import Element
from hadron.quantization.scheme import ActivationScheme, Granularity

_KNOWN = {
    "quant_method", "quant_algo", "kv_cache_quant_algo", "kv_cache_scheme", "group_size", "exclude_modules",
    "ignore", "quantized_layers", "config_groups", "producer", "quantization", "has_zero_point", "pre_quant_scale",
    "smoothquant_val",
}  # fmt: skip

_NVFP4_INPUT = ActivationScheme(Element.E2M1, Granularity.GROUP, 16, "e4m3", dynamic=False)
_ALGORITHMS: dict[str, Declaration] = {
    "FP8": Declaration(s.FP8_TENSOR, ActivationScheme(Element.E4M3, Granularity.TENSOR, 0, "float", dynamic=False)),
    "FP8_PER_CHANNEL_PER_TOKEN": Declaration(
        s.FP8_CHANNEL, ActivationScheme(Element.E4M3, Granularity.CHANNEL, 0, "float", dynamic=True)
    ),
    "FP8_PB_WO": Declaration(s.fp8_block(128, 128)),
    "NVFP4": Declaration(s.NVFP4, _NVFP4_INPUT),
    "W4A16_NVFP4": Declaration(s.NVFP4),
    "MXFP8": Declaration(
        s.MXFP8, ActivationScheme(Element.E4M3, Granularity.GROUP, 32, "e8m0", dynamic=True, mx_mode="ceil")
    ),
}


def parse(config: Mapping[str, Any], problems: list[Problem]) -> Rules | None:
    """The rules of a ModelOpt configuration, or None where it is another dialect's."""
    nested = config.get("quantization")
    if config.get("quant_method") not in ("modelopt", "modelopt_fp4", "modelopt_mixed") and not (
        isinstance(nested, Mapping) and "quant_algo" in nested
    ):
        return None
    section = "quantization_config" if "quant_method" in config else "hf_quant_config.json"
    unknown_keys(config, _KNOWN, section, problems)
    body = nested if isinstance(nested, Mapping) else config
    if body is nested:
        unknown_keys(nested, _KNOWN, f"{section}.quantization", problems)
    algorithm = body.get("quant_algo")
    mixed = isinstance(algorithm, str) and algorithm.upper() == "MIXED_PRECISION"
    listed = body.get("quantized_layers") if mixed else None
    layers: dict[str, Declaration] = {}
    if isinstance(listed, Mapping):
        for name, layer in listed.items():
            algo = layer.get("quant_algo") if isinstance(layer, Mapping) else layer
            layers[name] = _algorithm(algo, f"{section}.quantized_layers.{name}", problems)
    elif mixed:
        bad_value(problems, f"{section}.quantized_layers", listed, "an object of name -> quant_algo")
    key = "ignore" if "ignore" in body else "exclude_modules"
    excluded = body.get(key) or []
    if not isinstance(excluded, list) or not all(isinstance(entry, str) for entry in excluded):
        bad_value(problems, f"{section}.{key}", excluded, "a list of names and globs")
        excluded = []
    _check_group_sizes(body, layers, section, problems)
    default = None if mixed else ("quant_algo", _algorithm(algorithm, f"{section}.quant_algo", problems))
    return Rules(
        "modelopt",
        exclude_key=f"{section}.{key}",
        layers_key=f"{section}.quantized_layers",
        exclude=NameMatcher(excluded),
        exclude_source=Source.IGNORE if key == "ignore" else Source.EXCLUDE,
        layers=layers,
        layer_names=NameMatcher(layers),
        default=default,
    )


def _check_group_sizes(
    body: Mapping[str, Any], layers: Mapping[str, Declaration], section: str, problems: list[Problem]
) -> None:
    """A stated group size that its algorithm does not have."""
    stated = {"group_size": (body.get("group_size"), body.get("quant_algo"))}
    listed = body.get("quantized_layers")
    for name in layers:
        layer = listed[name] if isinstance(listed, Mapping) else None
        if isinstance(layer, Mapping):
            stated[f"quantized_layers.{name}.group_size"] = (layer.get("group_size"), layer.get("quant_algo"))
    for where, (size, algorithm) in stated.items():
        declared = _ALGORITHMS.get(algorithm.upper()) if isinstance(algorithm, str) else None
        columns = declared.scheme.columns if declared and declared.scheme else 0
        if size and columns and declared and declared.scheme and not declared.scheme.rows and size != columns:
            problems.append(
                problem(
                    "HC402", f"{section}.{where}", found=repr(size)[:40], accepted=f"{columns}, as {algorithm} has",
                    hint="the file decides; correct the configuration for engines that believe it",
                )
            )  # fmt: skip


def _algorithm(name: Any, where: str, problems: list[Problem]) -> Declaration:
    found = _ALGORITHMS.get(name.upper()) if isinstance(name, str) else None
    if found is None:
        bad_value(problems, where, name, ", ".join([*_ALGORITHMS, "MIXED_PRECISION"]))
        return UNKNOWN
    return found
