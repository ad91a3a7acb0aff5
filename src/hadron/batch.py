"""`ForwardBatch`: one step, as a number of tokens for each request. Passed as an argument, never global.

Nothing here knows prefill or decode. Requests keep the order they are given in; attention asks for
short ones first (`attention.backend.split_decodes_and_prefills`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from hadron.cache.manager import SequenceCache
from hadron.cache.pages import Pages, slot_mapping
from hadron.cache.states import States


@dataclass(frozen=True, slots=True)
class RequestStep:
    """The next tokens of one request, whose cache has grown to hold them."""

    cache: SequenceCache
    token_ids: Sequence[int]


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


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """token_ids, positions, request_of_token, slots: int64 [tokens], request after request.

    query_lens: new tokens of each request. context_lens: tokens it had before. block_tables: int64
    [requests, pages], -1 beyond a request's own. slots: where each token's rows go. state_slots: one a
    request. pages, states: the caches, which a forward pass writes. selections: None, or where the
    choices of the step's only request are kept or come from.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    request_of_token: torch.Tensor
    slots: torch.Tensor
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_tables: torch.Tensor
    state_slots: tuple[int, ...]
    pages: Pages
    states: States
    selections: Selections | None = None

    @property
    def tokens(self) -> int:
        """New tokens in all."""
        return self.token_ids.shape[0]

    @property
    def sequence_lens(self) -> tuple[int, ...]:
        """Tokens of each request after this step."""
        return tuple(c + q for c, q in zip(self.context_lens, self.query_lens, strict=True))

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Rows (first, end) of each request among the tokens."""
        ends, total = [], 0
        for length in self.query_lens:
            ends.append((total, total + length))
            total += length
        return tuple(ends)

    def check_stamps(self) -> None:
        """Assert that every state has seen exactly its request's context."""
        for slot, context in zip(self.state_slots, self.context_lens, strict=True):
            stamp = self.states.stamp(slot)
            assert stamp == context, f"state slot {slot} has seen {stamp} tokens, its request {context}"

    def advance(self) -> None:
        """Stamp the states with the tokens they have seen after this step. The models' `forward` calls it."""
        self.states.advance(self.state_slots, self.sequence_lens)


def make_batch(
    steps: Sequence[RequestStep], pages: Pages, states: States, selections: Selections | None = None
) -> ForwardBatch:
    """The batch of `steps`, in their order. `IndexError` where a cache does not reach far enough.

    Two requests must not share a page that is written or a state slot.
    """
    assert selections is None or len(steps) == 1, "selections are those of one request"
    assert steps and all(len(step.token_ids) for step in steps), "a step needs a token for every request"
    size = pages.page_size
    slots: list[int] = []
    positions: list[int] = []
    owners: list[int] = []
    for i, step in enumerate(steps):
        count, start = len(step.token_ids), step.cache.tokens
        slots += slot_mapping(step.cache.block_table, start, count, size, pages.blocks)
        positions += range(start, start + count)
        owners += [i] * count
    state_slots = tuple(step.cache.state_slot for step in steps)
    assert len(set(slots)) == len(slots) and len(set(state_slots)) == len(state_slots), "requests share a cache"
    width = max(len(step.cache.block_table) for step in steps)
    tables = [step.cache.block_table + [-1] * (width - len(step.cache.block_table)) for step in steps]

    if selections is not None:
        selections.begin(steps[0].cache.tokens)

    def ints(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=pages.device)

    return ForwardBatch(
        token_ids=ints([token for step in steps for token in step.token_ids]),
        positions=ints(positions),
        request_of_token=ints(owners),
        slots=ints(slots),
        query_lens=tuple(len(step.token_ids) for step in steps),
        context_lens=tuple(step.cache.tokens for step in steps),
        block_tables=ints(tables),
        state_slots=state_slots,
        pages=pages,
        states=states,
        selections=selections,
    )
