"""Scheduling on a mock model, in milliseconds: admission, sharing, preemption, abort, and what never happens."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hadron.engine import scheduler
from hadron.engine.request import Request
from hadron.engine.scheduler import PRIORITY_STEP
from tests.engine.mock_cache import PAGE, MockEngine, continuation


def prompt(count: int, seed: int = 0) -> list[int]:
    return [(seed * 7 + i * 3) % 90 for i in range(count)]


def finished(request: Request, original: list[int], count: int) -> None:
    assert request.output_token_ids == continuation(original, count)


def test_scheduling_loads_no_tensor_library() -> None:
    code = "import sys, hadron.engine.scheduler; print({'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_prompt_is_taken_in_pieces_of_the_budget() -> None:
    e = MockEngine(budget=5, state=False)
    request = e.add(prompt(12), max_tokens=3)
    e.run()
    assert [c["0"] for c in e.counts] == [5, 5, 2, 1, 1]
    finished(request, prompt(12), 3)


def test_decodes_go_on_beside_a_prompt() -> None:
    e = MockEngine(budget=5, pages=20, state=False)
    e.add(prompt(3), max_tokens=6)
    e.step()
    e.add(prompt(20, 1), max_tokens=2)
    for _ in range(5):
        e.step()
    assert e.counts[1:] == [{"0": 1, "1": 4}] * 5


def test_a_short_prompt_does_not_wait_for_a_long_one_and_the_long_one_moves() -> None:
    e = MockEngine(budget=8, pages=64, state=False)
    e.add(prompt(100), max_tokens=1)
    e.step()
    e.add(prompt(10, 1), max_tokens=1)
    e.step()
    e.step()
    assert e.counts == [{"0": 8}, {"0": 3, "1": 5}, {"0": 3, "1": 5}], "a quarter of what is left, and its one token"
    e.run()
    assert all(count["0"] >= 3 for count in e.counts if "0" in count and "1" in count)


def test_more_requests_than_tokens_take_turns() -> None:
    e = MockEngine(budget=2, seqs=5, pages=20, state=False)
    requests = [e.add(prompt(2, i), max_tokens=5) for i in range(5)]
    e.run()
    for i, request in enumerate(requests):
        finished(request, prompt(2, i), 5)
    gaps = [[n for n, c in enumerate(e.counts) if str(i) in c] for i in range(5)]
    assert max(b - a for steps in gaps for a, b in itertools.pairwise(steps)) <= 3


def test_requests_are_admitted_as_they_came_and_no_more_than_may_run() -> None:
    e = MockEngine(seqs=2, pages=20)
    for i in range(4):
        e.add(prompt(3, i), max_tokens=2)
    e.step()
    assert [r.request_id for r in e.scheduler.running] == ["0", "1"]
    assert [r.request_id for r in e.scheduler.waiting] == ["2", "3"]
    e.run()


def test_a_lower_priority_overtakes_a_bounded_number() -> None:
    e = MockEngine(seqs=1, pages=8)
    e.add(prompt(2), max_tokens=1)
    e.step()
    usual = e.add(prompt(2), max_tokens=1)
    urgent = [e.add(prompt(2), max_tokens=1, priority=-1) for _ in range(PRIORITY_STEP + 5)]
    order = []
    while e.scheduler.waiting:
        order += [s.request for s in e.step()]
    assert order.index(usual) == PRIORITY_STEP - 1, "after so many that came later, and no more"
    assert order[0] is urgent[0]


def test_a_prompt_that_does_not_fit_beside_the_others_waits() -> None:
    e = MockEngine(pages=6, budget=64, state=False)
    e.add(prompt(12), max_tokens=8)
    waiting = e.add(prompt(12, 1), max_tokens=2)
    behind = e.add(prompt(2, 2), max_tokens=2)
    e.step()
    assert e.scheduler.waiting == [waiting, behind], "nobody slips past the one that waits for pages"
    e.run()
    finished(waiting, prompt(12, 1), 2)


def test_when_pages_run_out_the_last_gives_way_and_says_the_same() -> None:
    e = MockEngine(pages=8, budget=64, prefix_caching=False)
    first = e.add(prompt(10), max_tokens=16)
    second = e.add(prompt(10, 1), max_tokens=16)
    e.run()
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert e.scheduler.stats.preemptions == 1
    finished(first, prompt(10), 16)
    finished(second, prompt(10, 1), 16)
    e.check()


def test_br77_a_preemption_that_frees_nothing_is_not_repeated() -> None:
    """Two requests share all their full pages: the one that gives way frees a single page, and one is enough."""
    e = MockEngine(pages=5, budget=64, state=False)
    first = e.add(prompt(9), max_tokens=9)
    e.step()
    second = e.add(prompt(9), max_tokens=9)
    e.run()
    assert second.num_cached_tokens == 8
    assert (first.num_preemptions, second.num_preemptions) == (0, 1), "never twice for the same need"
    finished(second, prompt(9), 9)


@pytest.mark.parametrize("state", [False, True])
def test_br80_what_a_request_holds_grows_with_its_tokens_alone(state: bool) -> None:
    """A page for every so many tokens, one slot, and for snapshots a few slots and no page, however long the text."""
    held = []
    for length in (16, 32, 64):
        e = MockEngine(pages=32, seqs=1, budget=7, state=state, snapshots=8)
        request, slots, kept = e.add(prompt(length), max_tokens=length), e.manager.free_slots, 0
        while not request.is_finished:
            e.step()
            used = e.blocks.count - e.blocks.free_blocks
            assert request.is_finished or used == -(-max(length, request.computed) // PAGE)
            kept = len(e.manager.prefixes)
            assert slots - e.manager.free_slots == kept + (not request.is_finished)
        held.append(kept)
    assert held == ([2, 3, 4] if state else [0, 0, 0]), "one for every doubling"


def test_cached_pages_that_nobody_holds_are_free() -> None:
    """The whole cache is full of what may be found again: it gives way."""
    e = MockEngine(pages=8, budget=64)
    for i in range(6):
        request = e.add(prompt(20, i), max_tokens=8)
        e.run()
        finished(request, prompt(20, i), 8)
        assert e.blocks.free_blocks == 8


@pytest.mark.parametrize("state", [False, True])
def test_a_shared_beginning_is_taken_from_the_cache(state: bool) -> None:
    e = MockEngine(pages=16, budget=64, state=state, snapshots=8)
    e.add(prompt(30), max_tokens=1)
    e.run()
    assert e.add(prompt(30)).num_cached_tokens == 0
    e.run()
    again, shorter, other = e.add(prompt(30)), e.add(prompt(21)), e.add(prompt(3))
    e.run()
    assert again.num_cached_tokens == 28
    assert shorter.num_cached_tokens == (16 if state else 20), "the snapshot at 4 pages"
    assert other.num_cached_tokens == 0
    stats = e.scheduler.stats
    assert (stats.prefix_hits, stats.prefix_misses, stats.prefix_too_short) == (3, 1, 1)
    finished(shorter, prompt(21), 4)


def test_without_prefix_caching_nothing_is_missed() -> None:
    e = MockEngine(pages=16, budget=64, prefix_caching=False)
    for text in (prompt(30), prompt(3)):
        e.add(text)
        e.run()
    stats = e.scheduler.stats
    assert (stats.prefix_hits, stats.prefix_misses, stats.prefix_too_short) == (0, 0, 0)
    assert stats.prompt_tokens == 33


@pytest.mark.parametrize("state", [False, True])
def test_the_next_turn_has_all_but_its_new_tokens(state: bool) -> None:
    e = MockEngine(pages=32, budget=64, state=state, snapshots=4)
    first = e.add(prompt(13), max_tokens=24)
    e.run()
    history = [*prompt(13), *first.output_token_ids]
    second = e.add([*history, *prompt(5, 3)])
    e.run()
    assert second.num_cached_tokens == 36 == (len(history) - 1) // PAGE * PAGE
    finished(second, [*history, *prompt(5, 3)], 4)


def test_br74_prompts_that_part_anywhere_find_a_state_of_their_own_depth() -> None:
    """A, A, A+x, prefix(A)+y, with snapshots at whole pages: nothing is applied twice."""
    e = MockEngine(pages=32, budget=3, snapshots=6)
    a = prompt(22)
    for text in (a, a, [*a, 1, 2], [*a[:13], 5, 6], [*a[:16], 7], a[:8], a[:9]):
        request = e.add(text, max_tokens=5)
        e.run()
        finished(request, list(text), 5)
        assert request.num_cached_tokens <= len(text) - 1
        e.check()


def test_a_snapshot_goes_with_its_pages() -> None:
    e = MockEngine(pages=8, budget=64, snapshots=8)
    e.add(prompt(18), max_tokens=1)
    e.run()
    assert len(e.manager.prefixes) == 1
    e.add(prompt(31, 5), max_tokens=1)
    e.run()
    assert e.add(prompt(18)).num_cached_tokens == 0
    e.run()
    e.check()


def test_requests_of_one_prompt_wait_for_the_first() -> None:
    e = MockEngine(pages=32, budget=4, seqs=4)
    leader = e.add(prompt(18), max_tokens=2)
    followers = [e.add(prompt(18), max_tokens=2, follows=leader) for _ in range(3)]
    e.run()
    assert [r.num_cached_tokens for r in followers] == [16] * 3


def test_followers_do_not_wait_for_one_that_was_aborted() -> None:
    e = MockEngine(pages=32, budget=4)
    leader = e.add(prompt(18), max_tokens=2)
    follower = e.add(prompt(18), max_tokens=2, follows=leader)
    e.step()
    leader.abort()
    e.scheduler.release(leader)
    e.run()
    finished(follower, prompt(18), 2)


def test_after_a_failed_step_each_takes_it_alone() -> None:
    e = MockEngine(pages=32, budget=64)
    requests = [e.add(prompt(6, i), max_tokens=4) for i in range(3)]
    e.step()
    steps = e.scheduler.schedule()
    assert len(steps) == 3
    e.scheduler.isolate(steps)
    e.counts.clear()
    e.run()
    assert [len(count) for count in e.counts[:3]] == [1] * 3, "one at a time, past the step that failed"
    assert max(len(count) for count in e.counts) == 3
    for i, request in enumerate(requests):
        finished(request, prompt(6, i), 4)
    e.check()


def test_what_is_not_trusted_is_not_found() -> None:
    e = MockEngine(pages=32, budget=64)
    request = e.add(prompt(18), max_tokens=4)
    e.step()
    e.scheduler.distrust(request)
    e.scheduler.release(request)
    assert e.add(prompt(18)).num_cached_tokens == 0
    e.run()
    assert e.scheduler.stats.cached_tokens == 0


def test_guesses_ride_along_and_save_steps() -> None:
    e = MockEngine(pages=32, budget=64, drafts=4, state=False)
    request = e.add(prompt(6), max_tokens=24)
    e.guesses = lambda r: continuation(r.token_ids, min(4, r.max_new_tokens - len(r.output_token_ids) - 1))  # type: ignore[method-assign]
    e.run()
    finished(request, prompt(6), 24)
    assert [c["0"] for c in e.counts] == [6, 5, 5, 5, 5, 3], "the last token is said and never computed"


def test_guesses_take_what_the_budget_leaves_and_nothing_of_it_from_others() -> None:
    e = MockEngine(pages=64, budget=7, drafts=4, state=False)
    for i in range(2):
        e.add(prompt(3, i), max_tokens=12)
    e.step()
    steps = e.step()
    assert [step.drafts for step in steps] == [4, 1] and sum(len(step.token_ids) for step in steps) == 7
    e.add(prompt(40, 3), max_tokens=2)
    steps = e.step()
    assert [(step.drafts, len(step.token_ids)) for step in steps] == [(0, 1), (0, 1), (0, 5)], "prompts come first"
    e.run()


def test_nobody_gives_way_to_a_guess_and_pages_of_wrong_ones_go_back() -> None:
    e = MockEngine(pages=4, budget=64, drafts=4, prefix_caching=False)
    first, second = e.add(prompt(4), max_tokens=5), e.add(prompt(4, 1), max_tokens=5)
    e.guesses = lambda r: [90] * min(4, r.max_new_tokens - len(r.output_token_ids) - 1)  # type: ignore[method-assign]
    e.step()
    assert [step.drafts for step in e.step()] == [3, 3], "what is left of two pages each"
    e.check()
    assert [len(entry.cache.block_table) for entry in e.scheduler._running if entry.cache] == [2, 2]
    e.run()
    assert first.num_preemptions == second.num_preemptions == 0
    finished(first, prompt(4), 5)
    finished(second, prompt(4, 1), 5)


def test_guesses_end_where_a_state_is_kept() -> None:
    """A step must not run past the end of a page, or nobody would find the state there."""
    e = MockEngine(pages=32, budget=64, drafts=5)
    request = e.add(prompt(6), max_tokens=20)
    e.guesses = lambda r: continuation(r.token_ids, min(5, r.max_new_tokens - len(r.output_token_ids) - 1))  # type: ignore[method-assign]
    ends = []
    while not request.is_finished:
        e.step()
        ends.append(request.computed)
    assert set(range(8, 25, 4)) <= set(ends)
    finished(request, prompt(6), 20)


class Serving(RuleBasedStateMachine):
    """Any order of arrivals, steps, aborts and failures, with guesses and without, on a cache that is always too small."""

    def __init__(self) -> None:
        super().__init__()
        self.e: MockEngine | None = None
        self.live: list[tuple[Request, list[int], int]] = []
        self.idle: dict[str, int] = {}
        self.usual = scheduler.PRIORITY_STEP

    @rule(
        pages=st.integers(4, 12), seqs=st.integers(1, 5), budget=st.integers(1, 12), state=st.booleans(),
        snapshots=st.integers(0, 5), caching=st.booleans(), drafts=st.integers(0, 5),
        overtakes=st.sampled_from([1, 3, 100]),
    )  # fmt: skip
    @precondition(lambda self: self.e is None)
    def begin(
        self, pages: int, seqs: int, budget: int, state: bool, snapshots: int, caching: bool, drafts: int,
        overtakes: int,
    ) -> None:  # fmt: skip
        scheduler.PRIORITY_STEP = overtakes
        self.e = MockEngine(
            pages=pages, seqs=seqs, budget=budget, state=state, snapshots=snapshots, prefix_caching=caching,
            turn_tokens=[3], drafts=drafts,
        )  # fmt: skip

    @rule(
        data=st.data(), base=st.integers(0, 1), cut=st.integers(1, 15), tail=st.lists(st.integers(0, 4), max_size=4),
        most=st.integers(1, 20), priority=st.integers(-1, 1),
    )  # fmt: skip
    @precondition(lambda self: self.e is not None and len(self.live) < 8)
    def arrive(self, data: Any, base: int, cut: int, tail: list[int], most: int, priority: int) -> None:
        assert self.e is not None
        text = [*prompt(15, base)[:cut], *tail][: self.e.capacity]
        leader = None
        if self.live and data.draw(st.booleans()):
            leader = self.live[0][0]
        request = self.e.add(text, max_tokens=most, priority=priority, follows=leader)
        self.live.append((request, text, request.max_new_tokens))

    @rule(times=st.integers(1, 6))
    @precondition(lambda self: bool(self.live))
    def run_steps(self, times: int) -> None:
        assert self.e is not None
        for _ in range(times):
            if not self.live:
                return
            before = {r.request_id: r.computed for r in self.e.scheduler.running}
            free = [r for r in self.e.scheduler.waiting if not self.held(r)]
            steps = self.e.step()
            self.nobody_was_passed_over(free, before)
            assert steps, "a step without progress"
            assert sum(len(step.token_ids) for step in steps) <= self.e.budget
            assert len({step.request.request_id for step in steps}) == len(steps) <= self.e.seqs
            lengths = [len(step.token_ids) for step in steps]
            assert lengths == sorted(lengths, key=lambda n: n > 1 + self.e.drafts), "decodes come first"
            guessing = [step.drafts > 0 for step in steps]
            assert "101" not in "".join(str(int(guesses)) for guesses in guessing), "those with guesses lie apart"
            served = {step.request.request_id for step in steps}
            self.idle = {i: self.idle.get(i, 0) + 1 for i in before if i not in served}
            assert all(steps <= (self.e.seqs + 1) ** 2 for steps in self.idle.values()), "a running request starves"
            for request, text, count in self.live:
                if request.is_finished:
                    finished(request, text, count)
            self.live = [item for item in self.live if not item[0].is_finished]

    def held(self, request: Request) -> bool:
        """Whether a request waits for another to compute what both need."""
        leader = request.follows
        caching = self.e is not None and self.e.scheduler._prefix_caching
        return caching and leader is not None and not leader.is_finished and leader.computed < leader.num_prompt_tokens

    def nobody_was_passed_over(self, free: list[Request], before: dict[str, int]) -> None:
        """Who waits is passed by those of a lower priority alone, and of those that came later only by so many."""
        assert self.e is not None
        waiting = {r.request_id for r in self.e.scheduler.waiting}
        for started in (r for r in self.e.scheduler.running if r.request_id not in before):
            for other in (r for r in free if r.request_id in waiting and r is not started):
                later = int(started.request_id) - int(other.request_id)
                most = scheduler.PRIORITY_STEP * (other.priority - started.priority)
                assert later <= most, f"a waiting request starves: passed by one that came {later} later"

    @rule(data=st.data())
    @precondition(lambda self: bool(self.live))
    def abort(self, data: Any) -> None:
        assert self.e is not None
        item = data.draw(st.sampled_from(self.live))
        item[0].abort()
        self.e.scheduler.release(item[0])
        self.live.remove(item)

    @rule()
    @precondition(lambda self: bool(self.live))
    def a_step_fails(self) -> None:
        assert self.e is not None
        steps = self.e.scheduler.schedule()
        self.e.scheduler.isolate(steps)
        self.idle = {}

    @invariant()
    def books_balance(self) -> None:
        if self.e is not None:
            self.e.check()

    def teardown(self) -> None:
        scheduler.PRIORITY_STEP = self.usual
        if self.e is None:
            return
        self.e.run(limit=3000)
        for request, text, count in self.live:
            assert request.is_finished
            finished(request, text, count)
        self.e.check()
        assert self.e.blocks.free_blocks == self.e.blocks.count


Serving.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestServing = Serving.TestCase
