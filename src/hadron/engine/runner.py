"""Runs a step: token counts a request -> `ForwardBatch` -> model -> logits, and owns the caches.

It decides nothing. Every step is the same whether it is a whole prompt, a piece of one or one token;
`wanted` says of how many last tokens the logits are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from hadron.batch import RequestStep, Selections, make_batch
from hadron.cache.blocks import BlockPool
from hadron.cache.manager import CacheManager, SequenceCache
from hadron.cache.pages import Pages
from hadron.cache.spec import CacheSpec
from hadron.cache.states import States
from hadron.layers.logits import Logits
from hadron.models.language_model import LanguageModel


class Runner:
    """A model with caches for `sequences` requests of up to `max_context` tokens each."""

    def __init__(self, model: LanguageModel, spec: CacheSpec, *, max_context: int, sequences: int = 1) -> None:
        blocks = sequences * -(-max_context // spec.page_size)
        self.model = model
        self.max_context = max_context
        self._pages = Pages(spec, blocks, model.settings.device)
        self._states = States(spec, sequences, model.settings.device)
        self._manager = CacheManager(spec, BlockPool(blocks, spec.page_size), self._pages, self._states)

    def admit(self, prompt: Sequence[int] = ()) -> SequenceCache:
        """An empty cache, or one that already holds whole pages of `prompt` (`.tokens` says how much)."""
        return self._manager.admit(prompt)

    def release(self, cache: SequenceCache) -> None:
        """Give everything a request holds back."""
        self._manager.release(cache)

    def run(
        self, steps: Sequence[RequestStep], wanted: Sequence[int], selections: Selections | None = None
    ) -> list[Logits | None]:
        """Take the steps' tokens into their caches; for each, the logits of its last tokens, where any are wanted.

        selections: of the only step's request, to be recorded or imposed.

        When it raises, the caches of these requests are no longer usable and must be released.
        """
        for step in steps:
            self._manager.grow(step.cache, len(step.token_ids))
        with torch.inference_mode():
            batch = make_batch(steps, self._pages, self._states, selections)
            hidden = self.model.forward(batch)
            rows = [
                row for (_, end), count in zip(batch.ranges, wanted, strict=True) for row in range(end - count, end)
            ]
            logits = self.model.head(hidden[torch.tensor(rows, device=hidden.device)]) if rows else None
        for step in steps:
            self._manager.commit(step.cache, step.token_ids)
        ends = list(accumulate(wanted))
        return [
            logits.rows(end - count, end) if logits is not None and count else None
            for end, count in zip(ends, wanted, strict=True)
        ]
