"""Sampling against its definition, written out in plain Python."""

from __future__ import annotations

import math
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hadron.engine import draw, sampler
from hadron.engine.logit_rules import LogitRules
from hadron.engine.request import Request
from hadron.errors import NumericsError
from hadron.kernels.provider import Provider
from hadron.kernels.rules import RowRules
from hadron.layers.logits import Logits, Questions
from hadron.sampling_params import SamplingParams
from tests.kernels.levels import needs_native

# Far enough apart that no two implementations of exp put neighbours in another order.
SPACED = st.lists(st.integers(-2000, 2000), min_size=1, max_size=40).map(lambda row: np.array(row, np.float32) / 64)
ROWS = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40).map(lambda row: np.array(row, np.float32))


def filled(**values: object) -> SamplingParams:
    return SamplingParams(**values).with_defaults({})  # type: ignore[arg-type]


def held(row: np.ndarray) -> Logits:
    """A row of logits as the head keeps it."""
    return Logits.of(torch.from_numpy(row)[None], Provider())


def token(row: np.ndarray, params: SamplingParams, *, seed: int, position: int) -> int:
    return sampler.choose(held(row), params, seed=seed, position=position).token


def by_definition(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """Probabilities of the tokens that may be drawn."""
    top = max(logits)
    weights = [math.exp((x - top) / temperature) for x in logits]
    order = sorted((i for i, w in enumerate(weights) if w > 0), key=lambda i: (-weights[i], i))
    if top_k > 0:
        order = order[:top_k]
    total, seen, nucleus = math.fsum(weights[i] for i in order), 0.0, []
    for i in order:
        if seen >= top_p * total and top_p < 1:
            break
        nucleus.append(i)
        seen += weights[i]
    kept = [i for i in nucleus if weights[i] >= min_p]
    return {i: weights[i] / math.fsum(weights[j] for j in kept) for i in kept}


def check_draws(row: np.ndarray, params: SamplingParams, positions: range, kernels: Provider) -> None:
    """Tokens are those that the same numbers pick from the definition's probabilities, the likeliest first."""
    assert params.temperature and params.top_k is not None and params.top_p is not None
    chances = by_definition(row.tolist(), params.temperature, params.top_k, params.top_p, params.min_p)
    ids, ends = list(chances), np.cumsum(list(chances.values()))
    for position in positions:
        number = draw.uniform(5, position)
        if np.abs(ends - number).min() > 1e-6:  # no two implementations of exp differ by as much
            expected = ids[min(int((ends <= number).sum()), len(ids) - 1)]
            logits = Logits.of(torch.from_numpy(row)[None], kernels)
            assert sampler.choose(logits, params, seed=5, position=position).token == expected


EITHER = pytest.mark.parametrize("kernels", ["reference", pytest.param("cpu", marks=needs_native)])


@EITHER
@settings(max_examples=300, deadline=None)
@given(
    SPACED,
    st.sampled_from([0.1, 0.7, 1.0, 2.0]),
    st.sampled_from([0, 1, 3, 39, 40, 100]),
    st.sampled_from([1.0, 0.951, 0.503, 0.013]),
    st.sampled_from([0.0, 0.05, 1.0]),
)
def test_draws_are_those_of_the_definition(
    kernels: str, logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = filled(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    check_draws(logits, params, range(12), Provider({"lm_head": kernels}))


@EITHER
@pytest.mark.parametrize("sharp", [0.02, 1, 3])
@pytest.mark.parametrize(
    "asked",
    [
        {}, {"top_p": 0.95}, {"top_p": 0.2}, {"min_p": 0.01}, {"min_p": 1e-9}, {"top_p": 0.999, "min_p": 0.001},
        {"top_k": 70}, {"top_k": 2000, "top_p": 0.9}, {"top_k": 5}, {"temperature": 0.3, "top_p": 0.99},
    ],
)  # fmt: skip
def test_draws_among_many_are_those_of_the_definition(asked: dict[str, Any], sharp: float, kernels: str) -> None:
    """Flat rows, whose likeliest tokens are not enough, and rows that a few tokens fill."""
    values = np.random.default_rng(1).permutation(3000).astype(np.float32) / 3000
    row = (-2 * sharp * np.log(values + 1e-4)).astype(np.float32)
    check_draws(row, filled(**({"temperature": 1.0} | asked)), range(40), Provider({"lm_head": kernels}))


@EITHER
@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(2, 12), st.sampled_from([3, 30, 300]), st.booleans())
def test_requests_drawn_together_get_what_each_gets_alone(
    kernels: str, seed: int, count: int, vocabulary: int, ruled: bool
) -> None:
    random = np.random.default_rng(seed)
    rows = random.normal(scale=3, size=(2 * count, vocabulary)).astype(np.float32)
    provider = Provider({"lm_head": kernels})
    logits = Logits.of(torch.from_numpy(rows.copy()), provider)
    asked, given = sampler.Asked(), []
    for i in range(count):
        params = filled(
            temperature=float(random.choice([0, 0.3, 1])), top_k=int(random.choice([0, 2, 5])),
            top_p=float(random.choice([1, 0.9])), min_p=float(random.choice([0, 0.1])),
        )  # fmt: skip
        rules = RowRules(biased=array("q", [i % vocabulary]), bias=array("f", [9.0])) if ruled and i % 3 == 1 else None
        kind = sampler.Kind.of(params, vocabulary, ruled=rules is not None)
        seed, position = int(random.integers(1 << 62)), int(random.integers(1000))
        own = range(2 * i, 2 * i + 1 + i % 2)
        asked.add(i, own, kind, params, seed=seed, position=position, rules=rules)
        given.append((own, params, seed, position, rules))
    answers = asked.answers(logits)
    assert sorted(answers) == list(range(count))
    for i, (own, params, seed, position, rules) in enumerate(given):
        for turn, (row, known) in enumerate(zip(own, answers[i], strict=True)):
            single = Logits.of(torch.from_numpy(rows[row : row + 1].copy()), provider)
            alone = sampler.choose(single, params, seed=seed, position=position + turn, rules=rules)
            shared = logits.rows(row, row + 1)
            assert sampler.choose(shared, params, known=known, seed=seed, position=position + turn) == alone
            assert known.token == alone.token


@EITHER
@pytest.mark.parametrize("logprobs", [None, 3])
@pytest.mark.parametrize(
    "asked",
    [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 5}, {"top_p": 0.999, "min_p": 1e-9}],
)
def test_rules_change_what_is_drawn_and_leave_log_probabilities_alone(
    asked: dict[str, Any], logprobs: int | None, kernels: str
) -> None:
    """The same tokens as of a row that a model computed so; the log-probabilities of its own row."""
    random = np.random.default_rng(3)
    rows = random.normal(scale=3, size=(4, 700)).astype(np.float32)
    never = sorted({*rows.argmax(axis=1).tolist(), 0, 699})
    rules = RowRules(banned=array("q", never), biased=array("q", [5]), bias=array("f", [6.0]))
    changed = rows.copy()
    changed[:, 5] += 6
    changed[:, never] = np.finfo(np.float32).min
    params = filled(**({"temperature": 1.0} | asked), logprobs=logprobs)
    plain = filled(**({"temperature": 1.0} | asked))
    provider = Provider({"lm_head": kernels})
    for position in range(60):
        logits, many = Logits.of(torch.from_numpy(rows.copy()), provider), sampler.Asked()
        kind = sampler.Kind.of(params, 700, ruled=True)
        for row in range(4):
            many.add(row, range(row, row + 1), kind, params, seed=9, position=position, rules=rules)
        for row, (known,) in many.answers(logits).items():
            together = sampler.choose(logits.rows(row, row + 1), params, seed=9, position=position, known=known)
            own = Logits.of(torch.from_numpy(rows[row : row + 1].copy()), provider)
            assert sampler.choose(own, params, seed=9, position=position, rules=rules) == together
            assert (
                together.token == token(changed[row], plain, seed=9, position=position) and together.token not in never
            )
            own = Logits.of(torch.from_numpy(rows[row : row + 1]), provider)
            best = own.best(3, temperature=1.0)
            expected = None if logprobs is None else sampler.logprobs(own, best, (together.token,), logprobs)
            assert together.logprobs == expected


def test_draws_follow_the_probabilities() -> None:
    logits = np.log(np.array([0.5, 0.125, 0.25, 0.125], np.float32))
    drawn = [token(logits, filled(), seed=7, position=p) for p in range(8000)]
    observed = np.bincount(drawn, minlength=4) / len(drawn)
    np.testing.assert_allclose(observed, [0.5, 0.125, 0.25, 0.125], atol=0.02)  # 3.6 standard deviations


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    logits = np.random.default_rng(0).normal(size=100).astype(np.float32)
    drawn = {(s, p): token(logits, filled(), seed=s, position=p) for s in range(4) for p in range(50)}
    for (seed, position), expected in reversed(drawn.items()):
        assert token(logits, filled(), seed=seed, position=position) == expected
    assert len({tuple(drawn[s, p] for p in range(50)) for s in range(4)}) == 4
    assert len({drawn[0, p] for p in range(50)}) > 10


@settings(max_examples=200, deadline=None)
@given(
    ROWS, st.sampled_from([0, 0.5, 2.0]), st.sampled_from([0, 1, 5, 40]), st.sampled_from([1.0, 0.9]),
    st.sampled_from([0.0, 0.1]), st.integers(0, 9),
)  # fmt: skip
def test_a_row_that_rules_leave_as_it_is_gives_the_same_token(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, position: int
) -> None:
    params = filled(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, logprobs=2, logit_bias={0: 0.0})
    request = Request(
        request_id="0", prompt_token_ids=(0,), seed=3, eos=frozenset(), capacity=100, params=params,
    )  # fmt: skip
    rules = LogitRules(request, (), ())
    assert not rules.idle
    plain = sampler.choose(held(logits), params, seed=3, position=position)
    assert sampler.choose(held(logits), params, seed=3, position=position, rules=rules.now()) == plain


def test_log_probabilities_are_those_before_rules() -> None:
    row = np.array([1, 2, 0.5, 3], np.float32)
    params = filled(temperature=0, logprobs=1, logit_bias={0: 100.0})
    request = Request(request_id="0", prompt_token_ids=(0,), seed=3, eos=frozenset(), capacity=100, params=params)
    rules = LogitRules(request, (), ()).now()
    choice = sampler.choose(held(row.copy()), params, seed=0, position=1, rules=rules)
    assert choice.token == 0 and choice.logprobs is not None
    assert [(token, entry.rank) for token, entry in choice.logprobs.items()] == [(3, 1), (0, 3)]
    total = math.log(math.fsum(map(math.exp, row.tolist())))
    assert choice.logprobs[0].logprob == pytest.approx(1 - total, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(0, 8), st.integers(0, 99))
def test_log_probabilities_of_a_prompt_are_those_of_each_of_its_rows(expected: list[int], most: int, seed: int) -> None:
    rows = np.random.default_rng(seed).normal(size=(len(expected), 7)).astype(np.float32)
    found = sampler.prompt_logprobs(Logits.of(torch.from_numpy(rows), Provider()), expected, most, position=1)
    for row, token, entries in zip(rows, expected, found, strict=True):
        assert entries == sampler.logprobs(held(row), held(row).best(max(1, most), temperature=1.0), (token,), most)


def test_a_prompts_row_that_is_not_finite_is_named() -> None:
    rows = torch.zeros(3, 4)
    rows[2, 1] = float("nan")
    found = sampler.prompt_logprobs(Logits.of(rows, Provider()), [0, 1, 2], 1, position=5)
    assert len([next(found), next(found)]) == 2
    with pytest.raises(NumericsError) as caught:
        next(found)
    assert caught.value.where == "position 7, token 1"


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = np.array([0, 3, 3, 1, 3], np.float32)
    assert token(logits, filled(temperature=0), seed=1, position=0) == 1


def test_top_k_takes_the_lowest_ids_of_equals() -> None:
    row = np.array([1, 2, 2, 3, 2], np.float32)
    assert {token(row, filled(top_k=3), seed=1, position=i) for i in range(200)} == {3, 1, 2}


def test_a_tiny_top_p_is_greedy() -> None:
    logits = np.array([0, 3, 3, 1, 3], np.float32)
    found = {token(logits, filled(top_p=5e-324, temperature=0.5), seed=1, position=i) for i in range(50)}
    assert found == {1}


@pytest.mark.parametrize("temperature", [1e-300, 1e-9])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = np.array([-3e38, 2, 5, 3e38, 1], np.float32)
    assert token(logits, filled(temperature=temperature), seed=0, position=3) == 3


@settings(max_examples=200, deadline=None)
@given(ROWS, st.integers(0, 45), st.data())
def test_logprobs_are_those_of_the_raw_logits(logits: np.ndarray, most: int, data: st.DataObject) -> None:
    chosen = data.draw(st.integers(0, len(logits) - 1))
    total = math.log(math.fsum(math.exp(float(x)) for x in logits))
    order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    rows = held(logits)
    row = sampler.logprobs(rows, rows.best(max(1, most), temperature=1.0), (chosen,), most)
    expected = order[:most] + ([chosen] if chosen not in order[:most] else [])
    assert list(row) == expected
    for token, entry in row.items():
        assert entry.rank == order.index(token) + 1
        assert entry.logprob == pytest.approx(float(logits[token]) - total, abs=1e-9)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_fail_the_request(temperature: float, value: float) -> None:
    logits = np.array([0, value, 1], np.float32)
    with pytest.raises(NumericsError, match="not finite") as caught:
        token(logits, filled(temperature=temperature), seed=0, position=12)
    assert caught.value.where == "position 12, token 1"
    assert "1 of 3 logits" in caught.value.found


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0}, {"temperature": 0, "logprobs": 0}, {"temperature": 0, "logprobs": 3},
        {"temperature": 2, "top_k": 4}, {"temperature": 2, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "logprobs": 9},
        {"temperature": 2}, {"temperature": 2, "top_p": 0.9},
    ],
)  # fmt: skip
def test_no_row_is_taken_as_a_whole(asked: dict[str, Any]) -> None:
    row = np.random.default_rng(3).normal(size=500).astype(np.float32)
    questions = Questions.of(Provider())
    out_of_reach: Any = None
    shape_only: Any = SimpleNamespace(shape=(1, len(row)))
    kept = Logits(shape_only, questions._replace(
        best=lambda _, *rest, **asked: questions.best(torch.from_numpy(row)[None], *rest, **asked), ranks=out_of_reach,
        draw=lambda _, *rest: questions.draw(torch.from_numpy(row)[None], *rest),
    ))  # fmt: skip
    for position in range(20):
        expected = sampler.choose(held(row), filled(**asked), seed=1, position=position)
        assert sampler.choose(kept, filled(**asked), seed=1, position=position) == expected
