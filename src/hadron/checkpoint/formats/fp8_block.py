"""DeepSeek-style FP8: `quant_method: fp8`.

One scale per block of `weight_block_size`, named `weight_scale_inv` and multiplied; without a block
size one scale per tensor. `modules_to_not_convert` (transformers) and `ignored_layers` (vLLM) name
what stays as it was, rooted or by whole components (`mlp.gate`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hadron.checkpoint.formats.base import UNKNOWN, Declaration, Rules, Source, bad_value, unknown_keys
from hadron.checkpoint.formats.matching import NameMatcher
from hadron.problems import Problem
from hadron.quantization import scheme as s
from hadron.quantization.dtypes import Element
from hadron.quantization.scheme import ActivationScheme, Granularity

_KNOWN = {
    "quant_method", "fmt", "activation_scheme", "weight_block_size", "modules_to_not_convert", "ignored_layers",
    "scale_fmt", "dequantize",
}  # fmt: skip


def parse(config: Mapping[str, Any], problems: list[Problem]) -> Rules | None:
    """The rules of a DeepSeek-style FP8 configuration, or None where it is another dialect's."""
    if config.get("quant_method") != "fp8":
        return None
    section = "quantization_config"
    unknown_keys(config, _KNOWN, section, problems)
    if (fmt := config.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        bad_value(problems, f"{section}.fmt", fmt, "e4m3")
    if (activation_scheme := config.get("activation_scheme", "dynamic")) not in ("dynamic", "static"):
        bad_value(problems, f"{section}.activation_scheme", activation_scheme, "dynamic or static")
    dynamic = activation_scheme != "static"
    block = config.get("weight_block_size")
    if block is None:
        declaration = Declaration(s.FP8_TENSOR, ActivationScheme(Element.E4M3, Granularity.TENSOR, 0, "float", dynamic))
    elif isinstance(block, list) and len(block) == 2 and all(isinstance(b, int) and b > 0 for b in block):
        activation = ActivationScheme(Element.E4M3, Granularity.GROUP, block[1], "float", dynamic)
        declaration = Declaration(s.fp8_block(*block), activation)
    else:
        bad_value(problems, f"{section}.weight_block_size", block, "two positive numbers, rows and columns")
        declaration = UNKNOWN
    key = "modules_to_not_convert" if config.get("modules_to_not_convert") else "ignored_layers"
    listed = config.get(key) or []
    if not isinstance(listed, list) or not all(isinstance(entry, str) for entry in listed):
        bad_value(problems, f"{section}.{key}", listed, "a list of module names")
        listed = []
    return Rules(
        "fp8",
        exclude_key=f"{section}.{key}",
        exclude=NameMatcher(listed, loose=True),
        exclude_source=Source.EXCLUDE if key == "modules_to_not_convert" else Source.IGNORE,
        default=("weight_block_size" if block else "quant_method", declaration),
    )
