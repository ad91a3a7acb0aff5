"""What a token costs a model, from its plan alone: bytes of weights and of caches, and operations of matrices."""

from __future__ import annotations

import math

from msgspec import Struct

from hadron.cache.spec import CacheSpec
from hadron.models.inventory import LINEAR_KINDS, ModuleKind, Section
from hadron.preflight.plan import Binding, LoadPlan


class Cost(Struct, frozen=True):
    """Of one token. bytes: weights and their scales, of the experts that it takes. flops: of products by
    weights, a multiply and an add as two; without attention over the context, and without the head.
    head_flops: of the head, which a prompt needs for its last token only."""

    bytes: int
    flops: int
    head_flops: int


def token_cost(plan: LoadPlan) -> Cost:
    """The cost of a token decoded by itself."""
    assert plan.config is not None
    moe = getattr(plan.config, "moe", None)
    share = moe.top_k / moe.experts if moe is not None else 1.0
    tied = not any(b.module.kind is ModuleKind.LM_HEAD for b in plan.bindings.values())
    read = flops = head = 0.0
    for name, binding in plan.bindings.items():
        module = binding.module
        if module.spec.section is not Section.TEXT:
            continue
        used = share if ".experts." in name else 1.0
        if module.kind is ModuleKind.EMBEDDING and not tied:
            used = 1 / plan.config.vocabulary
        read += used * _bytes(plan, binding)
        work = 2 * _elements(binding)
        if module.kind is ModuleKind.LM_HEAD or (tied and module.kind is ModuleKind.EMBEDDING):
            head += work
        elif module.kind in LINEAR_KINDS:
            flops += used * work
    return Cost(round(read), round(flops), round(head))


def context_bytes(spec: CacheSpec, context: int, selected: int) -> int:
    """Bytes of its caches that a token moves behind so many others: the latents that it selects and the keys that it
    selects by, read; its request's states, read and written."""
    latents, pools = min(context, selected), context // spec.pool
    rows = sum(latents * spec.latent_bytes(c) + pools * spec.index_bytes(c) for c in spec.layers)
    return rows + 2 * spec.bytes_per_sequence


def _bytes(plan: LoadPlan, binding: Binding) -> float:
    module = binding.module
    size = sum(plan.facts.tensors[name].nbytes for name in module.tensors.values())
    return size / binding.parts / (module.shape[0] if binding.expert is not None else 1)


def _elements(binding: Binding) -> float:
    module = binding.module
    shape = module.shape[1:] if binding.expert is not None else module.shape
    return math.prod(shape) / binding.parts
