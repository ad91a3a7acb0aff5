"""Runs a step: token counts a request -> `ForwardBatch` -> model -> logits, and owns the caches.

It decides nothing. Every step is the same whether it is a whole prompt, a piece of one or one token;
`wanted` says of how many last tokens the logits are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from hadron.batch import RequestStep, Selections, make_batch
from hadron.cache.blocks import BlockPool
from hadron.cache.manager import CacheManager, PrefixStore
from hadron.cache.pages import Pages
from hadron.cache.spec import CacheSpec
from hadron.cache.states import States
from hadron.layers.logits import Logits
from hadron.models.language_model import LanguageModel, NonFiniteTrace


class Runner:
    """A model with its caches.

    num_pages: of 64 tokens each, shared by all requests; by default enough for `max_num_seqs` requests of
    `max_model_len` tokens. prefix_snapshots: states kept for later requests. debug_nonfinite: look at every
    layer's output; `faults` then names, for each request of the last step, where it first was not finite.
    store: opens what keeps prefixes beyond the life of the process.
    """

    def __init__(
        self,
        model: LanguageModel,
        spec: CacheSpec,
        *,
        max_model_len: int,
        max_num_seqs: int = 1,
        num_pages: int | None = None,
        prefix_snapshots: int = 0,
        debug_nonfinite: bool = False,
        store: Callable[[Pages, States], PrefixStore] | None = None,
    ) -> None:
        if num_pages is None:
            num_pages = max_num_seqs * -(-max_model_len // spec.page_size)
        self.model = model
        self.debug_nonfinite = debug_nonfinite
        self.faults: list[str | None] = []
        self.max_num_seqs = max_num_seqs
        self.max_model_len = min(max_model_len, num_pages * spec.page_size)
        self._pages = Pages(spec, num_pages, model.settings.device)
        self._states = States(spec, max_num_seqs + prefix_snapshots, model.settings.device)
        blocks = BlockPool(num_pages, spec.page_size)
        self.manager = CacheManager(
            spec,
            blocks,
            self._pages,
            self._states,
            prefix_snapshots=prefix_snapshots,
            store=None if store is None else store(self._pages, self._states),
        )

    def run(
        self, steps: Sequence[RequestStep], wanted: Sequence[int], selections: Selections | None = None
    ) -> tuple[Logits | None, list[range]]:
        """Take the steps' tokens into their caches; the logits of the last tokens that are wanted of each, None where
        none are, and which rows are whose.

        selections: of the only step's request, to be recorded or imposed.

        When it raises, the caches of these requests are no longer usable and must be released.
        """
        for step in steps:
            self.manager.grow(step.cache, len(step.token_ids))
        with torch.inference_mode():
            batch = make_batch(steps, self._pages, self._states, selections)
            trace = NonFiniteTrace() if self.debug_nonfinite else None
            hidden = self.model.forward(batch, trace)
            if trace is not None:
                self.faults = [trace.first(*rows) for rows in batch.ranges]
            rows = [
                row for (_, end), count in zip(batch.ranges, wanted, strict=True) for row in range(end - count, end)
            ]
            logits = self.model.head(hidden[torch.tensor(rows, device=hidden.device)]) if rows else None
        for step in steps:
            self.manager.commit(step.cache, step.token_ids)
        return logits, [range(end - count, end) for end, count in zip(accumulate(wanted), wanted, strict=True)]
