"""Whole models, small: what a token reads is added up from the file, and a context that is put there holds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hadron.bench import limits, model
from hadron.bench.model import Asked, Sequence, measure
from hadron.bench.weigh import context_bytes, token_cost
from hadron.cache.spec import CacheSpec, LayerCache, cache_spec
from hadron.engine.build import build_model
from hadron.engine.config import EngineConfig
from hadron.errors import CheckpointError, UsageError
from hadron.kernels.cpu import native
from hadron.preflight.build import make_plan
from tests.conftest import DATA
from tests.tiny.draft import BITS, read_header

NAMES = ("glm52-quark-mxfp4-attnptpc", "glm53f-quark-mxfp4-blockfp8", "glm53f-modelopt-nvfp4", "glm52-fp8-block")


@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_a_token_are_those_of_the_tensors_that_it_reads(name: str) -> None:
    """Added up from headers by names: no vision, no extra layer, one embedding row, a share of the experts."""
    folder = DATA / name
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    layers, share = text["num_hidden_layers"], text["num_experts_per_tok"] / text["n_routed_experts"]
    total = 0.0
    for path in folder.glob("model*.safetensors"):
        for tensor, (dtype, shape) in read_header(path).items():
            size = BITS[dtype] / 8 * torch.Size(shape).numel()
            if ".visual." in tensor or f".layers.{layers}." in tensor:
                continue
            if "embed_tokens" in tensor:
                size /= text["vocab_size"]
            total += size * (share if ".experts." in tensor else 1)
    assert token_cost(make_plan(str(folder))).bytes == pytest.approx(total, rel=1e-6)


def test_operations_are_two_for_each_weight_of_a_matrix_that_is_used() -> None:
    plan = make_plan(str(DATA / "glm52-fp8-block"))
    config = json.loads((DATA / "glm52-fp8-block" / "config.json").read_text())
    experts, chosen = config["n_routed_experts"], config["num_experts_per_tok"]
    cost = token_cost(plan)
    assert cost.head_flops == 2 * config["hidden_size"] * config["vocab_size"]
    matrices = expert = 0
    for path in (DATA / "glm52-fp8-block").glob("model*.safetensors"):
        for tensor, (_, shape) in read_header(path).items():
            if len(shape) != 2 or not tensor.endswith(".weight") or "embed_tokens" in tensor or "lm_head" in tensor:
                continue
            if f".layers.{config['num_hidden_layers']}." in tensor:
                continue
            size = shape[0] * shape[1]
            matrices, expert = (matrices, expert + size) if ".experts." in tensor else (matrices + size, expert)
    assert cost.flops == 2 * (matrices + expert * chosen // experts)


def test_what_a_token_moves_of_its_caches() -> None:
    """By hand: GLM-5.2 at full size (78 layers of 576 latents, 21 with an indexer), and three layers with states."""
    full = LayerCache(latent_width=576, rope_width=64, index_width=128)
    dense = CacheSpec((full,) * 21 + (replace(full, index_width=0),) * 57, 1, "bfloat16", 64, "bfloat16")
    assert context_bytes(dense, 1000, 2048) == 78 * 1000 * 1152 + 21 * 1000 * 256
    assert context_bytes(dense, 100_000, 2048) == 78 * 2048 * 1152 + 21 * 100_000 * 256
    kda = LayerCache(kda=(64, 128), conv=(3 * 8192, 3))
    pooled = LayerCache(latent_width=512, index_width=128, tail_rows=3)
    flash = CacheSpec((kda, kda, pooled), 4, "bfloat16", 64, "fp8_e4m3")
    states = 2 * (4 * 64 * 128 * 128 + 2 * 3 * 8192 * 3) + 4 * 2 * 3 * 128
    assert context_bytes(flash, 10_003, 2051) == 2051 * 516 + 2500 * 256 + 2 * states


@pytest.mark.parametrize("name", ["glm52-fp8-block", "glm53f-quark-mxfp4-blockfp8"])
def test_a_placed_context_is_as_long_as_was_asked_and_gives_finite_logits(name: str) -> None:
    plan = make_plan(str(DATA / name), kernels="reference")
    built = build_model(plan, EngineConfig(kernels="reference", threads=1))
    sequence = Sequence(built, cache_spec(plan.config, dtype="bfloat16"), 400)  # type: ignore[arg-type]
    for context in (300, 5, 130, 0):
        sequence.place(context)
        assert sequence.cache.tokens == context
        logits = sequence.step([1, 2, 3])
        assert sequence.cache.tokens == context + 3
        assert logits.shape == (1, plan.config.vocabulary)  # type: ignore[union-attr]
        assert bool(torch.isfinite(logits).all())


@pytest.mark.skipif(not native.levels(), reason="this build has no native kernels, which the limits need")
def test_a_report_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SLICE", 1 << 16)
    monkeypatch.setattr(limits, "WORK", 1e5)
    monkeypatch.setattr(model, "ARENA", 1 << 20)
    seen: list[tuple[int, int]] = []
    config = EngineConfig(kernels="reference", threads=1)
    asked = Asked(contexts=(0, 70), tokens=(1, 5), steps=2, warmup=1, profiled=1)
    report = measure(DATA / "glm52-fp8-block", config, asked, progress=lambda *at: seen.append(at))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert [(s.context, s.tokens) for s in report.steps] == [(0, 1), (0, 5), (70, 1), (70, 5)]
    for step in report.steps:
        assert step.tokens_per_second == pytest.approx(step.tokens * 1e3 / step.ms)
        assert step.gbps == pytest.approx((report.cost.bytes + step.context_bytes) / step.ms / 1e6)
        flops = report.cost.flops * step.tokens + report.cost.head_flops
        assert step.gflops == pytest.approx(flops / step.ms / 1e6)
        rate = step.gbps if step.limit == "read_gbps" else step.gflops
        assert step.fraction == pytest.approx(rate / step.limit_value)
        parts = [*step.profile.operations, step.profile.outside]
        assert sum(part.ms for part in parts) == pytest.approx(step.profile.ms)
        assert {"norm", "router", "mla"} <= {part.name for part in step.profile.operations}
        assert step.profile.native_calls == 0  # reference kernels only


def test_a_model_that_cannot_be_loaded_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        measure(tmp_path, EngineConfig(), Asked())


def test_a_checkpoint_on_the_hub_must_be_fetched_first(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(make_plan(str(DATA / "glm52-fp8-block")), root=None)
    monkeypatch.setattr(model, "make_plan", lambda *arguments, **named: plan)
    with pytest.raises(UsageError, match="Only a checkpoint on this machine can be measured") as refused:
        measure("org/name", EngineConfig(), Asked())
    assert refused.value.hint == "fetch it with `hf download org/name`, and give the folder that it prints"
