"""Pages and states as plain Python, and a model that is arithmetic over them: scheduling without tensors.

A page holds the tokens that were written to it, a state the digest of all tokens it has seen. A page handed
to two requests, a state that is ahead or behind, or a position off by one changes the digest, and with it
every token that follows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from hadron.cache.blocks import BlockPool
from hadron.cache.manager import CacheManager
from hadron.cache.spec import CacheSpec, LayerCache
from hadron.engine.request import Request
from hadron.engine.scheduler import Scheduled, Scheduler
from hadron.sampling_params import SamplingParams

VOCABULARY = 97
PAGE = 4


def digest(tokens: Sequence[int], value: int = 17) -> int:
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    return value


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """What the model says, computed from the tokens alone."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(digest(tokens) % VOCABULARY)
    return tokens[len(prompt) :]


class MockStates:
    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.values = [(0, 0)] * slots  # (tokens, digest)

    def stamp(self, slot: int) -> int:
        return self.values[slot][0]

    def stamps(self, slots: Sequence[int]) -> tuple[int, ...]:
        return tuple(map(self.stamp, slots))

    def reset(self, slot: int, tokens: int) -> None:
        self.values[slot] = (tokens, digest([]))

    def copy(self, source: int, target: int) -> None:
        self.values[target] = self.values[source]


class MockPages:
    def __init__(self, blocks: int) -> None:
        self.rows: list[list[int | None]] = [[None] * PAGE for _ in range(blocks)]

    def copy_page(self, source: int, target: int) -> None:
        self.rows[target] = list(self.rows[source])


class MockEngine:
    """A scheduler, its caches and the loop around them."""

    def __init__(
        self, *, pages: int = 8, seqs: int = 3, budget: int = 6, state: bool = True, snapshots: int = 3,
        prefix_caching: bool = True, turn_tokens: Sequence[int] = (), drafts: int = 0,
    ) -> None:  # fmt: skip
        self.state = state
        self.drafts, self.chance, self.right = drafts, random.Random(5), 0
        layer = LayerCache(latent_width=1, kda=(1, 1) if state else ())
        spec = CacheSpec((layer,), 1, "float32", PAGE, "float32")
        snapshots = snapshots if state and prefix_caching else 0
        self.states, self.pages = MockStates(seqs + snapshots), MockPages(pages)
        self.blocks = BlockPool(pages, PAGE)
        self.manager = CacheManager(spec, self.blocks, self.pages, self.states, prefix_snapshots=snapshots)
        self.scheduler = Scheduler(
            self.manager, max_num_batched_tokens=budget, max_num_seqs=seqs, prefix_caching=prefix_caching,
            turn_tokens=turn_tokens, drafts=drafts,
        )  # fmt: skip
        self.budget, self.seqs, self.capacity = budget, seqs, pages * PAGE
        self.counts: list[dict[str, int]] = []
        self.number = 0

    def add(self, prompt: Sequence[int], max_tokens: int = 4, priority: int = 0, **options: Any) -> Request:
        request = Request(
            request_id=str(self.number), prompt_token_ids=tuple(prompt), capacity=self.capacity, seed=0,
            params=SamplingParams(max_tokens=max_tokens, temperature=0).with_defaults({}), eos=frozenset(),
            priority=priority, **options,
        )  # fmt: skip
        self.number += 1
        self.scheduler.add(request)
        return request

    def forward(self, step: Scheduled) -> list[int]:
        """The digests of everything up to each of the step's tokens, read back from pages and state. Of a step with
        guesses the state stays where it is."""
        cache, start = step.cache, step.cache.tokens
        seen, value = self.states.values[cache.state_slot]
        assert seen == start
        for position, token in enumerate(step.token_ids, start):
            self.pages.rows[cache.block_table[position // PAGE]][position % PAGE] = token
        end = start + len(step.token_ids)
        prefix = [self.pages.rows[cache.block_table[p // PAGE]][p % PAGE] for p in range(end)]
        assert None not in prefix, "a page was read before it was written"
        value = digest(prefix) if not self.state else digest(step.token_ids, value)  # type: ignore[arg-type]
        assert value == digest(prefix), "state and pages disagree"  # type: ignore[arg-type]
        if not step.drafts:
            self.states.values[cache.state_slot] = (end, value)
        return [digest(prefix[: p + 1]) for p in range(start, end)]  # type: ignore[arg-type]

    def step(self) -> list[Scheduled]:
        steps = self.scheduler.schedule()
        values = [self.forward(step) for step in steps]
        settled = [self.take(step, own) for step, own in zip(steps, values, strict=True)]
        for step in settled:
            self.manager.commit([step.cache], [step.token_ids])
            if step.last:
                self.manager.trim(step.cache)
        self.scheduler.keep(self.scheduler.commit(settled))
        for step in settled:
            if step.request.is_finished:
                self.scheduler.release(step.request)
            elif step.last and self.drafts:
                self.scheduler.draft(step.request, self.guesses(step.request))
        self.counts.append({step.request.request_id: len(step.token_ids) for step in steps})
        return steps

    def take(self, step: Scheduled, values: list[int]) -> Scheduled:
        """Give a request what its step says; the step as far as its guesses were right, with its state moved."""
        said, request = 0, step.request
        for i, value in enumerate(values[-1 - step.drafts :] if step.last else []):
            request.append(value % VOCABULARY)
            said += 1
            if request.is_finished or step.guesses[i : i + 1] != [value % VOCABULARY]:
                break
        if not step.drafts:
            return step
        self.right += said - 1
        kept = step.token_ids[: max(1, said)]
        seen, value = self.states.values[step.cache.state_slot]
        self.states.values[step.cache.state_slot] = (seen + len(kept), digest(kept, value))
        return step._replace(token_ids=kept, drafts=0)

    def guesses(self, request: Request) -> list[int]:
        """As many as would be of use, right up to a random place."""
        most = min(self.drafts, request.max_new_tokens - len(request.output_token_ids) - 1)
        found = continuation(request.token_ids, most)
        wrong = self.chance.randint(0, most + 1)
        return [(token + (i >= wrong)) % VOCABULARY for i, token in enumerate(found)]

    def run(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if not (self.scheduler.waiting or self.scheduler.running):
                return
            assert self.step(), "a step without progress"
        raise AssertionError("it does not end")

    def check(self) -> None:
        """No page or slot is lost, or held by more or fewer than the books say."""
        held: dict[int, int] = {}
        caches = [entry.cache for entry in self.scheduler._running]
        for cache in caches:
            assert cache is not None
            for block in cache.block_table:
                held[block] = held.get(block, 0) + 1
            full = cache.tokens // PAGE
            for block in cache.block_table[full:]:
                assert self.blocks.references(block) == 1, "a page that is written to is shared"
        for block in range(self.blocks.count):
            assert self.blocks.references(block) == held.get(block, 0)
        assert self.blocks.free_blocks == self.blocks.count - len(held)
        slots = [cache.state_slot for cache in caches if cache is not None] + self.manager.prefixes.slots
        assert len(set(slots)) == len(slots), "a state slot is held twice"
        assert sorted(slots + self.manager._free_slots) == list(range(self.states.slots))
        assert len(self.manager.prefixes) <= self.manager.prefixes.limit
