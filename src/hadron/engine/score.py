"""How likely given continuations of given contexts are, through the engine's batching and its cache.

Continuations of one context share it: it is computed once and taken from the cache by the others, as far as
whole pages go. Those that differ in their last token alone, such as the letters of a multiple choice, are one
request: the logits of one place say how likely each of them is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hadron.engine.engine import Engine
from hadron.engine.request import Request, Scoring
from hadron.sampling_params import SamplingParams

#: A context shorter than this is not worth waiting for: nothing below a page is found in the cache.
_WORTH_WAITING = 64


@dataclass(frozen=True, slots=True)
class Score:
    """Of one continuation: natural logarithms of its tokens' probabilities.

    is_greedy: whether each of its tokens was the likeliest (the lowest id on a tie) after those before it.
    """

    logprobs: list[float]
    is_greedy: bool

    @property
    def logprob(self) -> float:
        """Of the whole continuation: the sum."""
        return sum(self.logprobs)


@dataclass(frozen=True, slots=True)
class Pair:
    """A context and its continuation, each of at least one token."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]

    @property
    def seen(self) -> tuple[int, ...]:
        """What the model reads: all but the last token, of which only the probability is asked for."""
        return self.context + self.continuation[:-1]


def score(engine: Engine, pairs: Sequence[Pair], names: Iterator[str], on_done: Callable[[int], None]) -> list[Score]:
    """The scores of pairs that fit (`Engine.check_prompt` of their `seen`), in their order.

    names: ids for requests. on_done: called with the number of pairs that are done. The first request that
    fails raises, once the others are done.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, pair in enumerate(pairs):
        groups.setdefault(pair.seen, []).append(index)
    leaders: dict[tuple[int, ...], Request] = {}
    requests: dict[str, tuple[Request, list[int]]] = {}
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=1, prompt_logprobs=1, ignore_eos=True)
    params = params.with_defaults({})
    for seen, members in groups.items():
        # members may divide the same tokens differently: all from the shortest context on is wanted
        context = min((pairs[i].context for i in members), key=len)
        candidates = tuple(dict.fromkeys(pairs[i].continuation[-1] for i in members))
        name = next(names)
        request = engine.add(
            name, seen, params, follows=leaders.get(context), scoring=Scoring(len(context), candidates)
        )
        requests[name] = request, members
        if len(context) >= _WORTH_WAITING:
            leaders.setdefault(context, request)
    done = 0
    while engine.has_requests:
        for event in engine.step():
            if event.finish_reason is not None:
                done += len(requests[event.request_id][1])
                on_done(done)
    scores: dict[int, Score] = {}
    for request, members in requests.values():
        if request.error is not None:
            raise request.error
        for i in members:
            scores[i] = _score(request, pairs[i])
    return [scores[i] for i in range(len(pairs))]


def _score(request: Request, pair: Pair) -> Score:
    rows = [*request.prompt_logprobs[len(pair.context) :], request.logprobs[0]]
    entries = []
    is_greedy = True
    for token, row in zip(pair.continuation, rows, strict=True):
        assert row is not None
        entries.append(row[token].logprob)
        is_greedy = is_greedy and token == next(iter(row))
    return Score(entries, is_greedy)
