"""A step is a number of tokens for each request: batches, splits, rewinds and paths change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hadron.errors import CapacityError, NumericsError, RequestError
from tiny.oracle import DictWeights, Oracle, Run, build, distance, tokens

CLOSE = 2e-5  # float32 sums in another order, through a few layers
FAMILIES = ("glm_moe_dsa", "glm5_next")
OVERRIDES: dict[str, dict[str, Any]] = {
    "glm_moe_dsa": {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]},
    "glm5_next": {
        "num_hidden_layers": 5, "indexer_types": ["full"] * 4 + ["shared"], "mlp_layer_types": ["dense"] + ["sparse"] * 4,
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"] + ["indexed_attention"] * 2,
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest) -> tuple[Any, DictWeights]:
    oracle = Oracle(request.param, OVERRIDES[request.param])
    return oracle.config, oracle.weights


def test_two_requests_equal_each_alone(tiny: tuple[Any, DictWeights]) -> None:
    config, weights = tiny
    run = Run(build(config, weights), config)
    first, second = tokens(30, 1), tokens(41, 2)
    alone = [run.logits(first), run.logits(second)]
    a, b = run.manager.admit(), run.manager.admit()
    rows_a, rows_b = [], []
    for ids_a, ids_b in ((first[:7], second[:18]), (first[7:29], second[18:31]), (first[29:], second[31:])):
        got = run.step((a, ids_a), (b, ids_b))
        rows_a.append(got[0])
        rows_b.append(got[1])
    assert distance(torch.cat(rows_a), alone[0]) < CLOSE
    assert distance(torch.cat(rows_b), alone[1]) < CLOSE


def test_decodes_first_then_a_prefill(tiny: tuple[Any, DictWeights]) -> None:
    config, weights = tiny
    run = Run(build(config, weights), config)
    first, second, third = tokens(20, 3), tokens(11, 4), tokens(26, 5)
    expected = [run.logits(ids)[-1:] for ids in (first, second, third)]
    a, b, c = (run.manager.admit() for _ in range(3))
    run.step((a, first[:-1]))
    run.step((b, second[:-1]))
    run.step((c, third[:9]))
    found = run.step((a, first[-1:]), (b, second[-1:]), (c, third[9:]))
    for logits, row in zip(found, expected, strict=True):
        assert distance(logits[-1:], row) < CLOSE


def test_a_batch_with_decodes_behind_is_refused(tiny: tuple[Any, DictWeights]) -> None:
    config, weights = tiny
    run = Run(build(config, weights), config)
    a, b = run.manager.admit(), run.manager.admit()
    with pytest.raises(ValueError, match=r"decodes .* must come first"):
        run.step((a, [1, 2, 3]), (b, [4]))


def test_br59_a_split_at_every_layer_equals_the_single_run(tiny: tuple[Any, DictWeights]) -> None:
    """Streams, and the selection a shared layer needs, cross every boundary."""
    config, weights = tiny
    model = build(config, weights)
    ids = tokens(24, 6)
    whole = Run(model, config).logits(ids)
    for at in range(1, len(config.layers)):
        run = Run(model, config)
        cache = run.manager.admit()
        with torch.inference_mode():
            batch = run.batch([(cache, ids)])
            metadata = model.prepare(batch)
            carry = model.run_layers(batch, metadata, model.embed(batch), 0, at)
            carry = model.run_layers(batch, metadata, carry, at, len(config.layers))
            batch.advance()
            logits = model.logits(model.finish(carry))
        assert torch.equal(logits, whole), f"split before layer {at}"


def test_dense_prefill_equals_mqa_and_is_left_when_selection_bites(tiny: tuple[Any, DictWeights]) -> None:
    config, weights = tiny
    dense, sparse = (Run(build(config, weights, prefill=p), config) for p in ("dense_mha", "mqa"))
    budget = dense.model.settings.attention.selection_budget
    assert budget == 8
    ids, other = tokens(30, 7), tokens(8, 8)
    a, b = dense.manager.admit(), dense.manager.admit()
    with torch.inference_mode():
        taken = dense.model.prepare(dense.batch([(a, ids[:5]), (b, other[:8])]))
        assert taken.prefill is not None and taken.prefill_max_seq_len == 8
        left = dense.model.prepare(dense.batch([(a, ids[:9])]))
        assert left.prefill is None and left.prefill_max_seq_len == 0
    found_a, found_b = dense.step((a, ids[:5]), (b, other))
    assert distance(found_a, sparse.logits(ids[:5])) < CLOSE
    assert distance(found_b, sparse.logits(other)) < CLOSE
    c = dense.manager.admit()
    mixed = dense.step((a, ids[5:6]), (c, other[:4]))  # a decode takes mqa beside a dense prefill
    assert distance(mixed[0], sparse.logits(ids[:6])[-1:]) < CLOSE
    assert distance(mixed[1], sparse.logits(other[:4])) < CLOSE
    rest = dense.step((a, ids[6:]))[0]
    assert distance(rest, sparse.logits(ids)[6:]) < CLOSE


def test_snapshot_and_restore_repeat_the_same_logits(tiny: tuple[Any, DictWeights]) -> None:
    config, weights = tiny
    for at in (3, 4, 15, 16, 17, 21):
        run = Run(build(config, weights), config)
        ids = tokens(40, 9)
        cache = run.manager.admit()
        run.step((cache, ids[:at]))
        snapshot = run.manager.snapshot(cache)
        once = run.step((cache, ids[at:]))[0]
        run.manager.restore(cache, snapshot)
        assert cache.tokens == at
        run.step((cache, tokens(13, 10)))  # something else lands in the same pages and state
        run.manager.restore(cache, snapshot)
        assert torch.equal(run.step((cache, ids[at:]))[0], once), f"rewound to {at}"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU and a build of torch that can use it")
@pytest.mark.parametrize("prefill", ["mqa", "dense_mha"])
def test_a_gpu_gives_the_same_logits(tiny: tuple[Any, DictWeights], prefill: str) -> None:
    config, weights = tiny
    ids = tokens(40, 17)
    expected = Run(build(config, weights), config).logits(ids)
    run = Run(build(config, weights.to("cuda"), prefill=prefill, device="cuda"), config)
    for chunks in ([40], [7, 1, 20, 12], [1] * 40):
        assert distance(run.logits(ids, chunks).cpu(), expected) <= 1e-4


def test_a_fork_goes_its_own_way(tiny: tuple[Any, DictWeights]) -> None:
    config, weights = tiny
    run = Run(build(config, weights), config)
    stem, left, right = tokens(21, 11), tokens(12, 12), tokens(12, 13)
    a = run.manager.admit()
    run.step((a, stem))
    b = run.manager.fork(a)
    found = run.step((a, left), (b, right))
    assert distance(found[0], run.logits(stem + left)[21:]) < CLOSE
    assert distance(found[1], run.logits(stem + right)[21:]) < CLOSE


def test_bfloat16_stays_near_float32(tiny: tuple[Any, DictWeights]) -> None:
    """Within bfloat16's reach where no selection can flip: topk covers the length."""
    config, weights = tiny
    ids = tokens(6, 14)
    exact = Run(build(config, weights), config).logits(ids)
    run = Run(build(config, weights, dtype=torch.bfloat16), config)
    rounded = run.logits(ids)
    assert rounded.dtype == torch.float32
    assert run.pages.dtype == torch.bfloat16
    close = (rounded - exact).abs().max(dim=-1).values / exact.abs().max()
    assert 1e-4 < float(close.median()) < 0.1  # rounded indeed, and not nonsense


def test_prefix_pages_are_reused_where_pages_hold_everything() -> None:
    oracle = Oracle("glm_moe_dsa", {})
    run = Run(build(oracle.config, oracle.weights), oracle.config)
    ids = tokens(40, 15)
    whole = run.logits(ids)
    cache = run.manager.admit(ids)
    assert cache.tokens == 32
    assert distance(run.step((cache, ids[32:]))[0], whole[32:]) < CLOSE


def test_br55_the_open_pool_is_kept_and_closes_with_the_right_key() -> None:
    """Tokens 4n+1 .. 4n+3 beyond a boundary: the pooled keys equal a recomputation from all keys and gates."""
    oracle = Oracle("glm5_next", OVERRIDES["glm5_next"])
    layer, prefix = 1, "layers.1.self_attn.indexer."
    model = build(oracle.config, oracle.weights)
    seen: list[torch.Tensor] = []
    indexer = model.layers[layer].self_attn.indexer  # type: ignore[attr-defined]
    inner_store = indexer._store

    def spy(keys: torch.Tensor, gates: torch.Tensor, *rest: Any) -> None:
        seen.append(torch.stack([keys, gates]))
        inner_store(keys, gates, *rest)

    indexer._store = spy
    table = oracle.weights.tensor(prefix + "index_kpool_compress_ape")
    for beyond in (1, 2, 3):
        run = Run(model, oracle.config, page_size=8)
        seen.clear()
        cache = run.manager.admit()
        for chunk in ([1] * 5, [2] * 3, [3] * (4 + beyond), [4]):
            run.step((cache, chunk))
        keys, gates = torch.cat(seen, dim=1)
        length = 13 + beyond
        expected = []
        for first in range(0, length // 4 * 4, 4):
            weight = (gates[first : first + 4] + table).exp()
            expected.append((weight / weight.sum(0) * keys[first : first + 4]).sum(0))
        stored = run.pages.index_keys[layer]
        assert stored is not None
        found = stored[list(cache.block_table)].flatten(0, 1)
        assert torch.allclose(found[: length // 4], torch.stack(expected), atol=1e-5)
        assert found[length // 4 :].isnan().all()  # and nothing else was written
        tail = run.states.tails[layer]
        assert tail is not None
        assert torch.allclose(tail[cache.state_slot, :, : length % 4], torch.stack([keys, gates])[:, length // 4 * 4 :])


def test_br58_float32_tensors_stay_float32_in_a_bfloat16_model() -> None:
    """Stored in bfloat16 but for hc base and scale, A_log, dt_bias and the correction bias."""
    oracle = Oracle("glm5_next", OVERRIDES["glm5_next"])
    kept = ("hc_attn_base", "hc_attn_scale", "hc_ffn_base", "hc_ffn_scale", "A_log", "dt_bias", "correction_bias")
    weights = oracle.weights.cast(torch.bfloat16, kept)
    model = build(oracle.config, weights, dtype=torch.bfloat16)
    streams = torch.randn(9, 4, 32, generator=torch.Generator().manual_seed(0))
    layer = model.layers[0]  # type: ignore[attr-defined]
    for part in ("hc_attn", "hc_ffn"):
        site = getattr(layer, part)
        for name in ("base", "scale"):
            assert torch.equal(getattr(site, name), oracle.weights.tensor(f"layers.0.{part}_{name}"))
        comb = site(streams, layer.input_layernorm, torch.float32).comb
        assert comb.dtype == torch.float32
        assert float((comb.sum(dim=-1) - 1).abs().max()) < 1e-4
        assert float((comb.sum(dim=-2) - 1).abs().max()) < 1e-5
    for name in ("a_log", "dt_bias"):
        assert getattr(layer.self_attn, name).dtype == torch.float32
    # The one cast that must not happen would show: it moves the logits of a float32 model.
    ids = tokens(12, 16)
    exact = Run(build(oracle.config, oracle.weights), oracle.config).logits(ids)
    harmed = {n: t.bfloat16() if n.endswith(kept[:4]) else t for n, t in oracle.weights.tensors.items()}
    assert distance(Run(build(oracle.config, DictWeights(harmed)), oracle.config).logits(ids), exact) > 1e-4


def test_logits_that_are_not_finite_raise_where_they_are_handed_out(tiny: tuple[Any, DictWeights]) -> None:
    """At the head they stay in their row: one request's fault, and nobody else hears of it."""
    config, weights = tiny
    run = Run(build(config, weights), config)
    hidden = torch.zeros(3, 32)
    hidden[1, 5] = float("inf")
    assert (run.model.head(hidden).best(1).faults > 0).tolist() == [False, True, False]
    with pytest.raises(NumericsError) as error:
        run.model.logits(hidden)
    assert "rows [1] of 3" in str(error.value)
    assert "--dtype float32" in error.value.hint


def test_a_nan_in_the_indexer_raises(tiny: tuple[Any, DictWeights]) -> None:
    config, weights = tiny
    layer = next(i for i, kind in enumerate(config.layers) if kind.indexer == "full")
    broken = dict(weights.tensors)
    broken[f"layers.{layer}.self_attn.indexer.wk"] = torch.full_like(
        broken[f"layers.{layer}.self_attn.indexer.wk"], float("nan")
    )
    with pytest.raises(NumericsError, match="Indexer scores are not finite"):
        Run(build(config, DictWeights(broken)), config).logits(tokens(9))


def test_a_token_outside_the_vocabulary_raises(tiny: tuple[Any, DictWeights]) -> None:
    config, weights = tiny
    run = Run(build(config, weights), config)
    for wrong in (64, -1):
        with pytest.raises(RequestError) as error:
            run.logits([3, wrong])
        assert error.value.found == str(wrong)
        assert error.value.accepted == "0 to 63"


def test_a_prompt_longer_than_the_cache_raises(tiny: tuple[Any, DictWeights]) -> None:
    config, weights = tiny
    run = Run(build(config, weights), config, pages=2)
    with pytest.raises(CapacityError) as error:
        run.logits(tokens(33))
    assert error.value.found == "3 pages asked for, 2 free"


def test_a_state_out_of_step_is_caught(tiny: tuple[Any, DictWeights]) -> None:
    """A step that was run but never committed leaves its state ahead of its pages."""
    config, weights = tiny
    run = Run(build(config, weights), config)
    cache = run.manager.admit()
    with torch.inference_mode():
        run.model.forward(run.batch([(cache, [1, 2, 3])]))
        with pytest.raises(AssertionError, match=r"have seen \(3,\) tokens, their requests \(0,\)"):
            run.model.forward(run.batch([(cache, [4])]))
    with pytest.raises(AssertionError, match="has seen 3 tokens, the pages hold 2"):
        run.manager.commit([cache], [[1, 2]])
