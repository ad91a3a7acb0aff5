"""The loop: `step()` schedules, runs, accepts and releases. One request at a time for now.

A prompt is taken in pieces of `chunk_size` tokens; the piece that ends it gives the first token.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hadron.batch import RequestStep, Selections
from hadron.cache.manager import SequenceCache
from hadron.engine import sampler
from hadron.engine.request import Logprob, Request, State, check_token_ids
from hadron.engine.runner import Runner
from hadron.errors import CapacityError, RequestError
from hadron.layers.logits import Logits
from hadron.sampling_params import SamplingParams
from hadron.tokenizer.detokenizer import Detokenizer
from hadron.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A generated token. text: what became certain with it, "" while a character or stop string is open.

    finish_reason: set with the last token of a request.
    """

    request_id: str
    token_id: int
    text: str
    finish_reason: str | None


class Engine:
    """Requests in, tokens out. eos: the ids that end a text. max_position: of the model."""

    def __init__(
        self,
        runner: Runner,
        *,
        vocabulary: int,
        max_position: int,
        eos: frozenset[int],
        tokenizer: Tokenizer | None,
        chunk_size: int,
    ) -> None:
        self._runner = runner
        self._vocabulary = vocabulary
        self._max_position = max_position
        self._eos = eos
        self._tokenizer = tokenizer
        self._chunk_size = chunk_size
        self._waiting: deque[Request] = deque()
        self._running: list[tuple[Request, SequenceCache]] = []

    @property
    def capacity(self) -> int:
        """Most tokens of one request: what the model was made for and the cache holds."""
        return min(self._max_position, self._runner.max_context)

    @property
    def has_requests(self) -> bool:
        """Whether another `step` has something to do."""
        return bool(self._waiting or self._running)

    def check_prompt(self, prompt: Sequence[int], where: str) -> tuple[int, ...]:
        """The prompt's ids, or `RequestError` / `CapacityError`; nothing is queued."""
        ids = tuple(prompt)
        check_token_ids(ids, self._vocabulary, where)
        if len(ids) > self._max_position:
            raise RequestError(
                "a prompt is longer than the model's context",
                where=where,
                found=f"{len(ids)} tokens",
                accepted=f"at most {self._max_position}",
                hint="shorten the prompt",
            )
        if len(ids) > self._runner.max_context:
            raise CapacityError(
                "a prompt does not fit into the cache",
                where=where,
                found=f"{len(ids)} tokens",
                accepted=f"at most {self._runner.max_context} (the model itself could take {self._max_position})",
                hint="raise --max-context (max_context=) if the memory allows it, or shorten the prompt",
            )
        return ids

    def check_params(self, params: SamplingParams) -> None:
        """`RequestError` for what this model cannot do with `params`, whose defaults are filled in."""
        if params.stop_token_ids:
            check_token_ids(tuple(params.stop_token_ids), self._vocabulary, "stop_token_ids")
        if params.stop and self._tokenizer is None:
            raise RequestError(
                "stop strings need a tokenizer",
                where="stop",
                found=f"{params.stop_strings!r}, and a checkpoint without tokenizer.json",
                accepted="stop_token_ids",
                hint="give the ids that end a text as stop_token_ids",
            )

    def add(self, request_id: str, ids: tuple[int, ...], params: SamplingParams, prompt: str | None = None) -> Request:
        """Queue a request; ids from `check_prompt`, params checked by `check_params`."""
        detokenizer = None
        if self._tokenizer is not None:
            detokenizer = Detokenizer(self._tokenizer, skip_special_tokens=params.skip_special_tokens)
        request = Request(
            request_id=request_id,
            prompt_token_ids=ids,
            params=params,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            eos=frozenset() if params.ignore_eos else self._eos,
            capacity=self.capacity,
            prompt=prompt,
            detokenizer=detokenizer,
        )
        self._waiting.append(request)
        return request

    def step(self) -> list[TokenEvent]:
        """Advance the running request by one step; its token, if the step gave one."""
        self._schedule()
        events = []
        for request, cache in list(self._running):
            tokens = request.next_tokens(self._chunk_size)
            last = len(tokens) == request.num_uncomputed
            (logits,) = self._runner.run([RequestStep(cache, tokens)], [int(last)])
            request.computed += len(tokens)
            if logits is not None:
                events.append(self._accept(request, logits))
        self._release_finished()
        return events

    def abort_all(self) -> None:
        """Drop every request and give its cache back; also after an error in a step."""
        self._waiting.clear()
        while self._running:
            self._runner.release(self._running.pop()[1])

    def logits(self, ids: tuple[int, ...], selections: Selections | None = None) -> NDArray[np.float32]:
        """float32 [tokens, vocabulary] of a prompt that `check_prompt` gave back."""
        cache = self._runner.admit()
        rows = []
        try:
            for start in range(0, len(ids), self._chunk_size):
                piece = ids[start : start + self._chunk_size]
                (logits,) = self._runner.run([RequestStep(cache, piece)], [len(piece)], selections)
                assert logits is not None
                rows.append(logits.checked().cpu().numpy())
        finally:
            self._runner.release(cache)
        return np.concatenate(rows)

    def _schedule(self) -> None:
        if self._waiting and not self._running:
            request = self._waiting.popleft()
            cache = self._runner.admit(request.prompt_token_ids)
            request.computed = cache.tokens
            request.state = State.RUNNING
            self._running.append((request, cache))

    def _accept(self, request: Request, logits: Logits) -> TokenEvent:
        choice = sampler.choose(logits, request.params, seed=request.seed, position=request.num_tokens)
        token = choice.token
        row = None if choice.logprobs is None else _with_text(choice.logprobs, self._tokenizer)
        text = request.append(token, row)
        reason = None if request.finish_reason is None else str(request.finish_reason)
        return TokenEvent(request.request_id, token, text, reason)

    def _release_finished(self) -> None:
        for request, cache in self._running:
            if request.is_finished:
                self._runner.release(cache)
        self._running = [pair for pair in self._running if not pair[0].is_finished]


def _with_text(row: dict[int, Logprob], tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    if tokenizer is None:
        return row
    return {token: replace(entry, decoded_token=tokenizer.token_text(token)) for token, entry in row.items()}


#: Called with the index of a prompt and each of its tokens as they come.
OnToken = Callable[[int, TokenEvent], None]
