"""Guessing ahead changes nothing but the number of steps: tokens, log-probabilities and states, to the last bit.

Through `LLM` on the native kernels, for a checkpoint of each family, against a run without guesses: with the layer's
own guesses (on random weights seldom right), and with guesses that are known to be right up to any place, so that
every number of them is accepted; together, in pieces, after a prefix was found, after preemption, with others aborted.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from hadron import LLM
from hadron.engine.speculative import Drafter, Taken
from tests.invariance.test_engine_bits import COMMON, FAMILIES, NATIVE, params, prompts, run, said
from tests.invariance.test_engine_bits import load as load_plain

pytestmark = pytest.mark.skipif(
    not NATIVE, reason="this build has no native kernels: install with a C++ compiler to run these"
)

#: Greedy and seeded, with penalties, with log-probabilities of the prompt, short and over pages.
SOME = [0, 1, 3, 4, 6]
GROWING = [8, 9]


def load(name: str, drafts: int, **options: Any) -> LLM:
    return load_plain(name, speculative_config={"method": "mtp", "num_speculative_tokens": drafts}, **options)


@cache
def alone(name: str) -> dict[int, Any]:
    """Each request without guesses, in an engine that has never seen another."""
    llm = load_plain(name, max_num_seqs=1, enable_prefix_caching=False)
    return {i: run(llm, [i])[i] for i in (*SOME, *GROWING)}


def same(outputs: dict[int, Any], name: str) -> None:
    for i, output in outputs.items():
        assert said(output) == said(alone(name)[i]), f"request {i}"


class Known(Drafter):
    """Lets the layer do its work, and then says what it knows: right up to a place that changes every time."""

    def __init__(self, inner: Drafter, name: str, places: Sequence[int]) -> None:
        self.drafts = inner.drafts
        self.inner, self.places, self.turn, self.own = inner, places, 0, 0
        self.texts = {tuple(prompts()[i]): output.outputs[0].token_ids for i, output in alone(name).items()}

    def propose(self, taken: Sequence[Taken], hidden: torch.Tensor) -> list[list[int]]:
        self.own += sum(map(len, self.inner.propose(taken, hidden)))
        return [self.known(one) for one in taken]

    def known(self, one: Taken) -> list[int]:
        text, at = self.texts.get(one.request.prompt_token_ids, []), len(one.request.output_token_ids)
        self.turn += 1
        wrong = self.places[self.turn % len(self.places)]
        return [(token + (i >= wrong)) % 256 for i, token in enumerate(text[at : at + one.wanted])]


def knowing(name: str, drafts: int, places: Sequence[int], **options: Any) -> tuple[LLM, Known]:
    llm = load(name, drafts, **options)
    runner: Any = llm._engine._runner
    runner.drafter = Known(runner.drafter, name, places)
    return llm, runner.drafter


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("drafts", "tokens"), [(1, 512), (2, 40), (4, 512)])
def test_br50_the_layers_own_guesses(name: str, drafts: int, tokens: int) -> None:
    llm = load(name, drafts, max_num_batched_tokens=tokens)
    same(run(llm, SOME), name)
    same(run(llm, SOME[::-1]), name)
    same(run(llm, [4]), name)
    assert llm.stats.prefix_hits > 0 and llm.stats.draft_tokens > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_br51_any_number_of_right_guesses_and_the_states_behind_them(name: str) -> None:
    """Alone and one at a time, so that states lie in the same slot as without guesses: these are equal too."""
    for i in (0, 4):
        plain = load_plain(name, max_num_seqs=1, enable_prefix_caching=False)
        run(plain, [i])
        for place in range(5):
            llm, known = knowing(name, 4, [place], max_num_seqs=1, enable_prefix_caching=False)
            same(run(llm, [i]), name)
            assert llm.stats.accepted_by_position[place:] == [0] * (4 - place)
            assert all(llm.stats.accepted_by_position[:place])
            assert known.own > 0
            _equal_states(plain, llm)
        assert llm.stats.steps < plain.stats.steps / 2


def _equal_states(plain: LLM, other: LLM) -> None:
    """Of all layers of the target, and what their pages hold of the tokens that are committed."""
    ours, theirs = (llm._engine._runner for llm in (other, plain))
    tokens = theirs._states.stamp(0)
    assert ours._states.stamp(0) == tokens
    waiting = tokens % theirs.manager.spec.pool
    for kind in ("kda", "conv", "tails"):
        for a, b in zip(getattr(theirs._states, kind), getattr(ours._states, kind), strict=False):
            if a is not None:
                assert torch.equal(*((t[0][:, :waiting] if kind == "tails" else t[0]) for t in (a, b))), kind


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("drafts", [1, 2, 4])
def test_every_number_together_in_pieces_and_with_prefixes(name: str, drafts: int) -> None:
    llm, known = knowing(name, drafts, [0, 4, 1, 3, 2], max_num_batched_tokens=45, max_num_seqs=3)
    for _ in range(2):
        same(run(llm, [*SOME, *GROWING]), name)
    assert all(llm.stats.accepted_by_position) and len(llm.stats.accepted_by_position) == drafts
    assert llm.stats.prefix_hits > 0 and known.own > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_after_preemption(name: str) -> None:
    llm, _ = knowing(name, 3, [2, 0, 3], num_pages=5, max_num_batched_tokens=40)
    outputs = run(llm, [*GROWING, 3, 4])
    same(outputs, name)
    assert sum(output.num_preemptions for output in outputs.values()) >= 1
    assert llm.stats.accepted_tokens > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_when_others_are_aborted(name: str) -> None:
    llm, _ = knowing(name, 3, [1, 3, 0], max_num_batched_tokens=21, max_num_seqs=4, num_pages=7)
    engine, chance = llm._engine, random.Random(3)
    stay = {i: engine.add(f"stay{i}", tuple(prompts()[i]), params(i).with_defaults({})) for i in (8, 9, 3)}
    number = 0
    while engine.has_requests:
        if number < 12 and chance.random() < 0.4:
            text = tuple(COMMON[: chance.randrange(1, 120)])
            engine.add(f"go{number}", text, params(8).with_defaults({}), priority=-1)
            number += 1
        if chance.random() < 0.3:
            engine.abort(f"go{chance.randrange(12)}")
        engine.step()
    same({i: request.output() for i, request in stay.items()}, name)


@pytest.mark.parametrize("name", FAMILIES)
def test_br47_guesses_of_a_request_do_not_depend_on_its_neighbours(name: str) -> None:
    """What is guessed together is what is guessed alone: each row goes on from its own request's last one."""
    found = []
    for together in (False, True):
        llm = load(name, 3, enable_prefix_caching=False)
        runner: Any = llm._engine._runner
        spied = Spied(runner.drafter)
        runner.drafter = spied
        if together:
            run(llm, SOME)
        else:
            for i in SOME:
                run(llm, [i])
        found.append(spied.first)
    assert found[0] == found[1] and len(found[0]) == len(SOME)


@pytest.mark.parametrize("name", FAMILIES)
def test_prefixes_on_disk_bring_the_rows_of_the_layer(name: str, tmp_path: Path) -> None:
    """A later process finds pages and states, and guesses as the one that computed them."""
    found = []
    for _ in range(2):
        llm = load(name, 3, prefix_cache_dir=tmp_path)
        runner: Any = llm._engine._runner
        runner.drafter = spied = Spied(runner.drafter)
        outputs = run(llm, [3, 4])
        same(outputs, name)
        found.append(spied.first)
    assert found[0] == found[1]
    assert sum(output.num_cached_tokens > 0 for output in outputs.values()) == 2


class Spied(Drafter):
    """Takes down the first guesses of every request."""

    def __init__(self, inner: Drafter) -> None:
        self.drafts, self.inner = inner.drafts, inner
        self.first: dict[tuple[int, ...], list[int]] = {}

    def propose(self, taken: Sequence[Taken], hidden: torch.Tensor) -> list[list[int]]:
        guesses = self.inner.propose(taken, hidden)
        for one, own in zip(taken, guesses, strict=True):
            if own:
                self.first.setdefault(one.request.prompt_token_ids, own)
        return guesses
