"""How large the caches of an engine become, with the arithmetic written out."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hadron import LLM
from hadron.cache.spec import CacheSpec, LayerCache
from hadron.errors import CapacityError, UsageError
from hadron.preflight import build
from hadron.preflight.memory import LEAST_CONTEXT, cache_sizes
from hadron.preflight.wishes import Wishes
from tests.conftest import RANDOM

#: 1000 bytes a token, 64,000 a page, and a state of 1 MB or none.
SPEC = CacheSpec((LayerCache(latent_width=500, kda=(1, 500)),), 1, "bfloat16", 64, "bfloat16")
STATELESS = CacheSpec((LayerCache(latent_width=500),), 1, "bfloat16", 64, "bfloat16")


@pytest.mark.parametrize(
    ("spec", "room", "longest", "options", "expected"),
    [
        # 100 MB are 100,000 tokens of which one request may have 30,000
        (STATELESS, 100_000_000, 30_000, {}, (30_000, 1563, 0)),
        (STATELESS, 100_000_000, 30_000, {"max_num_seqs": 2}, (30_000, 938, 0)),
        (STATELESS, 100_000_000, 1_000_000, {}, (100_000, 1563, 0)),
        (STATELESS, 100_000_000, 1_000_000, {"max_model_len": 120_000}, (120_000, 1875, 0)),
        (STATELESS, 100_000_000, 30_000, {"max_model_len": 40_000}, (30_000, 1563, 0)),
        (STATELESS, 100_000_000, 30_000, {"num_pages": 7}, (7 * 64, 7, 0)),
        (STATELESS, 0, 1_000_000, {"max_num_seqs": 1}, (LEAST_CONTEXT, 64, 0)),
        (STATELESS, 0, 100, {"max_num_seqs": 1}, (100, 2, 0)),
        # 1 MB a state: 10 for requests, a quarter of the 90 MB that are left for snapshots, 68 MB for pages
        (SPEC, 100_000_000, 1_000_000, {"max_num_seqs": 10}, (68_000, 1063, 22)),
        (SPEC, 100_000_000, 1_000_000, {"max_num_seqs": 10, "enable_prefix_caching": False}, (90_000, 1407, 0)),
        # explicit bytes take the place of the room, and are never exceeded: whole pages only, no least context
        (STATELESS, 1, 1_000_000, {"kv_cache_memory_bytes": 100_000_000}, (1562 * 64, 1562, 0)),
        (STATELESS, 10**9, 1_000_000, {"kv_cache_memory_bytes": 200_000}, (3 * 64, 3, 0)),
        (SPEC, 1, 1_000_000, {"kv_cache_memory_bytes": 100_000_000, "max_num_seqs": 10}, (1062 * 64, 1062, 22)),
    ],
)
def test_caches_are_what_fits(
    spec: CacheSpec, room: int, longest: int, options: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    assert cache_sizes(spec, Wishes(**options), room=room, max_position=longest) == expected


@pytest.mark.parametrize(
    ("options", "held", "needed"),
    [
        ({"kv_cache_memory_bytes": 2_000_000, "max_num_seqs": 2}, "2 states of 1,000,000 and pages for 0 tokens",
         "room for 1 tokens, 2,085,334 bytes"),
        ({"kv_cache_memory_bytes": 3_000_000, "max_num_seqs": 1, "max_model_len": 4096},
         "1 states of 1,000,000 and pages for 1,984 tokens", "room for 4,096 tokens, 6,461,334 bytes"),
    ],
)  # fmt: skip
def test_bytes_that_hold_no_request_are_refused(options: dict[str, Any], held: str, needed: str) -> None:
    with pytest.raises(CapacityError, match="the bytes for caches do not hold one request") as refused:
        cache_sizes(SPEC, Wishes(**options), room=10**9, max_position=10_000)
    assert refused.value.where == "--kv-cache-memory-bytes"
    assert held in refused.value.found and refused.value.accepted == needed
    assert "--max-num-seqs" in refused.value.hint
    enough = int(needed.split()[-2].replace(",", ""))
    cache_sizes(SPEC, Wishes(**{**options, "kv_cache_memory_bytes": enough}), room=0, max_position=10_000)


def test_pages_and_bytes_are_not_asked_for_together() -> None:
    with pytest.raises(UsageError, match="either this or --num-pages") as refused:
        Wishes(num_pages=3, kv_cache_memory_bytes=10**6)
    assert refused.value.where == "--kv-cache-memory-bytes"


@pytest.mark.parametrize(
    "options", [{}, {"kv_cache_memory_bytes": 1_500_000}, {"max_num_seqs": 3, "enable_prefix_caching": False}]
)
def test_the_engine_has_what_the_plan_says(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine whose memory bounds the caches of a model with states."""
    free = build.make_plan(str(RANDOM))
    small = msgspec.structs.replace(free.platform, memory=free.memory.weights * 4)
    monkeypatch.setattr(build, "detect", lambda device: small)
    memory = build.make_plan(str(RANDOM), **options).memory
    llm = LLM(RANDOM, threads=1, **options)
    manager = llm._engine._runner.manager
    assert (llm.max_model_len, llm._engine.load.pages) == (memory.max_context, memory.pages)
    assert manager.free_slots == memory.states + memory.snapshots
    assert memory.pages < memory.states * 64, "fewer than could be used"
    assert (memory.snapshots > 0) == options.get("enable_prefix_caching", True)
