"""Bytes at run time: weights, cache a token, state a sequence, and the caches and the context that fit.

The engine makes its caches as the plan says, so that `hadron check` shows what it will have.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from hadron.cache.spec import CacheSpec, cache_spec
from hadron.checkpoint.facts import Facts
from hadron.errors import CapacityError
from hadron.models.registry import FamilyConfig
from hadron.platforms.base import Platform
from hadron.preflight.plan import MemoryPlan, ModulePlan, runs
from hadron.preflight.wishes import Wishes


def tensor_bytes(facts: Facts) -> int:
    """Bytes of all tensors on disk."""
    return sum(t.data_offsets[1] - t.data_offsets[0] for t in facts.tensors.values())


#: Tokens of context that are always offered, also where the weights alone exceed the memory.
LEAST_CONTEXT = 4096
#: Of the memory for caches, the part in which states are kept for later requests, where a model has states.
SNAPSHOT_SHARE = 0.25
#: More snapshots than this are never kept.
MOST_SNAPSHOTS = 512


class CacheSizes(NamedTuple):
    """max_model_len: tokens of one request. num_pages: of the spec's page size. prefix_snapshots: states kept for
    later requests, beside one for each that runs."""

    max_model_len: int
    num_pages: int
    prefix_snapshots: int


def cache_room(weights: int, converted: int, memory: int, utilization: float) -> int:
    """Bytes for caches in `memory` bytes, of which weights and caches may take the fraction `utilization`.

    Mapped weights give way to caches: where they fill the memory, a quarter of it is counted on.
    """
    return max(0, int(max(utilization * memory - weights, utilization * memory / 4)) - converted)


def cache_sizes(spec: CacheSpec, wishes: Wishes, *, room: int, max_position: int) -> CacheSizes:
    """The caches of an engine: what was asked for, else what fits into `room` bytes; at most what can be used.

    max_position: the model's own bound on a request. `CapacityError` where `kv_cache_memory_bytes`, which takes the
    place of `room`, is too little for it.
    """
    exact = wishes.kv_cache_memory_bytes is not None
    room = max(0, (wishes.kv_cache_memory_bytes or room) - wishes.max_num_seqs * spec.bytes_per_sequence)
    snapshots = 0
    if wishes.enable_prefix_caching and spec.has_state:
        snapshots = min(MOST_SNAPSHOTS, int(SNAPSHOT_SHARE * room) // max(1, spec.bytes_per_sequence))
        room -= snapshots * spec.bytes_per_sequence
    fits = room // max(1, spec.bytes_per_page) * spec.page_size if exact else room // max(1, spec.bytes_per_token)
    if not exact:
        fits = max(LEAST_CONTEXT, fits)
    longest = min(wishes.max_model_len or max(1, fits), max_position)
    if exact and longest > fits:
        raise _too_little(spec, wishes, fits, longest)
    tokens = min(max(fits, longest), wishes.max_num_seqs * longest)
    pages = wishes.num_pages or -(-tokens // spec.page_size)
    return CacheSizes(min(longest, pages * spec.page_size), pages, snapshots)


def _too_little(spec: CacheSpec, wishes: Wishes, fits: int, longest: int) -> CapacityError:
    states = wishes.max_num_seqs * spec.bytes_per_sequence
    pages = -(-longest // spec.page_size) * spec.bytes_per_page
    if wishes.enable_prefix_caching and spec.has_state:
        pages = int(pages / (1 - SNAPSHOT_SHARE)) + 1
    return CapacityError(
        "the bytes for caches do not hold one request",
        where="--kv-cache-memory-bytes",
        found=f"{wishes.kv_cache_memory_bytes:,} bytes: {wishes.max_num_seqs} states of {spec.bytes_per_sequence:,} "
        f"and pages for {fits:,} tokens",
        accepted=f"room for {longest:,} tokens, {states + pages:,} bytes",
        hint="give more, or a smaller --max-model-len or --max-num-seqs",
    )


def plan_memory(
    config: FamilyConfig | None,
    modules: Iterable[ModulePlan],
    platform: Platform,
    wishes: Wishes,
    *,
    drafting: bool = False,
) -> MemoryPlan:
    """What the text tower takes, and the MTP layer where it drafts; the vision tower is not run.

    `CapacityError` as `cache_sizes`.
    """
    layer = len(config.layers) if config is not None and drafting else None
    weights = converted = 0
    for module in modules:
        if runs(module.spec, layer):
            weights += module.nbytes
            if module.storage.converts:
                converted += prod(module.shape) * module.scheme.bits // 8
    states, latents = wishes.max_num_seqs, wishes.latents
    if config is None:
        return MemoryPlan(weights, converted, 0, 0, 0, 0, states, 0, platform.memory, latents)
    spec = cache_spec(config, dtype=wishes.dtype, latents=latents, drafting=drafting)
    room = cache_room(weights, converted, platform.memory, wishes.memory_utilization)
    longest, pages, snapshots = cache_sizes(spec, wishes, room=room, max_position=config.max_position)
    return MemoryPlan(
        weights, converted, spec.bytes_per_token, spec.bytes_per_sequence, longest, pages, states, snapshots,
        platform.memory, latents,
    )  # fmt: skip
