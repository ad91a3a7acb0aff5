"""Length arithmetic and stopping, without a model."""

from __future__ import annotations

from typing import Any

import pytest

from conftest import DATA
from hadron.engine.request import Logprob, Request, State, check_token_ids
from hadron.errors import RequestError
from hadron.sampling_params import SamplingParams
from hadron.tokenizer.detokenizer import Detokenizer
from hadron.tokenizer.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(DATA / "tokenizer")
END = 480


def request(prompt: int = 3, *, text: bool = True, capacity: int = 100, **params: Any) -> Request:
    ignore = params.get("ignore_eos", False)
    return Request(
        request_id="0",
        prompt_token_ids=tuple(range(prompt)),
        params=SamplingParams(**params).with_defaults({}),
        seed=0,
        eos=frozenset() if ignore else frozenset({END}),
        capacity=capacity,
        detokenizer=Detokenizer(TOKENIZER) if text else None,
    )


def feed(req: Request, ids: list[int]) -> str:
    """Append ids until the request is finished; the joined pieces."""
    pieces = []
    for token in ids:
        pieces.append(req.append(token))
        if req.is_finished:
            break
    assert "".join(pieces) == req.text
    return req.text


def test_lengths() -> None:
    req = request(5)
    assert (req.num_prompt_tokens, req.num_tokens, req.num_uncomputed) == (5, 5, 5)
    assert req.next_tokens(2) == ([0, 1], False)
    req.computed = 4
    assert req.next_tokens(9) == ([4], True)
    req.computed = 5
    req.append(77)
    assert (req.num_prompt_tokens, req.num_tokens, req.num_uncomputed) == (5, 6, 1)
    assert req.next_tokens(9) == ([77], True)
    req.computed = 3
    assert req.next_tokens(2) == ([3, 4], False)
    assert req.next_tokens(3) == ([3, 4, 77], True)


@pytest.mark.parametrize(
    ("prompt", "capacity", "max_tokens", "expected"),
    [(3, 10, 4, 4), (3, 10, None, 8), (3, 10, 99, 8), (10, 10, 5, 1), (9, 10, 5, 2)],
)
def test_what_fits_bounds_what_is_generated(prompt: int, capacity: int, max_tokens: int | None, expected: int) -> None:
    req = request(prompt, capacity=capacity, max_tokens=max_tokens, text=False)
    assert req.max_new_tokens == expected
    feed(req, [9] * 50)
    assert (len(req.output_token_ids), req.finish_reason) == (expected, "length")
    assert req.computed + req.num_uncomputed == req.num_tokens <= capacity + 1


def test_an_end_token_stops_and_has_no_text() -> None:
    req = request()
    assert feed(req, [*TOKENIZER.encode("ab"), END, 5]) == "ab"
    assert (req.finish_reason, req.stop_reason, req.output_token_ids[-1]) == ("stop", None, END)


def test_ignore_eos_goes_on() -> None:
    req = request(ignore_eos=True, max_tokens=4)
    assert feed(req, [END, *TOKENIZER.encode("abc"), 5]) == TOKENIZER.decode([END, *TOKENIZER.encode("abc")][:4])
    assert req.finish_reason == "length"


def test_a_stop_token_is_named_and_has_no_text() -> None:
    a, b = TOKENIZER.encode("a")[0], TOKENIZER.encode("b")[0]
    req = request(stop_token_ids=[b], ignore_eos=True)
    assert feed(req, [a, b, a]) == "a"
    assert (req.finish_reason, req.stop_reason, req.output_token_ids) == ("stop", b, [a, b])


def test_an_end_token_at_the_last_place_is_a_stop() -> None:
    req = request(max_tokens=2)
    feed(req, [5, END])
    assert req.finish_reason == "stop"


def test_a_stop_string_cuts_the_text_but_not_the_ids() -> None:
    ids = [TOKENIZER.encode(c)[0] for c in "one STOP two"]
    req = request(stop=["STOP"], max_tokens=50)
    assert feed(req, ids) == "one "
    assert (req.finish_reason, req.stop_reason) == ("stop", "STOP")
    assert req.output_token_ids == ids[:8]


def test_stop_strings_count_from_the_least_number_of_tokens_on() -> None:
    ids = [TOKENIZER.encode(c)[0] for c in "ab ab ab"]
    req = request(stop=["ab"], min_tokens=4, max_tokens=50)
    assert feed(req, ids) == "ab "
    assert (len(req.output_token_ids), req.stop_reason) == (5, "ab")


def test_half_a_stop_string_is_text_when_the_length_ends_it() -> None:
    ids = [TOKENIZER.encode(c)[0] for c in "one STO"]
    req = request(stop=["STOP"], max_tokens=7)
    assert feed(req, ids) == "one STO"
    assert req.finish_reason == "length"


def test_half_a_character_shows_at_the_end() -> None:
    ids = TOKENIZER.encode("x😀")
    req = request(max_tokens=len(ids) - 1)
    assert feed(req, ids) == TOKENIZER.decode(ids[:-1]) == "x\ufffd"


def test_a_stop_string_that_only_the_end_completes() -> None:
    ids = TOKENIZER.encode("x😀")
    req = request(max_tokens=len(ids) - 1, stop=["\ufffd"])
    assert feed(req, ids) == "x"
    assert (req.finish_reason, req.stop_reason) == ("stop", "\ufffd")


def test_output_is_a_snapshot() -> None:
    req = request(logprobs=1, text=False)
    before = req.output()
    req.append(7, {7: Logprob(-0.5, 1)})
    after = req.output()
    assert (before.outputs[0].token_ids, before.finished, before.outputs[0].finish_reason) == ([], False, None)
    assert (after.outputs[0].token_ids, after.outputs[0].text, after.prompt_token_ids) == ([7], None, [0, 1, 2])
    assert after.outputs[0].cumulative_logprob == -0.5
    assert request().output().outputs[0].cumulative_logprob is None
    assert req.state is State.WAITING


@pytest.mark.parametrize(
    ("ids", "where", "found"),
    [
        ((1, 512), "prompt[1]", "512"),
        ((-1,), "prompt[0]", "-1"),
        ((1, 2, "3"), "prompt[2]", "'3'"),
        ((True,), "prompt[0]", "True"),
    ],
)
def test_ids_outside_the_vocabulary_are_named(ids: tuple[Any, ...], where: str, found: str) -> None:
    with pytest.raises(RequestError, match="outside the vocabulary") as caught:
        check_token_ids(ids, 512, "prompt")
    assert (caught.value.where, caught.value.found) == (where, found)
    assert caught.value.accepted == "an integer from 0 to 511"


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="has no tokens"):
        check_token_ids((), 512, "prompt")
