"""The table of dialects, specific before general. To add one: a file beside this, and a row here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hadron.checkpoint.formats import compressed_tensors, fp8_block, modelopt, quark
from hadron.checkpoint.formats.base import Dialect, Rules
from hadron.problems import Problem, problem

DIALECTS: dict[str, Dialect] = {
    "quark": quark.parse,
    "modelopt": modelopt.parse,
    "compressed-tensors": compressed_tensors.parse,
    "fp8": fp8_block.parse,
}


def parse_rules(config: Mapping[str, Any] | None, problems: list[Problem]) -> Rules:
    """The rules of a quantization configuration; empty ones where there is none.

    An unknown method is an error: its tensors may mean something else than they look like.
    """
    if not config:
        return Rules("none")
    for parse in DIALECTS.values():
        if (rules := parse(config, problems)) is not None:
            return rules
    problems.append(
        problem(
            "HC205", "config.json: quantization_config.quant_method", found=repr(config.get("quant_method"))[:80],
            accepted=", ".join(DIALECTS), hint="only checkpoints of these quantizers can be planned",
        )
    )  # fmt: skip
    return Rules("unknown")
