"""Bytes at run time: weights, cache a token, state a sequence, and the context that fits."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from hadron.cache.spec import cache_spec
from hadron.checkpoint.facts import Facts
from hadron.models.registry import FamilyConfig
from hadron.platforms.base import Platform
from hadron.preflight.plan import MemoryPlan, ModulePlan, runs


def tensor_bytes(facts: Facts) -> int:
    """Bytes of all tensors on disk."""
    return sum(t.data_offsets[1] - t.data_offsets[0] for t in facts.tensors.values())


#: Fraction of a machine's memory that weights and caches may take, unless told otherwise.
UTILIZATION = 0.9


def cache_room(weights: int, converted: int, memory: int, utilization: float) -> int:
    """Bytes for caches in `memory` bytes, of which weights and caches may take the fraction `utilization`.

    Mapped weights give way to caches: where they fill the memory, a quarter of it is counted on.
    """
    return max(0, int(max(utilization * memory - weights, utilization * memory / 4)) - converted)


def plan_memory(
    config: FamilyConfig | None,
    modules: Iterable[ModulePlan],
    platform: Platform,
    dtype: str,
    latents: str,
    utilization: float,
    *,
    drafting: bool = False,
) -> MemoryPlan:
    """What the text tower takes, and the MTP layer where it drafts; the vision tower is not run. dtype: of
    activations; latents: of latent rows; utilization: see `cache_room`."""
    layer = len(config.layers) if config is not None and drafting else None
    weights = converted = 0
    for module in modules:
        if runs(module.spec, layer):
            weights += module.nbytes
            if module.storage.converts:
                converted += prod(module.shape) * module.scheme.bits // 8
    if config is None:
        return MemoryPlan(weights, converted, 0, 0, 0, platform.memory, latents)
    spec = cache_spec(config, dtype=dtype, latents=latents, drafting=drafting)
    left = cache_room(weights, converted, platform.memory, utilization) - spec.bytes_per_sequence
    fits = max(0, left) // max(1, spec.bytes_per_token)
    return MemoryPlan(
        weights, converted, spec.bytes_per_token, spec.bytes_per_sequence, min(fits, config.max_position),
        platform.memory, latents,
    )  # fmt: skip
