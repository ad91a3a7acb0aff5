"""Runs a step: token counts a request -> `ForwardBatch` -> model -> logits, and owns the caches.

It decides nothing. Every step is the same whether it is a whole prompt, a piece of one, one token or one with
guesses behind it; `wanted` says of how many last tokens the logits are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hadron.batch import ForwardBatch, Selections, Step, make_batch
from hadron.cache.blocks import BlockPool
from hadron.cache.manager import CacheManager
from hadron.cache.pages import Pages
from hadron.cache.spec import CacheSpec
from hadron.cache.states import States
from hadron.cache.stores import PrefixStore
from hadron.engine.speculative import Drafter
from hadron.layers.logits import Logits
from hadron.models.language_model import LanguageModel, NonFiniteTrace
from hadron.models.mtp import Mtp


class Ran(NamedTuple):
    """A step. logits: of the wanted tokens in their order, None where none are. hidden: of all tokens of the batch,
    after the final norm."""

    logits: Logits | None
    hidden: torch.Tensor
    batch: ForwardBatch


class Runner:
    """A model with its caches.

    num_pages: of 64 tokens each, shared by all requests; by default enough for `max_num_seqs` requests of
    `max_model_len` tokens. prefix_snapshots: states kept for later requests. debug_nonfinite: look at every
    layer's output; `faults` then names, for each request of the last step, where it first was not finite.
    store: opens what keeps prefixes beyond the life of the process. mtp: what guesses tokens, at most `drafts`
    of a request in a step; the spec then has its layer.
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
        mtp: Mtp | None = None,
        drafts: int = 0,
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
        self.drafter = None if mtp is None else Drafter(mtp, self.manager, self._pages, self._states, drafts)

    def run(self, steps: Sequence[Step], wanted: Sequence[int], selections: Selections | None = None) -> Ran:
        """Take the steps' tokens into their caches, which have room for them, and compute the logits of the last
        tokens that are wanted of each.

        selections: of the only step's request, to be recorded or imposed.

        The caches of steps with guesses stand where they stood, until `accept`. When it raises, the caches of these
        requests are no longer usable and must be released.
        """
        with torch.inference_mode():
            batch = make_batch(steps, self._pages, self._states, selections)
            trace = NonFiniteTrace() if self.debug_nonfinite else None
            hidden = self.model.forward(batch, trace)
            if trace is not None:
                # of guesses, only logits tell: a fault behind a wrong one is nobody's
                self.faults = [
                    trace.first(start, end - step.drafts)
                    for (start, end), step in zip(batch.ranges, steps, strict=True)
                ]
            logits, number = None, sum(wanted)
            if number:
                asked = hidden
                if number < batch.tokens:
                    ends = batch.query_starts[1:]
                    rows = [row for end, count in zip(ends, wanted, strict=True) for row in range(end - count, end)]
                    asked = hidden[torch.tensor(rows, device=hidden.device)]
                logits = self.model.head(asked)
        certain = [step for step in steps if not step.drafts]
        self.manager.commit([step.cache for step in certain], [step.token_ids for step in certain])
        return Ran(logits, hidden, batch)

    def accept(self, batch: ForwardBatch, steps: Sequence[Step]) -> None:
        """Take into their caches what was right of the steps with guesses of a batch: the tokens that are left in
        `steps`, in the same order."""
        with torch.inference_mode():
            batch.commit([len(step.token_ids) for step in steps])
        self.manager.commit([step.cache for step in steps], [step.token_ids for step in steps])
        for step in steps:
            self.manager.trim(step.cache)
