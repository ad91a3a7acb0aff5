"""Speculative decoding: the multi-token-prediction layer guesses, a step of the model checks, what was right stays.

Nothing here decides what a request says. A step takes the guesses behind the token that is certain; the sampler
goes through its rows as it would one step after another, and the first row whose token is not the guess ends it. So
texts, log-probabilities and errors are those without guesses, and only how many steps they take depends on them.

The layer keeps latents and keys of its own in the pages of the target: the row at position p is made of the target's
hidden state there and of the token at p + 1, which is known once a step's tokens are chosen. Rows are written for all
tokens of a step before anybody else can see its pages. The last row of a page that requests share was written with
the token which followed there first: that touches what is guessed, never what is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from hadron.batch import RequestStep, make_batch
from hadron.cache.manager import CacheManager, SequenceCache
from hadron.cache.pages import Pages
from hadron.cache.states import States
from hadron.engine import sampler
from hadron.engine.request import Request
from hadron.errors import HadronError, NumericsError
from hadron.layers.logits import Logits
from hadron.models.mtp import Mtp


@dataclass(frozen=True, slots=True)
class Taken:
    """What a step took into one request's cache: tokens from position `first` on, `count` of them, with hidden states
    from row `row` on. wanted: how many guesses of the tokens after those that are known are of use."""

    request: Request
    cache: SequenceCache
    first: int
    count: int
    row: int
    wanted: int

    @property
    def end(self) -> int:
        """The position after the last of the tokens."""
        return self.first + self.count


class Drafter:
    """Guesses with `mtp`, whose layer is the last of the caches. drafts: most guesses of a request in a step."""

    def __init__(self, mtp: Mtp, manager: CacheManager, pages: Pages, states: States, drafts: int) -> None:
        self.drafts = drafts
        self._mtp = mtp
        self._manager = manager
        self._pages = pages
        self._states = states

    def propose(self, taken: Sequence[Taken], hidden: torch.Tensor) -> list[list[int]]:
        """Write the layer's rows of a step, and guess what follows: for each request up to `wanted` tokens.

        hidden [tokens, hidden]: of the step, after the target's final norm. An error costs the one request that
        it belongs to its guesses, and later requests its pages.
        """
        if not taken:
            return []
        slots = [one.cache.state_slot for one in taken]
        tails = self._states.tails[self._mtp.layer]
        before = None if tails is None else tails[slots]
        try:
            with torch.inference_mode():
                return self._propose(taken, hidden)
        except HadronError:
            if tails is not None and before is not None:
                tails[slots] = before
            if len(taken) > 1:
                return [guesses for one in taken for guesses in self.propose([one], hidden)]
            self._manager.forget(taken[0].cache)
            return [[]]

    def _propose(self, taken: Sequence[Taken], hidden: torch.Tensor) -> list[list[int]]:
        steps = [
            RequestStep(one.cache, one.request.tokens_between(one.first + 1, one.end + 1), start=one.first)
            for one in taken
        ]
        batch = make_batch(steps, self._pages, self._states)
        rows = [row for one in taken for row in range(one.row, one.row + one.count)]
        normed, selection = self._mtp.forward(batch, hidden[_index(rows, hidden)])
        room = [self._room(one) for one in taken]
        going = [i for i, most in enumerate(room) if most]
        guesses: list[list[int]] = [[] for _ in taken]
        if going:
            last = _index([batch.ranges[i][1] - 1 for i in going], normed)
            tails = self._states.tails[self._mtp.layer]
            slots = [taken[i].cache.state_slot for i in going]
            before = None if tails is None else tails[slots]
            self._guess(taken, going, room, (normed[last], selection[last]), guesses)
            if tails is not None and before is not None:  # keys of guesses are none of the request's
                tails[slots] = before
            for i in going:
                self._manager.trim(taken[i].cache)
        return guesses

    def _guess(
        self,
        taken: Sequence[Taken],
        going: list[int],
        room: Sequence[int],
        rows: tuple[torch.Tensor, torch.Tensor],
        guesses: list[list[int]],
    ) -> None:
        """Guess in turn for the requests `going`, of whose last tokens `rows` are; a guess is the next row's token."""
        normed, selection = rows
        for turn in range(max(room)):
            logits, kept = self._mtp.head(normed), []
            for row, i in enumerate(going):
                token = _likely(taken[i].request, logits.rows(row, row + 1), turn)
                if token is not None:
                    guesses[i].append(token)
                    if len(guesses[i]) < room[i]:
                        kept.append(row)
            if not kept:
                return
            going = [going[row] for row in kept]
            index = _index(kept, normed)
            # of the first guess, each request's own last row
            normed, selection = normed[index], selection[index]
            steps = [RequestStep(taken[i].cache, guesses[i][-1:], start=taken[i].end + turn) for i in going]
            batch = make_batch(steps, self._pages, self._states)
            normed, _ = self._mtp.forward(batch, normed, selection if self._mtp.shares_selection else None)

    def _room(self, one: Taken) -> int:
        """How many guesses of a request there are pages for; takes them. The row of the last one is never computed."""
        assert one.cache.tokens == one.end, "rows beside the tokens that are committed"
        most = one.wanted
        while most > 1 and not self._manager.try_grow(one.cache, most - 1):
            most -= 1
        return most


def _likely(request: Request, logits: Logits, turn: int) -> int | None:
    """What the request would draw from these logits, with the random number that it will draw with; None where they
    are not finite."""
    try:
        params = replace(request.params, logprobs=None)
        return sampler.choose(logits, params, seed=request.seed, position=request.num_tokens + turn).token
    except NumericsError:
        return None


def _index(rows: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=like.device)
