"""The small models' training: its fast forward is the stock modules', it resumes exactly, what it saves can be loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["TINY_COMPILE"] = os.environ["TINY_NATIVE"] = "0"  # read when the modules below are imported

import numpy as np
import pytest
import torch
import transformers

import hadron
from hadron import LLM, SamplingParams
from recipes.tiny.training import batches, config, guide, hyper, kda, native, objective, state
from recipes.tiny.training.attention import Selection
from recipes.tiny.training.config import FLASH, GLM52, TinyConfig
from recipes.tiny.training.export import export, hub_tensors
from recipes.tiny.training.indexer import top_mask
from recipes.tiny.training.loop import Plan, Trainer
from recipes.tiny.training.model import TinyModel
from recipes.tiny.training.schedule import Schedule

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "index_topk": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
}
SMALL_FLASH = replace(
    FLASH,
    **SMALL,
    layer_types=("kda", "mla", "kda", "mla"),
    mlp_types=("dense", "sparse") * 2,
    indexer_types=("full",) * 4,
)
SMALL_52 = replace(
    GLM52,
    **SMALL,
    layer_types=("mla",) * 4,
    mlp_types=("dense",) + ("sparse",) * 3,
    indexer_types=("full", "shared", "full", "shared"),
)
FAMILIES = pytest.mark.parametrize("small", [SMALL_FLASH, SMALL_52], ids=["flash", "glm52"])
LENGTH = 53  # over index_topk and no multiple of a pool or a chunk


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def model_of(small: TinyConfig) -> TinyModel:
    """Random weights that bfloat16 holds, biases that change the routing, one indexer whose scores are all equal."""
    torch.manual_seed(0)
    model = TinyModel(small)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
        for layer in model.moe_layers():
            layer.gate.e_score_correction_bias.normal_(std=0.2)
        model.layers[-2 if small.family == "glm_moe_dsa" else -1].self_attn.indexer.weights_proj.weight.zero_()
    return model


def make_data(folder: Path, samples: int = 60) -> Path:
    """Random samples of every kind, and a tokenizer."""
    random = np.random.default_rng(0)
    lengths = random.integers(20, 90, samples)
    total = int(lengths.sum())
    np.savez(
        folder / "train.npz",
        ids=random.integers(0, 100, total).astype(np.uint16),
        weights=random.choice([0, 1, 10], total).astype(np.uint8),
        offsets=np.concatenate([[0], lengths.cumsum()]).astype(np.int64),
        kind=random.integers(0, 4, samples).astype(np.uint8),
        level=np.zeros(samples, np.uint8),
    )
    special = ["<|endoftext|>", "<|user|>", "<|observation|>"]
    vocabulary = {chr(0x4E00 + i): i for i in range(100)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": 100 + i,
                "content": token,
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
            for i, token in enumerate(special)
        ],
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def stock(folder: Path, small: TinyConfig) -> Any:
    """The checkpoint in transformers' own classes, float32."""
    family = (
        transformers.AutoModelForImageTextToText if small.family == "glm5_next" else transformers.AutoModelForCausalLM
    )
    return family.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def stable_topk(self: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:  # noqa: A002
    """`torch.topk` that takes the lowest index among equals, which torch leaves open."""
    values, indices = torch.sort(self, dim=dim, descending=largest, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))


@FAMILIES
def test_the_fast_forward_gives_the_logits_of_the_stock_modules(
    small: TinyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(small)
    export(model, make_data(tmp_path), tmp_path / "checkpoint")
    reference = stock(tmp_path / "checkpoint", small)
    ids = torch.randint(0, 100, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(torch.Tensor, "topk", stable_topk)
        expected = reference(input_ids=ids).logits
    with torch.no_grad():
        sparse = model.lm_head(model.trunk(ids, torch.float32, Selection(select=True))).view_as(expected)
        dense = model.lm_head(model.trunk(ids, torch.float32)).view_as(expected)
    assert (sparse - expected).abs().max() < 1e-4
    topk = small.index_topk
    assert (dense - expected)[:, :topk].abs().max() < 1e-4
    assert (dense - expected)[:, topk + 4 :].abs().max() > 1e-2  # the selection leaves something out


def test_equal_scores_at_the_boundary_go_to_the_lowest_index() -> None:
    low = float("-inf")
    scores = torch.tensor(
        [[0.0, 2.0, 0.0, 1.0, 0.0, low], [0.0, 0.0, 0.0, 0.0, low, low], [1.0, low, low, low, low, low]]
    )
    chosen = [row.nonzero().flatten().tolist() for row in top_mask(scores, 3)]
    assert chosen == [[0, 1, 3], [0, 1, 2], [0]]


def test_chunks_give_the_recurrence_of_kda() -> None:
    torch.manual_seed(0)
    n, length, dim = 2, 48, 8
    q, k, v = torch.randn(3, n, length, dim).unbind(0)
    q, k = (t / t.norm(dim=-1, keepdim=True) for t in (q, k))
    g, beta = -5 * torch.rand(n, length, dim), torch.rand(n, length, 1)
    g[:, 16:32] = -5  # the bound, which a chunk must hold in float32
    inputs = [t.clone().requires_grad_() for t in (q, k, v, g, beta)]
    recurrent = [t.double().clone().requires_grad_() for t in (q, k, v, g, beta)]
    memory, rows = torch.zeros(n, dim, dim, dtype=torch.double), []
    for i in range(length):
        a, b, c, d, e = (t[:, i] for t in recurrent)
        memory = memory * d.exp().unsqueeze(-1)
        memory = memory + b.unsqueeze(-1) * (e * (c - (b.unsqueeze(1) @ memory).squeeze(1))).unsqueeze(1)
        rows.append((a.unsqueeze(1) @ memory).squeeze(1))
    expected, got = torch.stack(rows, 1), kda.chunked_kda(*inputs)
    assert torch.allclose(got.double(), expected, atol=1e-5)
    weights = torch.randn(n, length, dim)
    for mine, theirs in zip(
        torch.autograd.grad((got * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), recurrent),
        strict=True,
    ):
        assert torch.allclose(mine.double(), theirs, atol=1e-4)


@pytest.mark.slow
@FAMILIES
def test_a_resumed_training_is_the_unbroken_one(small: TinyConfig, tmp_path: Path) -> None:
    data = make_data(tmp_path)
    plan = Plan(steps=8, processes=1, tokens=1536)
    assert [Schedule(8).stage(step) for step in range(8)] == ["A"] * 5 + ["B"] + ["C"] * 2
    unbroken = Trainer(small, plan, data, pad=100)
    for out in ("a", "b"):
        (tmp_path / out).mkdir()
    assert unbroken.run(tmp_path / "a", None, log_every=4, save_every=100)
    first = Trainer(small, plan, data, pad=100)
    for _ in range(4):
        first.step()
    state.save(tmp_path / "b" / "state.pt", first.model, first.optimizer, first.step_number, vars(plan))
    stored = state.load(tmp_path / "b" / "state.pt")
    assert stored["config"] == small
    second = Trainer(stored["config"], Plan(**stored["plan"]), data, pad=100)
    second.resume(stored)
    assert second.run(tmp_path / "b", None, log_every=4, save_every=100)
    for (name, mine), (_, theirs) in zip(
        second.model.state_dict().items(), unbroken.model.state_dict().items(), strict=True
    ):
        assert torch.equal(mine, theirs), name
    logged = [json.loads(line) for line in (tmp_path / "a" / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in logged] == [4, 8]
    assert {"loss", "mtp_loss", "indexer_kl", "mtp_acceptance", "retrieval_loss", "problem_exact"} <= logged[1].keys()


@FAMILIES
def test_each_stage_trains_what_it_should(small: TinyConfig, tmp_path: Path) -> None:
    drawn = batches.Batches(make_data(tmp_path) / "train.npz", 1536, 1, 100).draw(0, 0.0, 0)
    model = model_of(small)
    objective.language(model, drawn, torch.float32, objective.Weights(0.3, 0.3), sparse=False).loss.backward()
    assert all(p.grad is None for p in model.indexer_parameters())
    assert all(p.grad is not None for p in model.trunk_parameters())
    model.zero_grad(set_to_none=True)
    objective.indexers(model, drawn, torch.float32).loss.backward()
    assert all(p.grad is not None for p in model.indexer_parameters())
    assert all(p.grad is None for p in model.trunk_parameters())


def test_the_guide_points_at_what_is_copied() -> None:
    text = "ab cd=1; xb cd=2; yb cd=3; |xb cd=2. zb cd=4."
    ids = np.array([ord(letter) for letter in text])
    answer = text.index("|")
    found = guide.sources(ids, np.arange(len(ids)) >= answer)
    pointed = {text[at + 1] + str(at): text[source] for at, source in enumerate(found) if source >= 0}
    assert set(found[:answer]) == {-1}
    assert all(name[0] == letter for name, letter in pointed.items())
    # the value stands behind the name it was asked for, not behind the first that ends alike
    assert found[text.index("=", answer)] == text.index("2")
    assert found[text.index("=4")] == -1 and len(pointed) > 5
    assert (guide.sources(ids, np.zeros(len(ids), bool)) == -1).all()


def test_the_guides_loss_is_that_of_attention_by_definition() -> None:
    torch.manual_seed(3)
    q, k = torch.randn(2, 2, 7, 4)
    source = torch.full((2, 7), -1)
    source[0, 5], source[1, 3] = 2, 3
    weights = [torch.softmax(k[row, : at + 1] @ q[row, at] / 2, 0)[source[row, at]] for row, at in ((0, 5), (1, 3))]
    assert torch.allclose(guide.guide_loss(q, k, source), -torch.stack(weights).log().mean(), atol=1e-6)
    assert guide.guide_loss(q, k, torch.full((2, 7), -1)) == 0


def test_training_lowers_every_loss(tmp_path: Path) -> None:
    data = make_data(tmp_path, samples=6)
    trainer = Trainer(SMALL_FLASH, Plan(steps=300, processes=1, dtype="float32"), data, pad=100)
    rows = [objective.summary(trainer.step()) for _ in range(15)]
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.1
    assert rows[-1]["mtp_loss"] < rows[0]["mtp_loss"] - 0.05
    trainer.step_number = trainer.schedule.first_indexer
    rows = [objective.summary(trainer.step()) for _ in range(8)]
    assert rows[-1]["indexer_kl"] < rows[0]["indexer_kl"]


@FAMILIES
def test_hadron_loads_what_was_saved_and_computes_the_same(small: TinyConfig, tmp_path: Path) -> None:
    export(model_of(small), make_data(tmp_path), tmp_path / "checkpoint")
    assert not hadron.check(tmp_path / "checkpoint").problems
    ids = torch.randint(0, 100, (LENGTH,), generator=torch.Generator().manual_seed(2)).tolist()
    llm = LLM(tmp_path / "checkpoint", kernels="reference", dtype="float32", threads=1)
    logits = torch.from_numpy(llm.logits(ids))
    (output,) = llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "topk", stable_topk)
        reference = stock(tmp_path / "checkpoint", small)(input_ids=torch.tensor([ids])).logits[0]
    assert (logits - reference).abs().max() < 1e-4 * reference.abs().max()
    assert output.outputs[0].token_ids[0] == int(reference[-1].argmax())


ATTENTION = [f"self_attn.{name}.weight" for name in ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa")]
ATTENTION += [f"self_attn.{name}.weight" for name in ("kv_a_layernorm", "kv_b_proj", "o_proj")]
ATTENTION += [f"self_attn.indexer.{name}" for name in ("wq_b.weight", "wk.weight", "weights_proj.weight")]
ATTENTION += ["self_attn.indexer.k_norm.weight", "self_attn.indexer.k_norm.bias"]
POOLS = ["self_attn.indexer.index_kpool_compress_ape", "self_attn.indexer.index_kpool_compress_gate"]
MTP = ["eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight"]
MTP += ["input_layernorm.weight", "post_attention_layernorm.weight", "mlp.gate.weight"]
MTP += ["mlp.gate.e_score_correction_bias"]
PARTS = ("gate_proj", "up_proj", "down_proj")


@FAMILIES
def test_the_mtp_layer_is_named_as_published_ones_are(small: TinyConfig) -> None:
    prefix = "model.language_model.layers.4." if small.family == "glm5_next" else "model.layers.4."
    names = {name.removeprefix(prefix) for name in hub_tensors(model_of(small)) if name.startswith(prefix)}
    expected = {*MTP, *ATTENTION, *(POOLS if small.family == "glm5_next" else [])}
    expected |= {f"mlp.experts.{e}.{part}.weight" for e in range(4) for part in PARTS}
    expected |= {f"mlp.shared_experts.{part}.weight" for part in PARTS}
    assert names == expected


def test_what_releases_keep_in_float32_stays_so() -> None:
    wide = {
        name.rpartition(".")[2] for name, t in hub_tensors(model_of(SMALL_FLASH)).items() if t.dtype == torch.float32
    }
    assert wide == {
        "e_score_correction_bias", "A_log", "dt_bias", "hc_attn_base", "hc_attn_scale", "hc_ffn_base", "hc_ffn_scale"
    }  # fmt: skip


def test_the_published_dimensions_are_what_formats_need() -> None:
    for published in config.MODELS.values():
        model = TinyModel(published)
        assert sum(p.numel() for p in model.parameters()) <= 8_000_000
        widths = [d for name, t in hub_tensors(model).items() if t.dim() == 2 and "hc_" not in name for d in t.shape]
        odd = {d for d in widths if d % 32}
        assert odd <= {published.n_routed_experts, published.kda_heads, published.index_n_heads, published.index_kpool}
        assert any(d % 128 == 0 for d in widths) and any(d % 128 for d in widths)
    assert "shared" in GLM52.indexer_types and "full" in GLM52.indexer_types[1:]
    assert {"kda", "mla"} == set(FLASH.layer_types) and FLASH.n_routed_experts >= 16


@pytest.mark.slow
def test_the_compiled_loops_are_the_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_NATIVE", "1")
    native.native.cache_clear()
    try:
        if native.native() is None:
            pytest.skip("needs a C++ compiler")
        torch.manual_seed(0)
        x, taps = torch.randn(2, 21, 24, requires_grad=True), torch.randn(4, 24, requires_grad=True)
        compare([x, taps], kda.conv_silu(x, taps), kda.conv_silu_plain(x, taps), 1e-5)
        logits = torch.randn(16, 37, requires_grad=True)
        compare([logits], hyper.sinkhorn(logits, 4, 20, 1e-6), hyper.sinkhorn_plain(logits, 4, 20, 1e-6), 1e-5)
        site, norm = hyper.HyperConnection(SMALL_FLASH, 1), torch.nn.Parameter(torch.randn(64))
        for dtype, within in ((torch.bfloat16, 2e-2), (torch.float32, 1e-5)):
            streams = torch.randn(40, 4, 64).to(dtype).requires_grad_()
            results = []
            for fast in (True, False):
                with monkeypatch.context() as patch:
                    patch.setattr(hyper, "_fast", lambda _, fast=fast: fast)
                    y, post, comb = site.collapse(streams, norm)
                    results.append(site.expand(streams, y, post, comb))
            compare([streams, norm, *site.parameters()], *results, within)
    finally:
        native.native.cache_clear()


def compare(inputs: list[Any], mine: torch.Tensor, plain: torch.Tensor, within: float) -> None:
    """Values and gradients, relative to the size of the plain ones."""
    weights = torch.randn(plain.shape, generator=torch.Generator().manual_seed(3)).to(plain.dtype)
    pairs = [(mine, plain)]
    pairs += zip(
        torch.autograd.grad(mine, inputs, weights, retain_graph=True),
        torch.autograd.grad(plain, inputs, weights),
        strict=True,
    )
    for a, b in pairs:
        assert (a - b).float().norm() <= within * b.float().norm()
