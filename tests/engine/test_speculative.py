"""Guesses on a model that is arithmetic: whatever is guessed, a request says what it says without guesses.

The model counts in the state slot through `move_states`, so a state that a wrong guess moved is noticed at once. What
guesses here is a list of what is right, cut and spoiled at will: every length from none to all is accepted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from hadron.batch import ForwardBatch
from hadron.engine.engine import Engine
from hadron.engine.events import TokenEvent
from hadron.engine.request import Request
from hadron.engine.speculative import Taken
from hadron.errors import NumericsError
from hadron.kernels.provider import Provider
from hadron.layers.logits import Logits
from hadron.sampling_params import SamplingParams
from hadron.tokenizer.tokenizer import Tokenizer
from tests.conftest import RANDOM
from tests.engine.test_engine import PROMPT, VOCABULARY, Arithmetic, continuation, digest, engine

Guess = Callable[[Request, int], list[int]]


class Counting(Arithmetic):
    """Moves its states as layers do."""

    def forward(self, batch: ForwardBatch, trace: Any = None) -> torch.Tensor:
        batch.check_stamps()
        self.steps.append(batch.tokens)
        if self.refused in batch.token_ids.tolist():
            raise NumericsError("a kernel", where="row", found="a NaN", accepted="none", hint="none")
        batch.pages.write_latents(0, batch.slots, batch.token_ids.float()[:, None])
        rows, size = batch.pages.latent_rows(0), batch.pages.page_size
        out = []
        for i, (start, count) in enumerate(zip(batch.context_lens, batch.query_lens, strict=True)):
            slots = [int(batch.block_tables[i, p // size]) * size + p % size for p in range(start + count)]
            prefix = [int(rows[s]) for s in slots]
            digests = [digest(prefix[: p + 1]) for p in range(start, start + count)]
            out += [-1 if self.poisoned in prefix[: start + j + 1] else d for j, d in enumerate(digests)]
        state = batch.states.kda[0]
        assert state is not None
        batch.move_states(_count, (batch.token_ids,), (state,))
        batch.advance()
        return torch.tensor(out, dtype=torch.float64)[:, None]


def _count(
    rows: Sequence[torch.Tensor], states: Sequence[torch.Tensor], slots: Sequence[int], lens: Sequence[int],
    ends: Sequence[int],
) -> None:  # fmt: skip
    assert rows[0].shape[0] == sum(lens)
    for slot, count, end in zip(slots, lens, ends, strict=True):
        assert int(states[0][slot]) == end - count, "the state has seen other tokens"
        states[0][slot] += count


class Drafter:
    """Guesses what `guess` says of a request that can use so many."""

    def __init__(self, drafts: int, guess: Guess) -> None:
        self.drafts, self.guess = drafts, guess

    def propose(self, taken: Sequence[Taken], hidden: torch.Tensor) -> list[list[int]]:
        for one in taken:
            assert one.cache.tokens == one.end
            assert len(one.request.tokens_between(one.first + 1, one.end + 1)) == one.count
        return [self.guess(one.request, one.wanted) if one.wanted else [] for one in taken]


def wide(hidden: torch.Tensor) -> Logits:
    """Logits of a larger vocabulary, all different."""
    return Logits.of(wide_values(hidden), Provider())


def wide_values(hidden: torch.Tensor) -> torch.Tensor:
    return (hidden * torch.arange(1, 513) % 521).float()


def right(request: Request, count: int) -> list[int]:
    return continuation(request.token_ids, count)


def right_up_to(wrong: int) -> Guess:
    return lambda r, count: [(t + (i >= wrong)) % VOCABULARY for i, t in enumerate(right(r, count))]


def speculating(drafts: int, guess: Guess = right, **options: Any) -> tuple[Engine, Counting]:
    e, model = engine(**({"chunk_size": 64, "max_context": 96} | options))
    model.__class__ = Counting
    runner: Any = e._runner
    runner.drafter = Drafter(drafts, guess)
    e._scheduler._drafts = drafts
    return e, model


def run(
    e: Engine, prompt: list[int] = PROMPT, name: str = "r", answer: bool = False, **params: Any
) -> tuple[Any, list[TokenEvent]]:
    filled = SamplingParams(**({"temperature": 0, "ignore_eos": True} | params)).with_defaults({})
    e.check_params(filled)
    request = e.add(name, e.check_prompt(prompt, "prompt"), filled, answer=answer)
    events = []
    while e.has_requests:
        events += e.step()
    return request.output(), events


@pytest.mark.parametrize("drafts", [1, 2, 4])
@pytest.mark.parametrize("wrong", range(5))
def test_br50_every_number_of_right_guesses_says_the_same(drafts: int, wrong: int) -> None:
    e, model = speculating(drafts, right_up_to(wrong))
    output, events = run(e, max_tokens=23)
    assert output.outputs[0].token_ids == continuation(PROMPT, 23)
    assert [event.token_id for event in events] == continuation(PROMPT, 23)
    assert [event.finish_reason for event in events] == [None] * 22 + ["length"]
    each = min(wrong, drafts)
    if each == 0:
        assert len(model.steps) == 23
    else:
        assert len(model.steps) < 23
    assert set(model.steps[1:]) <= set(range(1, drafts + 2))
    assert e.stats.generated_tokens == 23
    assert e.stats.accepted_tokens == sum(e.stats.accepted_by_position)
    assert e.stats.accepted_by_position[each:] == [0] * (len(e.stats.accepted_by_position) - each)
    assert (output.num_draft_tokens, output.num_accepted_tokens) == (e.stats.draft_tokens, e.stats.accepted_tokens)
    assert e.stats.drafts <= len(model.steps)


def test_all_guesses_right_take_a_step_for_so_many_tokens() -> None:
    e, model = speculating(4, prefix_caching=False)
    run(e, max_tokens=21)
    assert model.steps == [len(PROMPT), 5, 5, 5, 5]
    assert e.stats.accepted_by_position == [4, 4, 4, 4]


def test_the_last_token_is_not_guessed_past() -> None:
    for most in range(1, 12):
        e, model = speculating(4, prefix_caching=False)
        output, _ = run(e, max_tokens=most)
        assert output.outputs[0].token_ids == continuation(PROMPT, most)
        assert sum(model.steps) == len(PROMPT) + most - 1
        assert e._runner.manager.blocks.free_blocks == e._pages


def test_a_full_context_is_filled_and_not_overrun() -> None:
    e, _ = speculating(4, max_context=24)
    output, _ = run(e)
    assert output.outputs[0].token_ids == continuation(PROMPT, 24 - len(PROMPT) + 1)


@pytest.mark.parametrize("drafts", [2, 5])
def test_a_stop_inside_a_draft_ends_there(drafts: int) -> None:
    text = continuation(PROMPT, 30)
    for place in range(1, 12):
        if text.index(text[place]) != place:
            continue
        e, _ = speculating(drafts)
        output, events = run(e, max_tokens=30, stop_token_ids=[text[place]])
        assert output.outputs[0].token_ids == text[: place + 1]
        assert output.outputs[0].stop_reason == text[place]
        assert len(events) == place + 1


@pytest.mark.parametrize("seed", range(4))
def test_seeded_requests_with_rules_draw_the_same(seed: int) -> None:
    """Random numbers belong to positions; penalties and a minimum see the tokens that were said, not guessed."""
    params = {
        "temperature": 2.5, "seed": seed, "top_k": 30, "max_tokens": 25, "logprobs": 2, "repetition_penalty": 1.3,
        "frequency_penalty": 0.4, "min_tokens": 9, "stop_token_ids": list(range(0, 480, 3)), "ignore_eos": True,
    }  # fmt: skip
    plain, _ = engine(chunk_size=64, max_context=96)
    request = plain.add("r", tuple(PROMPT), SamplingParams(**params).with_defaults({}))  # type: ignore[arg-type]
    while plain.has_requests:
        plain.step()
    expected = request.output().outputs[0]
    known = [*expected.token_ids, *range(40)]
    for wrong in (0, 1, 2, 9):

        def guess(r: Request, count: int, wrong: int = wrong) -> list[int]:
            at = len(r.output_token_ids)
            return [(t + (i >= wrong)) % VOCABULARY for i, t in enumerate(known[at : at + count])]

        e, model = speculating(4, guess)
        output, _ = run(e, **params)
        assert output.outputs[0] == expected
        if wrong == 9:
            assert len(model.steps) < len(expected.token_ids)


def test_br70_a_grammar_sees_what_was_said_before_each_position() -> None:
    """Masks of later positions are made after the earlier tokens were taken, and a guess outside them is wrong."""
    tokenizer = Tokenizer.load(RANDOM)
    params = {"max_tokens": 40, "structured_outputs": {"regex": "(yes|no)( and (yes|no)){3}"}, "ignore_eos": False}
    options = {"tokenizer": tokenizer, "vocabulary": 512}
    plain, model = engine(chunk_size=64, max_context=96, **options)
    model.head = wide
    expected, _ = run(plain, **params)
    assert re.fullmatch(params["structured_outputs"]["regex"], expected.outputs[0].text)  # type: ignore[index]
    known = expected.outputs[0].token_ids
    for wrong in (0, 1, 2, 9):

        def guess(r: Request, count: int, wrong: int = wrong) -> list[int]:
            at = len(r.output_token_ids)
            return [(t + (i >= wrong)) % VOCABULARY for i, t in enumerate([*known, *range(9)][at : at + count])]

        e, model = speculating(3, guess, **options)
        model.head = wide
        output, _ = run(e, **params)
        assert output.outputs == expected.outputs


@pytest.mark.parametrize("third", ["right", "what the model says without a grammar"])
@pytest.mark.parametrize("wrong", [1, 2, 9])
def test_br70_a_thought_may_end_at_the_second_guess(third: str, wrong: int) -> None:
    """The third is then the first of the grammar, whatever the model would say there without one."""
    tokenizer = Tokenizer.load(RANDOM)
    begin, end = tokenizer.token_id("<think>"), tokenizer.token_id("</think>")
    assert begin is not None and end is not None
    prompt, regex = [*PROMPT, begin], "(yes|no)( and (yes|no)){3}"
    params = {"max_tokens": 40, "structured_outputs": {"regex": regex}, "ignore_eos": False, "answer": True}
    options = {"tokenizer": tokenizer, "vocabulary": 512}
    plain, model = engine(chunk_size=64, max_context=96, **options)
    model.head = wide
    thought = run(plain, prompt, **params | {"max_tokens": 2})[0].outputs[0].token_ids

    def ending(hidden: torch.Tensor) -> Logits:
        values = wide_values(hidden)
        values[hidden[:, 0] == digest([*prompt, *thought]), end] = 1000
        return Logits.of(values, Provider())

    model.head = ending
    expected, _ = run(plain, prompt, **params)
    known = expected.outputs[0].token_ids
    assert known[:3] == [*thought, end] and re.fullmatch(regex, tokenizer.decode(known[3:]))
    free = int(wide_values(torch.tensor([[digest([*prompt, *known[:3]])]], dtype=torch.float64)).argmax())
    assert free != known[3], "the grammar has something to forbid"
    guessed = known if third == "right" else [*known[:3], free, *known[4:]]

    def guess(r: Request, count: int) -> list[int]:
        at = len(r.output_token_ids)
        return [(t + (i >= wrong)) % 512 for i, t in enumerate([*guessed, *range(9)][at : at + count])]

    e, model = speculating(3, guess, **options)
    model.head = ending
    output, _ = run(e, prompt, **params)
    assert output.outputs == expected.outputs
    if wrong == 9:
        assert e.stats.accepted_by_position[1] >= 1, "the tag was among the guesses that were right"


@pytest.mark.parametrize("budget", [1, 2, 6, 9, 40])
@pytest.mark.parametrize("pages", [17, 60])
def test_many_requests_beside_each_other_and_prompts_in_pieces(budget: int, pages: int) -> None:
    prompts = [[(7 * i + j) % 400 for j in range(3 + 5 * i)] for i in range(5)]
    turns = iter(range(10**6))

    def guess(request: Request, count: int) -> list[int]:
        return right_up_to(next(turns) % 5)(request, count)

    e, _ = speculating(3, guess, chunk_size=budget, max_num_seqs=4, num_pages=pages, prefix_snapshots=3)
    params = SamplingParams(temperature=0, max_tokens=18, ignore_eos=True).with_defaults({})
    for _ in range(2):  # the second time their beginnings are found
        requests = [e.add(str(i), tuple(text), params) for i, text in enumerate(prompts)]
        while e.has_requests:
            e.step()
        for request, text in zip(requests, prompts, strict=True):
            assert request.output_token_ids == continuation(text, 18)
    assert e._runner.manager.blocks.free_blocks == pages


def test_requests_that_go_in_between_leave_nothing_behind() -> None:
    e, _ = speculating(4, right_up_to(2), max_num_seqs=3, num_pages=40)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True).with_defaults({})
    stay = e.add("stay", tuple(PROMPT), params)
    for i in range(6):
        e.add(f"go{i}", tuple(PROMPT[: 3 + i]), params)
    number = 0
    while e.has_requests:
        e.step()
        e.abort(f"go{number % 6}") if number % 2 else None
        number += 1
    assert stay.output_token_ids == continuation(PROMPT, 30)
    assert e._runner.manager.blocks.free_blocks == 40
    assert e._runner.manager.free_slots == 3


def test_a_guess_that_a_kernel_refuses_costs_nobody_a_token() -> None:
    e, model = speculating(3, lambda r, n: [333, *right(r, n)[1:]][:n])
    text = continuation(PROMPT, 15)
    assert 333 not in text
    model.refused = 333
    output, events = run(e, max_tokens=15)
    assert output.outputs[0].token_ids == text
    assert [event.token_id for event in events] == text
    assert (e.stats.failures, output.num_preemptions) == (0, 1), "once, and no guesses after that"


def test_logits_behind_a_wrong_guess_are_nobodys_fault() -> None:
    e, model = speculating(3, lambda r, n: [333] * n)
    model.poisoned = 333
    output, _ = run(e, max_tokens=15)
    assert output.outputs[0].token_ids == continuation(PROMPT, 15)
    assert e.stats.failures == 0


def test_logits_that_are_not_finite_behind_right_guesses_fail_the_request_where_they_would() -> None:
    text = continuation(PROMPT, 15)
    place = next(i for i in range(4, 12) if text[i] not in [*PROMPT, *text[:i]])
    e, model = speculating(3)
    model.poisoned = text[place]
    request = e.add("r", tuple(PROMPT), SamplingParams(temperature=0, max_tokens=15, ignore_eos=True).with_defaults({}))
    events = []
    while e.has_requests:
        events += e.step()
    assert request.output_token_ids == text[: place + 1]
    assert isinstance(request.error, NumericsError)
    assert (events[-1].token_id, events[-1].finish_reason) == (None, "error")
    assert e._runner.manager.blocks.free_blocks == e._pages


def test_logits_of_a_prompt_leave_no_pages_that_the_layer_has_not_seen() -> None:
    e, _ = speculating(2)
    e.logits(tuple(PROMPT))
    request = e.add("r", tuple(PROMPT), SamplingParams(temperature=0, max_tokens=2).with_defaults({}))
    e.step()
    assert request.num_cached_tokens == 0
    e.abort_all()
