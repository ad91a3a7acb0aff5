"""A plan, or why there is none, as the JSON that `hadron check --json` prints (docs/check.md).

Sixty thousand modules are normal: everything that already is a msgspec type is encoded as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import json

from hadron.errors import HadronError
from hadron.preflight.plan import LoadPlan, ModulePlan

SCHEMA_VERSION = 1


def plan_value(plan: LoadPlan, modules: Iterable[ModulePlan] | None = None) -> dict[str, Any]:
    """The plan as a value that msgspec can encode; `modules` replaces the plan's own where given."""
    memory = plan.memory
    return {
        "schema_version": SCHEMA_VERSION,
        "model": _text(plan.model),
        "family": plan.family,
        "architecture": plan.architecture,
        "ok": plan.ok,
        "parameters": plan.parameters,
        "bytes": plan.bytes,
        "modules": [
            {
                "name": module.spec.name,
                "kind": module.spec.kind,
                "shape": module.spec.shape,
                "scheme": module.scheme.name,
                "activation": module.activation.name,
                "tensors": module.tensors,
                "decided_by": module.decided_by,
                "kernel": module.kernel.name if module.kernel else None,
            }
            for module in (plan.modules if modules is None else modules)
        ],
        "problems": plan.problems,
        "mtp": plan.mtp,
        "vision": {"present": plan.vision_present},
        "attention": plan.attention,
        "memory": {
            "weights": memory.weights,
            "cache_per_token": memory.cache_per_token,
            "state_per_sequence": memory.state_per_sequence,
            "max_context": memory.max_context,
            "pages": memory.pages,
            "states": memory.states,
            "snapshots": memory.snapshots,
            "cache_dtype": memory.cache_dtype,
        },
    }


def error_value(model: str | None, error: HadronError) -> dict[str, Any]:
    """What is printed where there is no plan."""
    return {
        "schema_version": SCHEMA_VERSION,
        "model": None if model is None else _text(model),
        "ok": False,
        "error": error.parts(),
    }


def _text(path: str) -> str:
    """A path as valid Unicode: bytes that are none become `?`."""
    return path.encode("utf-8", "replace").decode("utf-8")


def encode(value: dict[str, Any]) -> bytes:
    """UTF-8 JSON on one line, with its line end."""
    return json.encode(value) + b"\n"
