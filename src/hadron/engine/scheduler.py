"""How many new tokens each request gets in a step. Imports no tensor library.

A step has one budget of tokens. Every request that decodes gets one token; what is left goes to prompts in
pieces: a quarter to the one that came first, the rest to those with the fewest tokens left, so that a short
question does not wait for a long document and the document still moves. Where there are more requests than
tokens, they take turns.

Requests are admitted in the order of (arrival + PRIORITY_STEP * priority): a lower priority overtakes, but
only so many earlier ones, so nobody waits for ever. Admission takes pages for everything that is known of a
request; only decoding can run out of pages. Then the last in that order loses its cache as a whole and
waits for its turn again, and computes the same bits again. The first in order can always have every page,
so something moves in every step.

Guesses of a request's next tokens ride along where the budget and the pages have room; nobody gives way to them.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from hadron.cache.blocks import extend_hashes
from hadron.cache.manager import CacheManager, PrefixMatch, SequenceCache
from hadron.engine.request import Request, State
from hadron.engine.snapshots import places
from hadron.engine.stats import Stats

#: How many earlier requests one level of priority overtakes.
PRIORITY_STEP = 100
#: The share of a step's tokens for prompts that the first of them gets at least: one in so many.
OLDEST_SHARE = 4


@dataclass(slots=True, eq=False)
class _Entry:
    """A request between `add` and its end. order: smaller goes first. served: the step of its last tokens.

    hashes: of the whole pages of what is known. places: token counts at which its state is kept.
    passing: the hash of the snapshot that moves along while it decodes. alone_until: tokens up to which it
    must not share a step. drafts: guesses of the tokens after the one that is to be computed next. quiet: whether
    there are to be none any more, since a step with some failed.
    """

    request: Request
    order: tuple[int, int]
    cache: SequenceCache | None = None
    served: int = 0
    hashes: list[bytes] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    passing: bytes | None = None
    alone_until: int = 0
    drafts: list[int] = field(default_factory=list)
    quiet: bool = False


_ORDER = attrgetter("order")


class Scheduled(NamedTuple):
    """A request's next tokens in a step; its cache has room for them. last: whether none is left unseen.
    drafts: how many of the tokens, at the end, are guesses."""

    request: Request
    cache: SequenceCache
    token_ids: list[int]
    last: bool
    drafts: int = 0

    @property
    def first(self) -> int:
        """The position of its first token."""
        return self.cache.tokens

    @property
    def guesses(self) -> list[int]:
        """Those of the tokens that are guesses."""
        return self.token_ids[len(self.token_ids) - self.drafts :]


class Scheduler:
    """Requests to steps. turn_tokens: see `snapshots.places`. prefix_caching: whether later requests find
    what earlier ones computed. drafts: most guesses of a request in a step."""

    def __init__(
        self,
        manager: CacheManager,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        prefix_caching: bool = True,
        turn_tokens: Collection[int] = (),
        drafts: int = 0,
    ) -> None:
        self._drafts = drafts
        self._manager = manager
        self._budget = max_num_batched_tokens
        self._most = max_num_seqs
        self._prefix_caching = prefix_caching
        self._turn_tokens = frozenset(turn_tokens)
        self._waiting: list[_Entry] = []
        self._running: list[_Entry] = []
        self._entries: dict[str, _Entry] = {}
        self._arrivals = 0
        self._step = 0
        self.stats = Stats()

    @property
    def idle(self) -> bool:
        """Whether there is no request at all."""
        return not self._entries

    @property
    def waiting(self) -> list[Request]:
        """Requests without a cache, in the order in which they will get one."""
        return [entry.request for entry in self._waiting]

    @property
    def running(self) -> list[Request]:
        """Requests with a cache, in order."""
        return [entry.request for entry in self._running]

    def add(self, request: Request) -> None:
        """Queue a request. Its tokens must fit the cache when it is alone (`Request.capacity`)."""
        assert request.request_id not in self._entries, f"request {request.request_id} is here already"
        order = (self._arrivals + PRIORITY_STEP * request.priority, self._arrivals)
        self._arrivals += 1
        entry = self._entries[request.request_id] = _Entry(request, order)
        insort(self._waiting, entry, key=_ORDER)

    def schedule(self) -> list[Scheduled]:
        """The next step: at least one token for some request, unless there is none.

        Short queries come first, those with guesses last among them.
        """
        self._step += 1
        self._admit()
        while True:
            counts = self._share_out()
            if self._grow(counts):
                break
            self._preempt(self._running[-1])
        steps, left = [], self._budget - sum(counts.values())
        for entry, count in counts.items():
            entry.served = self._step
            request, drafts = entry.request, 0
            assert entry.cache is not None
            ids, last = request.next_tokens(count)
            if entry.drafts:
                riding = self._riding(entry, left) if last and count == 1 else []
                ids, drafts, entry.drafts = ids + riding, len(riding), []
                left -= drafts
            steps.append(Scheduled(request, entry.cache, ids, last, drafts))
        if left < self._budget - len(steps):  # else one token each
            steps.sort(key=lambda step: (len(step.token_ids) > 1 + self._drafts, step.drafts > 0))
        return steps

    def draft(self, request: Request, guesses: list[int]) -> None:
        """Guesses of the tokens that follow those which are known of a running request."""
        self._entries[request.request_id].drafts = guesses

    def _riding(self, entry: _Entry, most: int) -> list[int]:
        """Those of the guesses that go along in this step, with room for them in the cache; at most so many."""
        assert entry.cache is not None
        if not entry.drafts or entry.alone_until or entry.quiet:
            return []
        count = min(most, len(entry.drafts))
        if self._prefix_caching and self._manager.spec.has_state:
            # a state is kept where a page ends: do not run past that
            size = self._manager.spec.page_size
            count = min(count, size - 1 - entry.request.computed % size)
        while count > 0 and not self._manager.try_grow(entry.cache, 1 + count):
            count -= 1
        return entry.drafts[: max(0, count)]

    def commit(self, steps: Iterable[Scheduled]) -> list[Scheduled]:
        """The tokens of `steps` are in their caches: count them. Returns those after which `keep` may have something
        to do, once it is known that their logits are sound."""
        size, due = self._manager.spec.page_size, []
        for step in steps:
            request, computed = step.request, step.cache.tokens
            before, request.computed = request.computed, computed
            assert before + len(step.token_ids) == computed, f"{computed} tokens in the cache, {before} before"
            entry = self._entries[request.request_id]
            if computed >= entry.alone_until:
                entry.alone_until = 0
            if computed % size == 0 or before < request.num_prompt_tokens <= computed:
                due.append(step)
        return due

    def keep(self, due: Iterable[Scheduled]) -> None:
        """Keep for later requests what pays of the steps that `commit` gave."""
        if not self._prefix_caching:
            return
        for step in due:
            request, cache = step.request, step.cache
            if request.computed % self._manager.spec.page_size == 0:
                self._keep_state(self._entries[request.request_id], cache)
            if request.computed - len(step.token_ids) < request.num_prompt_tokens <= request.computed:
                self._manager.persist(cache)  # at once: what took hours must not wait for the answer

    def _keep_state(self, entry: _Entry, cache: SequenceCache) -> None:
        """Keep the state where a page ends: at a place of the prompt for good, behind it in one that moves along."""
        if entry.request.computed in entry.places:
            self._manager.keep(cache)
        elif entry.request.computed >= entry.request.num_prompt_tokens:
            kept = self._manager.keep(cache, passing=True)
            if kept is not None:
                if entry.passing is not None and entry.passing != kept:
                    self._manager.prefixes.drop_passing(entry.passing)
                entry.passing = kept

    def release(self, request: Request) -> None:
        """The request ends here, for whatever reason: its cache is given back."""
        entry = self._entries.pop(request.request_id)
        if entry.cache is None:
            self._waiting.remove(entry)
        else:
            self._running.remove(entry)
            if request.error is None:
                self._manager.persist(entry.cache)
            self._manager.release(entry.cache)
            entry.cache = None

    def distrust(self, request: Request) -> None:
        """What the request has in its cache is not what it should be: nobody may use it."""
        cache = self._entries[request.request_id].cache
        if cache is not None:
            self._manager.forget(cache)

    def isolate(self, steps: Sequence[Scheduled]) -> None:
        """A step failed and left these caches unusable: each begins again, and takes that step by itself."""
        for step in steps:
            entry = self._entries[step.request.request_id]
            entry.alone_until = step.request.computed + len(step.token_ids) - step.drafts
            entry.quiet = entry.quiet or step.drafts > 0
            self._preempt(entry)

    def get(self, request_id: str) -> Request | None:
        """The request of that id, unless it has ended."""
        entry = self._entries.get(request_id)
        return None if entry is None else entry.request

    def _admit(self) -> None:
        while len(self._running) < self._most:
            entry = next((e for e in self._waiting if not self._held(e)), None)
            if entry is None:
                return
            match, free = self._match(entry), self._manager.blocks.free_blocks
            # a page for each that runs, so that it can go on for a while before somebody must give way
            if self._manager.claimed(match, entry.request.num_tokens) + len(self._running) > free and self._running:
                return
            if self._manager.store is not None:
                self._manager.recall(entry.hashes, entry.request.num_tokens)
                match = self._match(entry)
            self._start(entry, match)
            self._waiting.remove(entry)  # last: whatever ends what is above, the request is still there

    def _held(self, entry: _Entry) -> bool:
        """Whether another request is about to compute what this one needs."""
        leader = entry.request.follows
        return (
            leader is not None and self._prefix_caching and not leader.is_finished
            and leader.computed < leader.num_prompt_tokens
        )  # fmt: skip

    def _match(self, entry: _Entry) -> PrefixMatch:
        request = entry.request
        if not self._reusable(request):
            return PrefixMatch()
        size = self._manager.spec.page_size
        if len(entry.hashes) < request.num_tokens // size:
            extend_hashes(entry.hashes, request.token_ids, size)
        return self._manager.match(entry.hashes, request.reusable_tokens)

    def _reusable(self, request: Request) -> int:
        """How long a beginning of the request is looked for in the cache."""
        return request.reusable_tokens if self._prefix_caching else 0

    def _start(self, entry: _Entry, match: PrefixMatch) -> None:
        request = entry.request
        cache = self._manager.admit(match=match, findable=self._prefix_caching)
        self._manager.grow(cache, request.num_tokens - cache.tokens)
        entry.cache, entry.served = cache, self._step - 1
        request.computed, request.state = cache.tokens, State.RUNNING
        if self._prefix_caching and self._manager.spec.has_state:
            limit = self._manager.prefixes.limit
            text = request.token_ids if request.scoring is None else request.token_ids[: request.scoring.first]
            found = places(text, self._manager.spec.page_size, self._turn_tokens, limit)
            entry.places = [place for place in found if place > cache.tokens]
        if request.num_preemptions == 0:
            request.num_cached_tokens = cache.tokens
            self.stats.admitted(
                request.num_prompt_tokens, cache.tokens, self._reusable(request), self._manager.spec.page_size
            )
        insort(self._running, entry, key=_ORDER)

    def _share_out(self) -> dict[_Entry, int]:
        """The budget as tokens for running requests, in order."""
        running = self._running
        if any(entry.alone_until for entry in running):  # those by themselves and all others take turns
            first = min(running, key=attrgetter("served", "order"))
            running = [first] if first.alone_until else [entry for entry in running if not entry.alone_until]
        if len(running) > self._budget:
            turns = sorted(running, key=attrgetter("served", "order"))[: self._budget]
            return dict.fromkeys(sorted(turns, key=_ORDER), 1)
        counts = dict.fromkeys(running, 1)
        prompts = [entry for entry in running if entry.request.num_uncomputed > 1 and self._next_piece(entry) > 1]
        left = self._budget - len(running)
        shares = [(entry, left) for entry in sorted(prompts, key=lambda e: (e.request.num_uncomputed, e.order))]
        if prompts:
            shares.insert(0, (prompts[0], -(-left // OLDEST_SHARE)))
        for entry, most in shares:
            more = min(self._next_piece(entry) - counts[entry], most, left)
            counts[entry] += more
            left -= more
        return counts

    def _next_piece(self, entry: _Entry) -> int:
        """Most tokens that the request can take in one step: to where its state is to be kept, or all."""
        computed = entry.request.computed
        return next((place - computed for place in entry.places if place > computed), entry.request.num_uncomputed)

    def _grow(self, counts: dict[_Entry, int]) -> bool:
        """Make room for the tokens of all; False where that is not to be had."""
        caches = [entry.cache for entry in counts if entry.cache is not None]
        return all(map(self._manager.try_grow, caches, counts.values()))

    def _preempt(self, entry: _Entry) -> None:
        """The request loses pages and state together, and keeps its place in the order."""
        assert entry.cache is not None
        self._manager.release(entry.cache)
        self._running.remove(entry)
        entry.cache, entry.passing, entry.drafts = None, None, []
        request = entry.request
        request.computed, request.state = 0, State.WAITING
        request.num_preemptions += 1
        self.stats.preemptions += 1
        insort(self._waiting, entry, key=_ORDER)
