"""Both families against transformers, in float32, over a grid of configurations.

Every case runs as one prefill, in chunks and token by token. The largest difference may be 1e-4 of the
largest logit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hadron.models.glm_moe_dsa import config as glm_moe_dsa_config
from tiny.oracle import DictWeights, Oracle, Run, build, distance, tokens

TOLERANCE = 1e-4
LINEAR, INDEXED = "linear_attention", "indexed_attention"

#: name -> (overrides of the configuration, lengths); page size 16, index_topk 8 unless overridden
GLM_MOE_DSA: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "topk_below_length": ({}, (7, 8, 9, 15, 16, 17, 33)),
    "topk_above_length": ({"index_topk": 64}, (5, 33)),
    "topk_one": ({"index_topk": 1}, (17,)),
    "topk_odd": ({"index_topk": 5}, (33,)),
    "shared_indexers": ({"num_hidden_layers": 5, "indexer_types": ["full", "shared", "shared", "full", "shared"]}, (33,)),
    "frequency": ({"num_hidden_layers": 5, "index_topk_freq": 2, "index_skip_topk_offset": 1}, (20,)),
    "pattern": ({"num_hidden_layers": 4, "index_topk_pattern": "FSFS"}, (20,)),
    "all_dense": ({"first_k_dense_replace": 3}, (20,)),
    "all_sparse": ({"first_k_dense_replace": 0}, (20,)),
    "expert_groups": ({"n_group": 4, "topk_group": 2}, (33,)),
    "one_expert_group": ({"n_group": 2, "topk_group": 1}, (20,)),
    "weights_not_normalised": ({"norm_topk_prob": False}, (20,)),
    "scaling_one": ({"routed_scaling_factor": 1.0}, (20,)),
    "two_shared_experts": ({"n_shared_experts": 2}, (20,)),
    "attention_bias": ({"attention_bias": True}, (20,)),
    "tied": ({"tie_word_embeddings": True}, (20,)),
    "norm_eps": ({"rms_norm_eps": 0.1}, (20,)),
    "one_head": ({"num_attention_heads": 1, "num_key_value_heads": 1, "index_n_heads": 16}, (20,)),
}  # fmt: skip
GLM5_NEXT: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "pool_4": ({}, (1, 3, 4, 5, 8, 15, 16, 17, 33)),
    "pool_1": ({"index_kpool": 1}, (7, 8, 9, 17, 33)),
    "pool_2": ({"index_kpool": 2, "index_topk": 6}, (33,)),
    "pool_16": ({"index_kpool": 16, "index_topk": 16}, (15, 16, 17, 33, 49)),
    "pool_16_two": ({"index_kpool": 16, "index_topk": 32}, (66,)),
    "topk_one_pool": ({"index_topk": 4}, (21,)),
    "topk_above_length": ({"index_topk": 64}, (33,)),
    "one_stream": ({"hc_mult": 1}, (20,)),
    "two_streams": ({"hc_mult": 2}, (20,)),
    "three_rounds": ({"hc_sinkhorn_iters": 3}, (20,)),
    "clamped": ({"swiglu_limit": 0.5}, (20,)),
    "softplus_gate": ({"linear_lower_bound": None}, (20,)),
    "lower_bound": ({"linear_lower_bound": -2.0}, (20,)),
    "conv_kernel_2": ({"linear_conv_kernel_dim": 2}, (20,)),
    "conv_kernel_1": ({"linear_conv_kernel_dim": 1}, (20,)),
    "kda_over_chunks": ({}, (66,)),
    "shared_indexer": ({
        "num_hidden_layers": 5, "layer_types": [LINEAR, INDEXED, INDEXED, LINEAR, INDEXED],
        "indexer_types": ["full", "full", "shared", "full", "full"], "mlp_layer_types": ["dense"] + ["sparse"] * 4,
    }, (33,)),
    "only_mla": ({"layer_types": [INDEXED] * 4}, (20,)),
    "only_kda": ({"layer_types": [LINEAR] * 4}, (20,)),
    "expert_groups": ({"n_group": 4, "topk_group": 2}, (20,)),
    "norm_eps": ({"rms_norm_eps": 0.1}, (20,)),
    "attention_bias": ({"attention_bias": True}, (20,)),
}  # fmt: skip


def check(oracle: Oracle, weights: DictWeights, config: Any, lengths: tuple[int, ...], seed: int = 1) -> None:
    run = Run(build(config, weights), config)
    for length in lengths:
        ids = tokens(length, seed)
        expected = oracle.logits(ids)
        third = max(1, length // 3)
        ways = {
            "one prefill": [length],
            "chunks": [*[third] * (length // third), *([length % third] if length % third else [])],
            "uneven": [1, length - 1] if length > 1 else [1],
            "token by token": [1] * length,
        }
        for way, chunks in ways.items():
            assert distance(run.logits(ids, chunks), expected) <= TOLERANCE, f"{length} tokens, {way}"


@pytest.mark.parametrize("case", GLM_MOE_DSA)
def test_glm_moe_dsa(case: str) -> None:
    overrides, lengths = GLM_MOE_DSA[case]
    oracle = Oracle("glm_moe_dsa", overrides)
    check(oracle, oracle.weights, oracle.config, lengths)


@pytest.mark.parametrize("case", GLM5_NEXT)
def test_glm5_next(case: str) -> None:
    overrides, lengths = GLM5_NEXT[case]
    oracle = Oracle("glm5_next", overrides)
    check(oracle, oracle.weights, oracle.config, lengths)


@pytest.mark.parametrize("seed", range(2))
def test_glm5_next_without_tail(seed: int) -> None:
    """The first tokens then attend to nothing; transformers agrees with itself on those only with SDPA."""
    oracle = Oracle("glm5_next", {"index_kpool_always_select_tail": False}, seed, attention="sdpa")
    check(oracle, oracle.weights, oracle.config, (3, 4, 5, 33), seed)


def test_cached_transformers_agree_with_themselves() -> None:
    """The oracle's own noise, prefill against decode, is well below the tolerance."""
    for family in ("glm_moe_dsa", "glm5_next"):
        oracle = Oracle(family, {})
        ids = tokens(21)
        assert distance(oracle.logits(ids, [10, *[1] * 11]), oracle.logits(ids)) < TOLERANCE / 5


def half_split(weights: DictWeights, config: Any, *, attention: bool, indexer: bool) -> DictWeights:
    """Weights whose rotary elements lie in halves where transformers' lie in pairs."""
    d, ix = config.mla, config.indexer
    order = torch.tensor([*range(0, d.rope, 2), *range(1, d.rope, 2)])
    last = torch.cat([torch.arange(d.nope), d.nope + order])
    first = torch.cat([order, torch.arange(d.rope, ix.head_dim)])
    out = {}
    for name, tensor in weights.tensors.items():
        if attention and name.endswith("q_b_proj"):
            tensor = tensor.view(d.heads, d.nope + d.rope, -1)[:, last].flatten(0, 1)
        elif attention and name.endswith("kv_a_proj_with_mqa"):
            tensor = torch.cat([tensor[: d.kv_rank], tensor[d.kv_rank :][order]])
        elif indexer and name.endswith("indexer.wq_b"):
            tensor = tensor.view(ix.heads, ix.head_dim, -1)[:, first].flatten(0, 1)
        elif indexer and name.endswith(("indexer.wk", "k_norm", "k_norm.bias")):
            tensor = tensor[first]
        out[name] = tensor
    return DictWeights(out)


@pytest.mark.parametrize(("attention", "indexer"), [(True, False), (False, True), (True, True)])
def test_half_split_rope(attention: bool, indexer: bool) -> None:
    oracle = Oracle("glm_moe_dsa", {"index_topk": 4})
    raw = {**oracle.model.config.to_dict(), "rope_interleave": not attention, "indexer_rope_interleave": not indexer}
    config: Any = glm_moe_dsa_config.read(raw, [])
    assert (config.mla.rope_interleave, config.indexer.rope_interleave) == (not attention, not indexer)
    check(oracle, half_split(oracle.weights, config, attention=attention, indexer=indexer), config, (17,))


def test_br52_the_indexer_rotates_as_its_flag_says() -> None:
    """The wrong convention shows only when tokens are dropped: 8 tokens, topk 2 against topk 8."""
    ids = tokens(8)
    for topk, shows in ((2, True), (8, False)):
        oracle = Oracle("glm_moe_dsa", {"index_topk": topk, "num_hidden_layers": 1})
        expected = oracle.logits(ids)
        for flag in (True, False):
            config: Any = glm_moe_dsa_config.read(
                {**oracle.model.config.to_dict(), "indexer_rope_interleave": flag}, []
            )
            found = distance(Run(build(config, oracle.weights), config).logits(ids), expected)
            assert (found > 1e-2) if shows and not flag else (found <= TOLERANCE)


def test_br60_the_clamp_reaches_dense_routed_and_shared_mlps() -> None:
    """Without it each of the three alone would be far off."""
    oracle = Oracle("glm5_next", {"swiglu_limit": 0.5})
    ids = tokens(12)
    expected = oracle.logits(ids)
    for part in ("layers.0.mlp.up_proj", "layers.2.mlp.shared_experts.up_proj", "layers.2.mlp.experts"):
        steep = {n: t * 50 if n.startswith(part) and "up_proj" in n else t for n, t in oracle.weights.tensors.items()}
        run = Run(build(oracle.config, DictWeights(steep)), oracle.config)
        theirs = Oracle("glm5_next", {"swiglu_limit": 0.5})
        state = theirs.model.state_dict()
        for name in state:
            ours = name.removeprefix("model.").removesuffix(".weight")
            if ours.startswith(part) and ours.endswith("up_proj"):
                with torch.no_grad():
                    half = slice(state[name].shape[1] // 2, None) if "experts.gate_up" in name else slice(None)
                    (state[name][:, half] if "experts.gate_up" in name else state[name]).mul_(50)
        steeper = theirs.logits(ids)
        assert distance(steeper, expected) > 1e-2
        assert distance(run.logits(ids), steeper) <= TOLERANCE


def test_br62_the_routed_scaling_factor_is_applied_once() -> None:
    oracle = Oracle("glm_moe_dsa", {"routed_scaling_factor": 2.5})
    ids = tokens(12)
    expected = oracle.logits(ids)
    for factor, equal in ((2.5, True), (1.0, False), (6.25, False)):
        config: Any = glm_moe_dsa_config.read({**oracle.model.config.to_dict(), "routed_scaling_factor": factor}, [])
        found = distance(Run(build(config, oracle.weights), config).logits(ids), expected)
        assert (found <= TOLERANCE) if equal else (found > 1e-2)
