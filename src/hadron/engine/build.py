"""Executes a `LoadPlan`: maps the files, binds every parameter, builds the family's model.

Nothing is decided here. A plan with errors is refused before a byte of data is read; a file that is
no longer the planned one is refused before a layer is built.
"""

from __future__ import annotations

import importlib

import torch

from hadron.attention.select import BACKENDS, AttentionChoice
from hadron.checkpoint.load import MappedCheckpoint, OnProgress, Progress
from hadron.engine.config import EngineConfig
from hadron.engine.weights import PlannedWeights
from hadron.errors import PlanError, UsageError
from hadron.kernels.ops import OPERATIONS
from hadron.kernels.provider import Provider
from hadron.kernels.select import KernelChoice, providers, select
from hadron.models.inventory import Section
from hadron.models.language_model import LanguageModel, model_settings
from hadron.models.registry import FAMILIES
from hadron.preflight.plan import LoadPlan

#: word of `EngineConfig.dtype` -> dtype
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _silent(progress: Progress) -> None:
    del progress


def build_model(plan: LoadPlan, config: EngineConfig, progress: OnProgress = _silent) -> LanguageModel:
    """The text tower of a planned checkpoint, its parameters in place, ready for `forward`.

    `PlanError` for a plan with errors; `ChangedError` where a file changed since; `UnsupportedError` and
    `UsageError` for what the configuration asks and this build or machine cannot do.
    """
    if not plan.ok:
        raise PlanError(plan.model, plan.errors, config.flags)
    assert plan.architecture is not None and plan.config is not None
    torch.set_num_threads(threads(config))
    weights = load_weights(plan, config, progress)
    settings = model_settings(
        plan.config,
        dtype=_DTYPES[config.dtype],
        device=torch_device(config),
        attention=_attention(plan),
        kernels=_provider(plan, config),
    )
    family = importlib.import_module(FAMILIES[plan.architecture].model)
    model: LanguageModel = family.build(plan.config, weights, settings)
    weights.finish()
    return model


def load_weights(plan: LoadPlan, config: EngineConfig, progress: OnProgress = _silent) -> PlannedWeights:
    """The parameters of the text section over the mapped files. Call `finish` after the last was asked for."""
    if not plan.ok:
        raise PlanError(plan.model, plan.errors, config.flags)
    bindings = {name: b for name, b in plan.bindings.items() if b.module.spec.section is Section.TEXT}
    names = dict.fromkeys(name for b in bindings.values() for name in b.module.tensors.values())
    device = torch_device(config)
    mapped = MappedCheckpoint(plan.facts, names, progress)
    weights = PlannedWeights(
        bindings, mapped, device=device, declared=_declared(config), threads=threads(config)
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


def _declared(config: EngineConfig) -> bool:
    return config.activation_quantization == "declared"


def _provider(plan: LoadPlan, config: EngineConfig) -> Provider:
    """Where layers take the functions of operations without a weight of their own."""
    asked = providers(config.kernels, plan.platform.providers)
    chosen = {}
    for operation in OPERATIONS:
        choice = select(operation, providers=asked)
        if isinstance(choice, KernelChoice):
            chosen[operation] = choice.provider
    if _declared(config):
        # Emulation quantizes between the products of a block, so blocks are put together from products.
        chosen |= {"mlp": "reference", "moe": "reference", "router": "reference"}
    return Provider(chosen, threads=threads(config))


def _attention(plan: LoadPlan) -> AttentionChoice:
    row = next(row for row in BACKENDS if row.name == plan.attention.backend)
    return AttentionChoice(row.name, row.path, plan.attention.prefill_path, plan.attention.reasons)
