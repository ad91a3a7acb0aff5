"""`ForwardBatch`: one step, as a number of tokens for each request. Passed as an argument, never global.

Nothing here knows prefill or decode. Requests keep the order they are given in; attention asks for
short ones first (`attention.backend.split_decodes_and_prefills`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from operator import add
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch.nn.functional import pad

from hadron.cache.manager import SequenceCache
from hadron.cache.pages import Pages, written_blocks
from hadron.cache.states import States


class Step(Protocol):
    """Tokens of one request."""

    @property
    def cache(self) -> SequenceCache:
        """The request's, which has grown to hold them."""

    @property
    def token_ids(self) -> Sequence[int]:
        """At least one."""

    @property
    def drafts(self) -> int:
        """How many of them, at the end, are guesses."""

    @property
    def first(self) -> int:
        """The position of the first."""


class RequestStep(NamedTuple):
    """A `Step` by itself. start: the position of its first token, by default the next."""

    cache: SequenceCache
    token_ids: Sequence[int]
    drafts: int = 0
    start: int | None = None

    @property
    def first(self) -> int:
        """The position of the first token."""
        return self.cache.tokens if self.start is None else self.start


class Selections:
    """The router's and the indexers' choices for one sequence: recorded while it runs, or imposed on a run.

    For judging kernels apart from the choices that rounding flips. experts: layer -> int64 [tokens,
    top_k]; positions: layer -> int64 [tokens, width], as the layer's router or indexer gave them.
    """

    def __init__(self) -> None:
        self.experts: dict[str, torch.Tensor] = {}
        self.positions: dict[str, torch.Tensor] = {}
        self.imposed = False
        self._start = 0

    @property
    def length(self) -> int:
        """Tokens whose choices are kept."""
        return max((len(rows) for rows in (*self.experts.values(), *self.positions.values())), default=0)

    def begin(self, start: int) -> None:
        """A step of this sequence begins at position `start`."""
        self._start = start

    def take(self, kept: dict[str, torch.Tensor], layer: str, rows: torch.Tensor) -> torch.Tensor:
        """The rows of a layer for this step: `rows`, taken down, or those kept where they are imposed."""
        if self.imposed:
            return kept[layer][self._start : self._start + rows.shape[0]]
        before = kept.get(layer)
        if before is None:
            kept[layer] = rows
        else:
            width = max(before.shape[1], rows.shape[1])
            kept[layer] = torch.cat([pad(t, (0, width - t.shape[1]), value=-1) for t in (before, rows)])
        return rows


#: Takes rows of some requests [tokens, ...], tensors of states [slots, ...], the slots, the tokens of each request
#: among the rows and its tokens in all; moves the states.
Move = Callable[
    [Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[int], Sequence[int], Sequence[int]], torch.Tensor | None
]


@dataclass(frozen=True, slots=True)
class Moved:
    """What a layer moved copies of states by, to move the states themselves by as many rows as were right."""

    move: Move
    rows: Sequence[torch.Tensor]
    states: Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Verification:
    """The requests of a step whose last tokens are guesses: `requests` of the batch, one after another.

    Their states are read and not written. `moved` is what `ForwardBatch.commit` goes through again, once it is
    known how many tokens of each were right. Layers move copies, one layer after another in the same memory.
    """

    requests: range
    moved: list[Moved] = field(default_factory=list)
    scratch: dict[tuple[int, torch.Size, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def copies(self, states: Sequence[torch.Tensor], slots: Sequence[int]) -> list[torch.Tensor]:
        """What `states` hold in `slots`; good until the next call."""
        found = []
        for i, state in enumerate(states):
            index, key = torch.tensor(slots, device=state.device), (i, state.shape[1:], state.dtype)
            if key in self.scratch:
                torch.index_select(state, 0, index, out=self.scratch[key])
            else:
                self.scratch[key] = state.index_select(0, index)
            found.append(self.scratch[key])
        return found


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """token_ids, positions, request_of_token, slots: int64 [tokens], request after request.

    query_lens: new tokens of each request. context_lens: tokens it had before. sequence_lens: after this step.
    query_starts: its first row among the tokens, and the end of the last. block_tables: int64
    [requests, pages], -1 beyond a request's own. slots: where each token's rows go. state_slots: one a
    request. pages, states: the caches, which a forward pass writes. selections: None, or where the
    choices of the step's only request are kept or come from. verification: None where no token is a guess.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    request_of_token: torch.Tensor
    slots: torch.Tensor
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    sequence_lens: tuple[int, ...]
    query_starts: tuple[int, ...]
    block_tables: torch.Tensor
    state_slots: tuple[int, ...]
    pages: Pages
    states: States
    selections: Selections | None = None
    verification: Verification | None = None

    @property
    def tokens(self) -> int:
        """New tokens in all."""
        return self.token_ids.shape[0]

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Rows (first, end) of each request among the tokens."""
        return tuple(pairwise(self.query_starts))

    def check_stamps(self) -> None:
        """Assert that every state has seen exactly its request's context."""
        seen = self.states.stamps(self.state_slots)
        assert seen == self.context_lens, f"states have seen {seen} tokens, their requests {self.context_lens}"

    def advance(self) -> None:
        """Stamp the states with the tokens they have seen after this step; those of requests that are verified
        have seen none of it. The models' `forward` calls it."""
        for requests, verified in self._parts:
            if not verified:
                part = slice(requests.start, requests.stop)
                self.states.advance(self.state_slots[part], self.sequence_lens[part])

    def move_states(
        self, move: Move, rows: Sequence[torch.Tensor], states: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Let `move` take the rows [tokens, ...] of the step; what it gives, for one part of the requests after
        another. Requests that are verified get copies of their states."""
        if self.verification is None:
            return [move(rows, states, self.state_slots, self.query_lens, self.sequence_lens)]
        found = []
        for requests, verified in self._parts:
            part = slice(requests.start, requests.stop)
            own = self._rows(rows, requests)
            slots, lens, ends = self.state_slots[part], self.query_lens[part], self.sequence_lens[part]
            if verified:
                own = [x.clone() for x in own]  # kept until the commit, without the rows of others
                self.verification.moved.append(Moved(move, own, states))
                copies = self.verification.copies(states, slots)
                found.append(move(own, copies, list(range(len(slots))), lens, ends))
            else:
                found.append(move(own, states, slots, lens, ends))
        return found

    def commit(self, counts: Sequence[int]) -> None:
        """Move and stamp the states of the requests that were verified, each by so many tokens from its first on."""
        assert self.verification is not None
        requests = self.verification.requests
        part = slice(requests.start, requests.stop)
        lens, slots = self.query_lens[part], self.state_slots[part]
        assert all(0 < count <= length for count, length in zip(counts, lens, strict=True))
        ends = [context + count for context, count in zip(self.context_lens[part], counts, strict=True)]
        for moved in self.verification.moved:
            rows = moved.rows
            if tuple(counts) != tuple(lens):
                starts = [end - length for end, length in zip(accumulate(lens), lens, strict=True)]
                rows = [torch.cat([x[i : i + n] for i, n in zip(starts, counts, strict=True)]) for x in rows]
            moved.move(rows, moved.states, slots, counts, ends)
        self.verification.moved.clear()
        self.verification.scratch.clear()
        self.states.advance(slots, ends)

    def _rows(self, rows: Sequence[torch.Tensor], requests: range) -> list[torch.Tensor]:
        """Those of some of the requests, one after another in the batch."""
        first, end = self.query_starts[requests.start], self.query_starts[requests.stop]
        return [x[first:end] for x in rows]

    @property
    def _parts(self) -> list[tuple[range, bool]]:
        """The requests in order, in as few parts as are verified or not."""
        count = len(self.query_lens)
        if self.verification is None:
            return [(range(count), False)]
        inner = self.verification.requests
        parts = [(range(inner.start), False), (inner, True), (range(inner.stop, count), False)]
        return [(requests, verified) for requests, verified in parts if requests]


_ABSENT = array("q", [-1])


def make_batch(
    steps: Sequence[Step], pages: Pages, states: States, selections: Selections | None = None
) -> ForwardBatch:
    """The batch of `steps`, in their order. `IndexError` where a cache does not reach far enough.

    Two requests must not share a page that is written or a state slot; those with guesses follow one another.
    """
    assert selections is None or len(steps) == 1, "selections are those of one request"
    size, n = pages.page_size, len(steps)
    query_lens = tuple([len(step.token_ids) for step in steps])
    assert steps and all(query_lens), "a step needs a token for every request"
    context_lens = tuple([step.first for step in steps])
    sequence_lens = tuple(map(add, context_lens, query_lens))
    starts = (0, *accumulate(query_lens))
    state_slots = tuple([step.cache.state_slot for step in steps])
    assert len(set(state_slots)) == n, "requests share a state"

    held = [step.cache.block_table for step in steps]
    written = written_blocks(held, context_lens, sequence_lens, size, pages.blocks)
    assert len(set(written)) == len(written), "requests share a page that is written"
    # all tensors are parts of one, which is made once and goes to the device once; block tables come first
    width, tokens = max(map(len, held)), starts[-1]
    rows = [table if len(table) == width else table + _ABSENT * (width - len(table)) for table in held]
    numbers = array("q", b"".join(rows))  # thousands behind long contexts: never one by one
    numbers.extend(chain.from_iterable([step.token_ids for step in steps]))
    if tokens == n:  # one token each, as nearly always: twice as fast without arrays
        numbers.extend(context_lens)
        numbers.extend(range(n))
        numbers.extend([block * size + first % size for block, first in zip(written, context_lens, strict=True)])
    else:
        owner = np.repeat(np.arange(n), query_lens)
        position = np.arange(tokens) + np.repeat(np.subtract(context_lens, starts[:-1]), query_lens)
        block = np.frombuffer(numbers, np.int64, n * width).reshape(n, width)[owner, position // size]
        for part in (position, owner, block * size + position % size):
            numbers.frombytes(part.tobytes())
    tables, token_ids, positions, owners, slots = (
        torch.frombuffer(numbers, dtype=torch.int64).to(pages.device).split_with_sizes([n * width, *[tokens] * 4])
    )

    if selections is not None:
        selections.begin(context_lens[0])
    guessing = [i for i, step in enumerate(steps) if step.drafts]
    verification = Verification(range(guessing[0], guessing[-1] + 1)) if guessing else None
    assert verification is None or len(guessing) == len(verification.requests), "requests with guesses lie apart"

    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        request_of_token=owners,
        slots=slots,
        query_lens=query_lens,
        context_lens=context_lens,
        sequence_lens=sequence_lens,
        query_starts=starts,
        block_tables=tables.view(n, width),
        state_slots=state_slots,
        pages=pages,
        states=states,
        selections=selections,
        verification=verification,
    )
