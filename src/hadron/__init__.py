"""Hadron runs quantized GLM-5-family checkpoints as they were published.

The public names load what they need on first use: importing `hadron` loads no tensor library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hadron.batch import Selections
    from hadron.engine.request import CompletionOutput, Logprob, RequestOutput
    from hadron.engine.score import Score
    from hadron.engine.single import linear
    from hadron.errors import (
        CapacityError,
        ChangedError,
        CheckpointError,
        ConfigError,
        HadronError,
        HubError,
        NumericsError,
        PlanError,
        RequestError,
        TokenizerError,
        UnsupportedError,
        UsageError,
    )
    from hadron.llm import LLM
    from hadron.preflight.build import make_plan as check
    from hadron.preflight.plan import LoadPlan
    from hadron.sampling_params import SamplingParams, StructuredOutputsParams

__version__: str

#: public name -> (module, name there)
_PLACES = {
    "LLM": ("hadron.llm", "LLM"),
    "LoadPlan": ("hadron.preflight.plan", "LoadPlan"),
    "SamplingParams": ("hadron.sampling_params", "SamplingParams"),
    "StructuredOutputsParams": ("hadron.sampling_params", "StructuredOutputsParams"),
    "Score": ("hadron.engine.score", "Score"),
    "Selections": ("hadron.batch", "Selections"),
    "check": ("hadron.preflight.build", "make_plan"),
    "linear": ("hadron.engine.single", "linear"),
    **{name: ("hadron.engine.request", name) for name in ("CompletionOutput", "Logprob", "RequestOutput")},
    **{
        name: ("hadron.errors", name)
        for name in (
            "CapacityError", "ChangedError", "CheckpointError", "ConfigError", "HadronError", "HubError",
            "NumericsError", "PlanError", "RequestError", "TokenizerError", "UnsupportedError", "UsageError",
        )
    },
}  # fmt: skip

__all__ = [
    "LLM",
    "CapacityError",
    "ChangedError",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "HadronError",
    "HubError",
    "LoadPlan",
    "Logprob",
    "NumericsError",
    "PlanError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "Score",
    "Selections",
    "StructuredOutputsParams",
    "TokenizerError",
    "UnsupportedError",
    "UsageError",
    "__version__",
    "check",
    "linear",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("hadron-llm")
    elif name in _PLACES:
        module, there = _PLACES[name]
        value = getattr(importlib.import_module(module), there)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
