"""What loading a checkpoint takes beside the mapped files."""

from __future__ import annotations

import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hadron.engine.build import build_models
from hadron.engine.config import EngineConfig
from hadron.preflight.build import make_plan


class Live(TorchDispatchMode):
    """Bytes of the tensors that torch made and that are still there; what is mapped it did not make."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in given | set(self.sizes):
                self.sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.sizes.values()))
        return out


@pytest.mark.parametrize("name", ["glm52-quark-int4-inmemory", "glm52-quark-int4-file2file", "glm52-bf16"])
def test_br80_loading_takes_what_is_converted_and_at_most_a_layer_beside_it(checkpoints: Path, name: str) -> None:
    plan = make_plan(checkpoints / name)
    with Live() as live:
        built = build_models(plan, EngineConfig(threads=1))
    stays = sum(live.sizes.values())
    assert built.model is not None and stays <= 1.25 * plan.memory.converted, "scales are converted too"
    layers: Counter[str] = Counter()
    for runtime_name, binding in plan.bindings.items():
        first = binding.part == 0 and not binding.expert  # of what is fused or stacked
        if runtime_name.startswith("layers.") and plan.runs(binding.module) and first:
            layers[runtime_name.split(".")[1]] += binding.module.nbytes
    assert live.peak - stays < max(layers.values()) < plan.memory.weights / 2
    assert (live.peak > 0) == (plan.memory.converted > 0), "what is not converted is not copied"
