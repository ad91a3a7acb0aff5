"""`linear`: one matrix product of a checkpoint, for looking at a single weight.

Maps only what that module stores; works for every matrix of the text section, routed experts
included, and for the multi-token-prediction layer's.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hadron.checkpoint.load import MappedCheckpoint
from hadron.engine.build import kernel_provider, torch_device
from hadron.engine.config import EngineConfig
from hadron.engine.weights import PlannedWeights
from hadron.errors import PlanError, RequestError
from hadron.models.inventory import LINEAR_KINDS, ModuleKind, Section
from hadron.preflight.build import make_plan
from hadron.preflight.plan import LoadPlan


def linear(
    model: str | Path,
    module: str,
    x: Any,
    *,
    kernels: str = "auto",
    activation_quantization: str = "none",
    device: str = "cpu",
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """x times the weight of `module` (its name in the checkpoint), bias included.

    x: [tokens, in], an array or a tensor, taken as float32. Returns float32 [tokens, out].
    `RequestError` for a name that is no matrix, with names like it, and for an x of another width.
    """
    config = EngineConfig(
        kernels=kernels, activation_quantization=activation_quantization, device=device, dtype="float32"
    )
    plan = make_plan(model, kernels=kernels, device=device, activation_quantization=activation_quantization)
    if not plan.ok:
        raise PlanError(plan.model, plan.errors, config.flags)
    name = _parameter(plan, module)
    bindings = {name: plan.bindings[name]}
    mapped = MappedCheckpoint(plan.facts, bindings[name].module.tensors.values())
    weights = PlannedWeights(
        bindings,
        mapped,
        device=torch_device(config),
        declared=plan.emulates,
        kernels=kernel_provider(plan, config),
    )
    product = weights.linear(name)
    weights.finish()
    with torch.inference_mode():
        rows = torch.as_tensor(x, device=torch_device(config)).float()
        if rows.dim() != 2 or rows.shape[1] != product.in_features:
            raise RequestError(
                "The input does not fit the weight",
                where=module,
                found=f"shape {list(rows.shape)}",
                accepted=f"[tokens, {product.in_features}]",
                hint="give one row of input for each token",
            )
        result: np.ndarray[Any, np.dtype[np.float32]] = product(rows).cpu().numpy()
    return result


def _parameter(plan: LoadPlan, module: str) -> str:
    """The runtime name of a matrix that is one module of the checkpoint."""
    matrices = {
        m.name: m.spec
        for m in plan.modules
        if m.kind in LINEAR_KINDS - {ModuleKind.VISION} and m.spec.section is not Section.VISION
    }
    spec = matrices.get(module)
    if spec is not None and len(spec.provides) == 1 and len(spec.shape) == 2:
        return spec.provides[0]
    if spec is None:
        near = difflib.get_close_matches(module, matrices, n=5, cutoff=0.5)
        found, accepted = f"no matrix {module!r}", "names of matrices in this checkpoint"
        hint = "did you mean " + ", ".join(near) + "?" if near else f"see `hadron check {plan.model} --modules '*'`"
    else:
        found, accepted = (
            f"{module!r} holds {len(spec.provides)} kinds of matrices, shape {list(spec.shape)}",
            "one matrix",
        )
        hint = "matrices that are stored fused or stacked have no name of their own"
    raise RequestError("There is no such matrix", where=plan.model, found=found, accepted=accepted, hint=hint)
