"""The promise on bits, from outside: what a request says does not depend on anybody else, to the last bit.

Through `LLM` on the native kernels, for a checkpoint of each family: greedy and seeded tokens and every
log-probability are the same alone, batched with anything, at any number of tokens in a step, after a prefix was
found (in memory or on disk), after preemption and on any number of threads. The indexers leave positions out, and prompts cross pages.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hadron import LLM, SamplingParams
from hadron.kernels.select import KernelChoice, select
from tests.conftest import DATA

NATIVE = all(
    isinstance(choice := select(operation, providers=("cpu",)), KernelChoice) and choice.provider == "cpu"
    for operation in ("linear", "mlp", "moe", "router", "mla", "indexer", "kda", "hyper_connection", "lm_head")
)
pytestmark = pytest.mark.skipif(
    not NATIVE, reason="this build has no native kernels: install with a C++ compiler to run these"
)

FAMILIES = ("glm52-quark-mxfp4-attnptpc", "glm53f-quark-mxfp4-blockfp8")
#: of what takes long: the other with the slow tests
ONE_BY_DEFAULT = (FAMILIES[0], pytest.param(FAMILIES[1], marks=pytest.mark.slow))
COMMON = random.Random(7).choices(range(256), k=200)


#: Requests that go on over several pages: what makes others give way.
GROWING = range(8, 12)
ALL = list(range(8))


def prompts() -> list[list[int]]:
    """Short and long, with beginnings that some of them share; two end where a page does. See `GROWING`."""
    lengths = (1, 3, 64, 65, 90, 128, 150, 200, 60, 50, 61, 40)
    own = [[(17 * i + 5 * j) % 256 for j in range(8)] for i in range(len(lengths))]
    return [[*COMMON[:length], *tail][:length] if i % 2 else [*tail, *COMMON][:length]
            for i, (length, tail) in enumerate(zip(lengths, own, strict=True))]  # fmt: skip


def params(i: int) -> SamplingParams:
    greedy = i % 3 == 0
    rules: dict[str, Any] = {}
    if i in (4, 5, 9):
        rules = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.1, "min_tokens": 5}
    if i == 6:
        rules = {"prompt_logprobs": 2, "logit_bias": {3: 1.5}}
    return SamplingParams(
        temperature=0 if greedy else 1.3, top_p=0.95, top_k=0 if i % 2 else 40, seed=i,
        max_tokens=90 if i in GROWING else 12 + 3 * i,
        ignore_eos=True, logprobs=3, **rules,
    )  # fmt: skip


def load(name: str, **options: Any) -> LLM:
    return LLM(DATA / name, **({"threads": 1, "kernels": "cpu"} | options))


def said(output: Any) -> tuple[Any, ...]:
    completion = output.outputs[0]
    return (completion.token_ids, completion.logprobs, completion.finish_reason, output.prompt_logprobs)


def run(llm: LLM, order: list[int]) -> dict[int, Any]:
    """What the requests of these numbers say when they are given together, in this order."""
    outputs = llm.generate([{"prompt_token_ids": prompts()[i]} for i in order], [params(i) for i in order])
    return dict(zip(order, outputs, strict=True))


@cache
def alone(name: str) -> dict[int, tuple[Any, ...]]:
    """Each request in an engine that has never seen another, a whole prompt at a time."""
    llm = load(name, max_num_seqs=1, enable_prefix_caching=False)
    return {i: said(run(llm, [i])[i]) for i in (*ALL, *GROWING)}


def same(outputs: dict[int, Any], name: str) -> None:
    for i, output in outputs.items():
        assert said(output) == alone(name)[i], f"request {i}"


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tokens", [1, 7, 64, 512])
def test_together_at_any_number_of_tokens_in_a_step(name: str, tokens: int) -> None:
    same(run(load(name, max_num_batched_tokens=tokens), ALL), name)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("seqs", [2, 3, 5])
def test_in_any_order_beside_any_number(name: str, seqs: int) -> None:
    order = random.Random(seqs).sample(ALL, len(ALL))
    same(run(load(name, max_num_seqs=seqs, max_num_batched_tokens=33), order), name)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tokens", [9, 512])
def test_after_a_prefix_was_found(name: str, tokens: int) -> None:
    llm = load(name, max_num_batched_tokens=tokens)
    run(llm, ALL)
    again = run(llm, ALL)
    same(again, name)
    assert sum(output.num_cached_tokens > 0 for output in again.values()) >= 4
    for i in reversed(ALL):
        one = run(llm, [i])
        same(one, name)
        assert one[i].num_cached_tokens <= len(prompts()[i]) - 1


@pytest.mark.parametrize("name", FAMILIES)
def test_after_a_prefix_was_found_on_disk(name: str, tmp_path: Path) -> None:
    """By a process that never computed it, whose steps are of another size."""
    same(run(load(name, prefix_cache_dir=tmp_path), ALL), name)
    later = run(load(name, prefix_cache_dir=tmp_path, max_num_batched_tokens=33), ALL)
    same(later, name)
    assert sum(output.num_cached_tokens > 0 for output in later.values()) >= 4


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("caching", [False, True])
def test_after_preemption(name: str, caching: bool) -> None:
    llm = load(name, num_pages=6, max_num_batched_tokens=40, enable_prefix_caching=caching)
    outputs = run(llm, [*GROWING, 2, 3, 7])
    same(outputs, name)
    assert sum(output.num_preemptions for output in outputs.values()) >= 1


@pytest.mark.parametrize("name", FAMILIES)
def test_with_latents_in_fp8(name: str) -> None:
    """Together, in pieces, after a prefix was found and after preemption; and the latents are in FP8."""
    options = {"kv_cache_dtype": "fp8_e4m3"}
    each = load(name, max_num_seqs=1, enable_prefix_caching=False, **options)
    expected = {i: said(run(each, [i])[i]) for i in (*GROWING, 2, 3, 7)}
    llm = load(name, num_pages=6, max_num_batched_tokens=40, **options)
    outputs = run(llm, [*GROWING, 2, 3, 7])
    assert {i: said(output) for i, output in outputs.items()} == expected
    assert sum(output.num_preemptions for output in outputs.values()) >= 1
    roomy = load(name, max_num_batched_tokens=40, **options)
    for _ in range(2):
        outputs = run(roomy, [2, 3, 7])
        assert {i: said(output) for i, output in outputs.items()} == {i: expected[i] for i in outputs}
    assert sum(output.num_cached_tokens > 0 for output in outputs.values()) >= 2
    assert any(expected[i] != alone(name)[i] for i in expected), "rows in FP8 are other rows"


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("threads", [2, 3])
def test_on_any_number_of_threads(name: str, threads: int) -> None:
    same(run(load(name, threads=threads, max_num_batched_tokens=50), [1, 3, 4]), name)


@pytest.mark.parametrize("name", FAMILIES)
def test_when_others_are_aborted(name: str) -> None:
    """Requests come and go between steps, and push others out; those that stay do not notice."""
    llm = load(name, max_num_batched_tokens=21, max_num_seqs=4, num_pages=7)
    engine, chance = llm._engine, random.Random(3)
    stay = [engine.add(f"stay{i}", tuple(prompts()[i]), params(i).with_defaults({})) for i in (8, 9, 7)]
    number = 0
    while engine.has_requests:
        if number < 30 and chance.random() < 0.4:
            text = tuple(COMMON[: chance.randrange(1, 120)])
            engine.add(f"go{number}", text, params(8).with_defaults({}), priority=-1)
            number += 1
        if chance.random() < 0.3:
            engine.abort(f"go{chance.randrange(30)}")
        engine.step()
    assert engine.stats.preemptions > 0
    assert llm._engine._runner.manager.blocks.free_blocks == 7
    same(dict(zip((8, 9, 7), (request.output() for request in stay), strict=True)), name)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_a_text_are_those_that_chose_its_tokens(name: str) -> None:
    """What is computed token by token beside others is what one pass over the whole text computes."""
    tokens = alone(name)[3][0]
    rows = load(name).logits([*prompts()[3], *tokens])[len(prompts()[3]) - 1 : -1]
    assert rows.argmax(-1).tolist() == tokens


REFERENCE = {"kernels": "reference", "dtype": "float32"}


def nearly(outputs: dict[int, Any], expected: dict[int, Any]) -> None:
    """The same tokens, and log-probabilities within 1e-5."""
    for i, output in outputs.items():
        ours, theirs = output.outputs[0], expected[i].outputs[0]
        assert ours.token_ids == theirs.token_ids, f"request {i}"
        for own, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert list(own) == list(other)
            assert [entry.logprob for entry in own.values()] == pytest.approx(
                [entry.logprob for entry in other.values()], rel=1e-5, abs=1e-5
            )


def reference_alone(name: str, order: list[int]) -> dict[int, Any]:
    llm = load(name, **REFERENCE, max_num_seqs=1, enable_prefix_caching=False)
    return {i: run(llm, [i])[i] for i in order}


@pytest.mark.parametrize("name", ONE_BY_DEFAULT)
def test_reference_kernels_repeat_themselves_nearly(name: str, tmp_path: Path) -> None:
    """1e-5 of the largest: alone and together, in pieces, on more threads, after a prefix was found, on disk too."""
    few = [1, 3, 4]
    expected = reference_alone(name, few)
    for options in ({"max_num_batched_tokens": 20, "prefix_cache_dir": tmp_path}, {"threads": 3}):
        llm = load(name, **REFERENCE, **options)
        for _ in range(2):
            again = run(llm, few)
            nearly(again, expected)
        assert sum(output.num_cached_tokens > 0 for output in again.values()) == 2
    later = run(load(name, **REFERENCE, prefix_cache_dir=tmp_path), few)
    nearly(later, expected)
    assert sum(output.num_cached_tokens > 0 for output in later.values()) == 2, "found on disk"


@pytest.mark.parametrize("name", ONE_BY_DEFAULT)
def test_reference_kernels_repeat_themselves_nearly_after_preemption(name: str) -> None:
    order = [8, 9]
    outputs = run(load(name, **REFERENCE, num_pages=4, max_num_batched_tokens=40), order)
    assert sum(output.num_preemptions for output in outputs.values()) >= 1
    nearly(outputs, reference_alone(name, order))
