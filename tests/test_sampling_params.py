"""What a request may ask for, what is refused, and what the checkpoint's defaults fill in."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hadron.errors import RequestError
from hadron.sampling_params import SamplingParams, checkpoint_defaults, listed_end_tokens


def test_stop_may_be_one_string_or_several() -> None:
    assert SamplingParams(stop="a").stop_strings == ("a",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("max_tokens", 0, "an integer of at least 1"),
        ("max_tokens", True, "an integer of at least 1"),
        ("max_tokens", 1.5, "an integer of at least 1"),
        ("temperature", -0.1, "a number from 0 to 1000"),
        ("temperature", math.nan, "a number from 0 to 1000"),
        ("temperature", "hot", "a number from 0 to 1000"),
        ("top_p", 0, "a number above 0, at most 1"),
        ("top_p", 1.01, "a number from 0 to 1, not 0"),
        ("top_k", -2, "an integer of at least -1"),
        ("min_p", 2, "a number from 0 to 1"),
        ("seed", -1, f"an integer of at least 0, at most {2**64 - 1}"),
        ("logprobs", 101, "an integer of at least 0, at most 100"),
        ("prompt_logprobs", -1, "an integer of at least 0, at most 100"),
        ("n", 0, "an integer of at least 1, at most 128"),
        ("min_tokens", 17, "an integer of at least 0, at most 16"),
        ("repetition_penalty", 1e-39, "a number from 0.01 to 100"),
        ("presence_penalty", 3, "a number from -2 to 2"),
        ("frequency_penalty", math.inf, "a number from -2 to 2"),
        ("logit_bias", {"5": 1.0}, "a mapping from token ids to numbers from -100 to 100"),
        ("logit_bias", {5: math.nan}, "a mapping from token ids to numbers from -100 to 100"),
        ("logit_bias", [5], "a mapping from token ids to numbers from -100 to 100"),
        ("stop", [""], "a string or a list of strings, none of them empty"),
        ("stop", "", "a string or a list of strings, none of them empty"),
        ("stop", [3], "a string or a list of strings, none of them empty"),
        ("stop", None, "a string or a list of strings, none of them empty"),
        ("stop_token_ids", "12", "a list of token ids"),
        ("stop_token_ids", [1.0], "a list of token ids"),
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(field: str, value: Any, accepted: str) -> None:
    with pytest.raises(RequestError, match=f"{field} cannot be used") as caught:
        SamplingParams(**{field: value})
    assert caught.value.where == field
    assert caught.value.found == repr(value)
    assert caught.value.accepted == accepted


def test_defaults_come_from_the_checkpoint_and_yield_to_the_caller() -> None:
    file = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "max_new_tokens": 9}
    filled = SamplingParams(max_tokens=None).with_defaults(file)
    assert (filled.temperature, filled.top_p, filled.top_k, filled.min_p) == (0.7, 0.9, 20, 0.1)
    assert filled.max_tokens == 9
    filled = SamplingParams(temperature=0, top_p=1.0, min_p=0.0, max_tokens=4).with_defaults(file)
    assert (filled.temperature, filled.top_p, filled.top_k, filled.min_p, filled.max_tokens) == (0, 1.0, 20, 0.0, 4)


def test_without_a_file_everything_is_sampled_as_it_is() -> None:
    filled = SamplingParams().with_defaults({})
    assert (filled.temperature, filled.top_p, filled.top_k) == (1.0, 1.0, 0)


def test_do_sample_false_is_greedy() -> None:
    assert SamplingParams().with_defaults({"do_sample": False, "temperature": 0.6}).temperature == 0
    assert SamplingParams(temperature=0.5).with_defaults({"do_sample": False}).temperature == 0.5


def test_a_default_that_makes_no_sense_falls_back_and_is_named() -> None:
    usable, refused = checkpoint_defaults({"temperature": "hot", "top_p": 0.9, "top_k": -7, "max_new_tokens": 0})
    assert usable == {
        "temperature": 1.0, "top_p": 0.9, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": None,
    }  # fmt: skip
    assert [(error.where, error.found) for error in refused] == [
        ("temperature", "'hot'"), ("top_k", "-7"), ("max_new_tokens", "0"),
    ]  # fmt: skip
    assert listed_end_tokens({"eos_token_id": [1, 2]}) == ([1, 2], None)
    ids, error = listed_end_tokens({"eos_token_id": [1, "x"]})
    assert ids == [] and error is not None and error.accepted == "a token id or a list of them"
