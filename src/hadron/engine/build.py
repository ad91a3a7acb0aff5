"""Executes a `LoadPlan`: maps the files, binds every parameter, builds the family's model.

Nothing is decided here. A plan with errors is refused before a byte of data is read; a file that is
no longer the planned one is refused before a layer is built.
"""

from __future__ import annotations

import importlib
from typing import NamedTuple

import torch

from hadron.attention.select import BACKENDS, AttentionChoice
from hadron.checkpoint.load import MappedCheckpoint, OnProgress, Progress
from hadron.engine.config import EngineConfig
from hadron.engine.weights import PlannedWeights
from hadron.errors import PlanError, UsageError
from hadron.kernels.provider import Provider
from hadron.models.language_model import LanguageModel, model_settings
from hadron.models.mtp import Mtp
from hadron.models.registry import FAMILIES
from hadron.platforms import numa
from hadron.preflight.plan import LoadPlan

#: word of `EngineConfig.dtype` -> dtype
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _silent(progress: Progress) -> None:
    del progress


class Built(NamedTuple):
    """A text tower, and the layer that drafts for it where the plan has one to run."""

    model: LanguageModel
    mtp: Mtp | None


def build_model(plan: LoadPlan, config: EngineConfig, progress: OnProgress = _silent) -> LanguageModel:
    """The text tower of `build_models`."""
    return build_models(plan, config, progress).model


def build_models(plan: LoadPlan, config: EngineConfig, progress: OnProgress = _silent) -> Built:
    """The text tower of a planned checkpoint and what drafts, their parameters in place, ready for `forward`.

    `PlanError` for a plan with errors; `ChangedError` where a file changed since; `UnsupportedError` and
    `UsageError` for what the configuration asks and this build or machine cannot do.
    """
    if not plan.ok:
        raise PlanError(plan.model, plan.errors, config.flags)
    assert plan.architecture is not None and plan.config is not None
    torch.set_num_threads(threads(config))
    device = torch_device(config)
    # Pages that nobody reads at load lie where the policy in force later puts them.
    lasting = not (config.prefault or config.mlock)
    with numa.placement(config.numa if device.type == "cpu" else "none", lasting=lasting):
        weights = load_weights(plan, config, progress)
        return _built(plan, config, weights)


def _built(plan: LoadPlan, config: EngineConfig, weights: PlannedWeights) -> Built:
    assert plan.architecture is not None and plan.config is not None
    settings = model_settings(
        plan.config,
        dtype=_DTYPES[config.dtype],
        device=torch_device(config),
        attention=_attention(plan),
        kernels=kernel_provider(plan, config),
        drafts=plan.mtp.drafts,
    )
    family = importlib.import_module(FAMILIES[plan.architecture].model)
    model: LanguageModel = family.build(plan.config, weights, settings)
    mtp = None
    if plan.mtp.drafts:
        mtp = Mtp(plan.config, weights, settings, model)
    weights.finish()
    return Built(model, mtp)


def load_weights(plan: LoadPlan, config: EngineConfig, progress: OnProgress = _silent) -> PlannedWeights:
    """The parameters of what runs, over the mapped files. Call `finish` after the last was asked for."""
    if not plan.ok:
        raise PlanError(plan.model, plan.errors, config.flags)
    bindings = {name: b for name, b in plan.bindings.items() if plan.runs(b.module)}
    names = dict.fromkeys(name for b in bindings.values() for name in b.module.tensors.values())
    device = torch_device(config)
    mapped = MappedCheckpoint(plan.facts, names, progress)
    weights = PlannedWeights(
        bindings, mapped, device=device, declared=plan.emulates, kernels=kernel_provider(plan, config)
    )  # fmt: skip
    if config.prefault:
        mapped.prefault()
    if config.mlock:
        mapped.lock()
    return weights


def torch_device(config: EngineConfig) -> torch.device:
    """The device a configuration names; `UsageError` where torch has none."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "The device cannot be used",
            where="--device",
            found=f"cuda, with torch {torch.__version__} that sees no GPU",
            accepted="cpu, or cuda with a GPU, its driver and a build of torch for it",
            hint="use --device cpu",
        )
    return torch.device(config.device)


def threads(config: EngineConfig) -> int:
    """Threads of torch and of native kernels alike."""
    return config.threads or torch.get_num_threads()


def kernel_provider(plan: LoadPlan, config: EngineConfig) -> Provider:
    """Where layers take the functions of operations, and how many threads."""
    return Provider(plan.providers, threads=threads(config))


def _attention(plan: LoadPlan) -> AttentionChoice:
    row = next(row for row in BACKENDS if row.name == plan.attention.backend)
    return AttentionChoice(row.name, row.path, plan.attention.prefill_path, plan.attention.reasons)
