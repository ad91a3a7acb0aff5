"""`LLM.score`: log-probabilities of continuations, through the cache and the batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from hadron import LLM, RequestError, SamplingParams
from hadron.errors import CapacityError
from tests.conftest import DATA, RANDOM

#: One model with states and one without.
MODELS = (RANDOM, DATA / "glm52-ct-w4a16")


def load(model: Path, **options: object) -> LLM:
    return LLM(model, **({"dtype": "float32", "kernels": "reference", "threads": 1, "max_model_len": 512} | options))  # type: ignore[arg-type]


def some_pairs(contexts: int = 3, length: int = 150) -> list[tuple[list[int], list[int]]]:
    """Two continuations of one token, one of three, and one of several pages, of each context."""
    rng = np.random.default_rng(7)
    each = [rng.integers(0, 400, length).tolist() for _ in range(contexts)]
    return [(context, rng.integers(0, 400, n).tolist()) for context in each for n in (1, 1, 3, 130)]


def by_logits(llm: LLM, context: Sequence[int], continuation: Sequence[int]) -> tuple[list[float], bool]:
    """The definition: softmax of the logits at each position."""
    rows = llm.logits([*context, *continuation])[len(context) - 1 : -1].astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    wanted = [float(row[token]) for row, token in zip(rows, continuation, strict=True)]
    return wanted, [int(row.argmax()) for row in rows] == list(continuation)


@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.name)
def test_scores_are_those_of_the_logits(model: Path) -> None:
    llm = load(model)
    pairs = some_pairs()
    for (context, continuation), scored in zip(pairs, llm.score(pairs), strict=True):
        wanted, is_greedy = by_logits(llm, context, continuation)
        assert scored.logprobs == pytest.approx(wanted, abs=1e-4)
        assert scored.logprob == pytest.approx(sum(wanted), abs=1e-3)
        assert scored.is_greedy is is_greedy


@pytest.mark.parametrize("name", ["glm52-ct-w4a16", "glm53f-modelopt-nvfp4"])
def test_scores_are_what_transformers_computed(name: str) -> None:
    llm, goldens = load(DATA / name), load_file(DATA / name / "goldens.safetensors")
    for i in range(3):
        ids = goldens[f"prompt{i}.input_ids"].tolist()
        last = goldens[f"prompt{i}.last_logits"].astype(np.float64)
        total = np.log(np.exp(last - last.max()).sum()) + last.max()
        tokens = np.argsort(last)[[-1, -2, len(last) // 2, 0]].tolist()
        said = goldens[f"prompt{i}.greedy16"].tolist()
        *single, whole, other = llm.score([*((ids, [t]) for t in tokens), (ids, said), (ids, [*said[:-1], tokens[2]])])
        tolerance = 2e-4 * np.abs(last).max()
        assert [s.logprob for s in single] == pytest.approx([last[t] - total for t in tokens], abs=tolerance)
        assert [s.is_greedy for s in single] == [True, False, False, False]
        assert whole.is_greedy and other.is_greedy is (said[-1] == tokens[2])


def test_what_the_model_would_say_is_greedy() -> None:
    llm = load(RANDOM)
    context = [5, 9, 2]
    (said,) = llm.generate({"prompt_token_ids": context}, SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))
    ids = said.outputs[0].token_ids
    other = [*ids[:-1], (ids[-1] + 1) % 400]
    greedy, not_greedy, whole = llm.score([(context, ids), (context, other), ([*context, *ids[:3]], ids[3:])])
    assert (greedy.is_greedy, not_greedy.is_greedy, whole.is_greedy) == (True, False, True)
    assert greedy.logprobs[3:] == pytest.approx(whole.logprobs, abs=1e-5)


@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.name)
def test_a_shared_context_is_computed_once(model: Path) -> None:
    llm = load(model, max_num_batched_tokens=64)
    llm.score(some_pairs(contexts=1))
    # three texts of the same 150 tokens (two of them differ in their last token alone), of which whole pages
    assert (llm.stats.prompt_tokens, llm.stats.cached_tokens) == (150 + 152 + 279, 2 * 128)


@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.name)
def test_a_score_has_the_same_bits_in_any_company(model: Path) -> None:
    pairs = some_pairs()
    together = load(model, kernels="cpu", dtype="bfloat16").score(pairs)
    small = load(model, kernels="cpu", dtype="bfloat16", max_num_batched_tokens=33, enable_prefix_caching=False)
    assert [small.score([pair])[0] for pair in pairs] == together
    crowded = load(model, kernels="cpu", dtype="bfloat16", num_pages=8)  # two texts at a time, and preemption
    assert crowded.score(pairs[::-1]) == together[::-1]


def test_done_pairs_are_counted() -> None:
    counts: list[int] = []
    pairs = some_pairs()
    load(RANDOM).score(pairs, on_done=counts.append)
    assert counts == sorted(counts) and counts[-1] == len(pairs)


def test_a_pair_may_be_one_token_longer_than_the_context() -> None:
    llm = load(RANDOM, max_model_len=64)
    assert llm.max_model_len == 64
    assert len(llm.score([([1] * 60, [2] * 5)])[0].logprobs) == 5
    with pytest.raises(CapacityError, match=r"where: +pairs\[0\]\n.*found: +65 tokens\n.*accepted: at most 64"):
        llm.score([([1] * 60, [2] * 6)])


def test_an_empty_side_is_refused() -> None:
    llm = load(RANDOM)
    with pytest.raises(RequestError, match=r"where: +pairs\[1\].context\n"):
        llm.score([([1], [2]), ([], [2])])
    with pytest.raises(RequestError, match=r"where: +pairs\[0\].continuation\n"):
        llm.score([([1], [])])
