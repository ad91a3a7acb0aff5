"""Penalties, biases and bans against their definitions, written out in plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hadron.engine import sampler
from hadron.engine.logit_rules import LogitRules
from hadron.engine.request import Request
from hadron.errors import NumericsError
from hadron.kernels.provider import Provider
from hadron.layers.logits import Logits
from hadron.sampling_params import SamplingParams

SIZE = 12
LOWEST = float(np.finfo(np.float32).min)
TOKENS = st.lists(st.integers(0, SIZE - 1), max_size=20)


def request(prompt: list[int], **params: Any) -> Request:
    return Request(
        request_id="0", prompt_token_ids=tuple(prompt), seed=0, eos=frozenset({1}), capacity=1000,
        params=SamplingParams(max_tokens=500, ignore_eos=True, **params).with_defaults({}),
    )  # fmt: skip


def changed(rules: LogitRules, row: list[float]) -> list[float]:
    """The row that decides the request's next token, after its rules."""
    held = torch.tensor([row])
    Logits.of(held, Provider()).rule([0], [rules.now()])
    return held[0].tolist()


def by_definition(
    logits: list[float], prompt: list[int], text: list[int], repetition: float, frequency: float, presence: float,
    bias: dict[int, float],
) -> list[float]:  # fmt: skip
    out = []
    for token, value in enumerate(logits):
        if token in prompt or token in text:
            value = value / repetition if value > 0 else value * repetition
        value -= frequency * text.count(token) + (presence if token in text else 0)
        out.append(value + bias.get(token, 0))
    return out


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(-8, 8, width=32), min_size=SIZE, max_size=SIZE), TOKENS, st.lists(TOKENS, max_size=3),
    st.sampled_from([1.0, 0.5, 1.3]), st.sampled_from([0.0, 0.7, -2.0]), st.sampled_from([0.0, 1.1]),
    st.dictionaries(st.integers(0, SIZE - 1), st.floats(-9, 9, width=32), max_size=3),
)  # fmt: skip
def test_penalties_are_those_of_the_definition(
    logits: list[float], prompt: list[int], pieces: list[list[int]], repetition: float, frequency: float,
    presence: float, bias: dict[int, float],
) -> None:  # fmt: skip
    r = request(
        prompt, repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence, logit_bias=bias
    )
    rules = LogitRules(r, (), ())
    for piece in [*pieces, []]:  # the text grows between rows
        r.output_token_ids += piece
        expected = by_definition(logits, prompt, r.output_token_ids, repetition, frequency, presence, bias)
        np.testing.assert_allclose(changed(rules, logits), expected, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("penalty", [0.01, 100.0])
def test_the_strongest_penalties_leave_logits_finite(penalty: float) -> None:
    rules = LogitRules(request([0, 1], repetition_penalty=penalty), (), ())
    row = changed(rules, [3e4, -3e4, 1.0])
    assert np.isfinite(row).all() and row[2] == 1


def test_no_end_before_the_least_number_of_tokens() -> None:
    r = request([3], min_tokens=2, stop_token_ids=[7], temperature=0)
    rules = LogitRules(r, (), {1})
    for text, banned in (([], True), ([5], True), ([5, 6], False)):
        r.output_token_ids[:] = text
        row = changed(rules, [0.0] * SIZE)
        assert [i for i, value in enumerate(row) if value == LOWEST] == ([1, 7] if banned else [])


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_what_only_prompts_hold_never_comes(temperature: float) -> None:
    r = request([3], temperature=temperature)
    rules = LogitRules(r, {2, 4}, ())
    row = torch.zeros(1, SIZE)
    row[0, [2, 4]] = 50
    logits = Logits.of(row, Provider())
    drawn = {sampler.choose(logits, r.params, seed=0, position=p, rules=rules.now()).token for p in range(300)}
    assert not drawn & {2, 4} and len(drawn) == (SIZE - 2 if temperature else 1)


@pytest.mark.parametrize("never", [{4}, {1}])
def test_a_nan_is_not_hidden(never: set[int]) -> None:
    r = request([1], repetition_penalty=1.5, presence_penalty=1.0)
    rules, row = LogitRules(r, never, ()), torch.zeros(1, SIZE)
    row[0, 1] = float("nan")
    with pytest.raises(NumericsError) as caught:
        sampler.choose(Logits.of(row, Provider()), r.params, seed=0, position=7, rules=rules.now())
    assert caught.value.where == "position 7, token 1"


def test_a_thought_is_closed_when_its_budget_is_used_up_and_left_alone_afterwards() -> None:
    r = request([1], thinking_budget=2)
    assert LogitRules(r, (), ()).idle
    rules = LogitRules(r, (), (), thought_ends=(7, 6))
    logits = [float(i) for i in range(SIZE)]
    for text, forced in (([], False), ([3], False), ([3, 4], True), ([3, 4, 7], False), ([3, 4, 7, 5], False)):
        r.output_token_ids[:] = text
        assert changed(rules, logits) == ([LOWEST] * 7 + [7] + [LOWEST] * 4 if forced else logits)


def test_a_call_ends_the_thought_too_and_is_not_broken_into() -> None:
    r = request([1], thinking_budget=2)
    rules = LogitRules(r, (), (), thought_ends=(7, 6))
    for text in ([3, 6], [3, 6, 4], [3, 6, 4, 5]):
        r.output_token_ids[:] = text
        assert changed(rules, [float(i) for i in range(SIZE)]) == list(range(SIZE))


def test_without_wishes_nothing_is_touched() -> None:
    assert LogitRules(request([1, 2]), (), {1}).idle
    assert not LogitRules(request([1, 2]), {5}, {1}).idle
    for params in ({"min_tokens": 1}, {"logit_bias": {1: 2.0}}, {"presence_penalty": 1}, {"repetition_penalty": 2.0}):
        assert not LogitRules(request([1, 2], **params), (), {1}).idle
