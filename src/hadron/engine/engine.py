"""The loop: `step()` schedules, runs, accepts and releases. Many requests at once, each as if it were alone.

A step that an error ends leaves the caches it wrote to unusable. Where several requests shared it, each
begins again and takes that step by itself; the one that fails by itself fails, and the engine goes on.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate, chain, zip_longest

import numpy as np
from numpy.typing import NDArray

from hadron.batch import Selections
from hadron.engine import sampler
from hadron.engine.choosing import Chooser, Gathered
from hadron.engine.events import TokenEvent
from hadron.engine.prompt_logits import not_finite, prompt_logits
from hadron.engine.request import Logprob, Request, Scoring, check_token_ids
from hadron.engine.runner import Runner
from hadron.engine.sampler import Likeliest
from hadron.engine.scheduler import Scheduled, Scheduler
from hadron.engine.stats import Load, Stats
from hadron.engine.verify import propose, settle
from hadron.errors import CapacityError, HadronError, NumericsError, RequestError
from hadron.layers.logits import Logits
from hadron.sampling_params import SamplingParams
from hadron.tokenizer.detokenizer import Detokenizer
from hadron.tokenizer.tokenizer import Tokenizer


class Engine:
    """Requests in, tokens out. eos: the ids that end a text. max_position: of the model. turn_tokens: ids
    that open a turn of a conversation. prompt_only: ids that no answer holds."""

    def __init__(
        self,
        runner: Runner,
        *,
        vocabulary: int,
        max_position: int,
        eos: frozenset[int],
        tokenizer: Tokenizer | None,
        max_num_batched_tokens: int,
        prefix_caching: bool = True,
        turn_tokens: Collection[int] = (),
        prompt_only: Collection[int] = (),
    ) -> None:
        self._runner = runner
        self._chooser = Chooser(vocabulary, tokenizer=tokenizer, eos=eos, prompt_only=prompt_only)
        self._vocabulary = vocabulary
        self._max_position = max_position
        self._eos = eos
        self._tokenizer = tokenizer
        self._budget = max_num_batched_tokens
        self._pages = runner.manager.blocks.free_blocks
        self._scheduler = Scheduler(
            runner.manager,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=runner.max_num_seqs,
            prefix_caching=prefix_caching,
            turn_tokens=turn_tokens,
            drafts=0 if runner.drafter is None else runner.drafter.drafts,
        )
        #: What was counted since the engine began.
        self.stats: Stats = self._scheduler.stats

    @property
    def capacity(self) -> int:
        """Most tokens of one request: what the model was made for and the cache holds."""
        return min(self._max_position, self._runner.max_model_len)

    @property
    def has_requests(self) -> bool:
        """Whether another `step` has something to do."""
        return not self._scheduler.idle

    @property
    def load(self) -> Load:
        """What the engine holds at this moment."""
        manager, scheduler = self._runner.manager, self._scheduler
        used = self._pages - manager.blocks.free_blocks
        return Load(len(scheduler.waiting), len(scheduler.running), used, self._pages, manager.free_slots)

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
        if len(ids) > self.capacity:
            raise CapacityError(
                "a prompt does not fit into the cache",
                where=where,
                found=f"{len(ids)} tokens",
                accepted=f"at most {self.capacity} (the model itself could take {self._max_position})",
                hint="raise --max-model-len or --num-pages (max_model_len=, num_pages=) if the memory allows it, "
                "or shorten the prompt",
            )
        return ids

    def check_ids(self, ids: Sequence[int], where: str) -> None:
        """`RequestError` for an id that is no token of the model."""
        if ids:
            check_token_ids(tuple(ids), self._vocabulary, where)

    def check_params(self, params: SamplingParams) -> None:
        """`RequestError` for what this model cannot do with `params`, whose defaults are filled in."""
        self.check_ids(params.stop_token_ids, "stop_token_ids")
        if params.logit_bias:
            check_token_ids(tuple(params.logit_bias), self._vocabulary, "logit_bias", keys=True)
        if params.stop and self._tokenizer is None:
            raise RequestError(
                "stop strings need a tokenizer",
                where="stop",
                found=f"{params.stop_strings!r}, and a checkpoint without tokenizer.json",
                accepted="stop_token_ids",
                hint="give the ids that end a text as stop_token_ids",
            )
        self._chooser.check(params)

    def add(
        self,
        request_id: str,
        ids: tuple[int, ...],
        params: SamplingParams,
        prompt: str | None = None,
        *,
        priority: int = 0,
        index: int = 0,
        follows: Request | None = None,
        answer: bool = False,
        calls: bool = False,
        scoring: Scoring | None = None,
    ) -> Request:
        """Queue a request; ids from `check_prompt`, params checked by `check_params`.

        priority: lower goes first, past at most `scheduler.PRIORITY_STEP` earlier requests a level.
        index, follows: for a further continuation of the prompt of an earlier request. answer: the text is
        an answer in a conversation, so it holds none of what only prompts hold; calls: in which tools may be called.
        scoring: see `engine.score`.
        """
        detokenizer = None
        if self._tokenizer is not None:
            detokenizer = Detokenizer(self._tokenizer, skip_special_tokens=params.skip_special_tokens)
        request = Request(
            request_id=request_id,
            prompt_token_ids=ids,
            params=params,
            seed=secrets.randbits(64) if params.seed is None else (params.seed + index) % 2**64,
            eos=frozenset() if params.ignore_eos else self._eos,
            capacity=self.capacity,
            prompt=prompt,
            detokenizer=detokenizer,
            priority=priority,
            index=index,
            follows=follows,
            scoring=scoring,
        )
        self._chooser.begin(request, answer=answer, calls=calls)
        self._scheduler.add(request)
        return request

    def add_all(
        self,
        request_id: str,
        ids: tuple[int, ...],
        params: SamplingParams,
        prompt: str | None = None,
        *,
        priority: int = 0,
        answer: bool = False,
        calls: bool = False,
    ) -> list[Request]:
        """Queue the `params.n` continuations of a prompt; see `add`.

        Those after the first are called `<request_id>-<index>` and begin with what it leaves in the cache.
        """
        first = self.add(request_id, ids, params, prompt, priority=priority, answer=answer, calls=calls)
        params = replace(params, prompt_logprobs=None)
        return [
            first,
            *(
                self.add(f"{request_id}-{i}", ids, params, prompt, priority=priority, index=i, follows=first,
                         answer=answer, calls=calls)
                for i in range(1, params.n)
            ),
        ]  # fmt: skip

    def step(self) -> list[TokenEvent]:
        """Advance by one step: the tokens it gave, and the requests that ended."""
        steps = self._scheduler.schedule()
        if not steps:
            assert self._scheduler.idle, "requests wait, and none of them can move"
            return []
        try:
            wanted = [s.request.wanted_logits(len(s.token_ids), s.drafts) for s in steps]
            rows = [range(end - count, end) for end, count in zip(accumulate(wanted), wanted, strict=True)]
            # before weights and logits fill the processor's caches
            gathered = self._chooser.gather(steps, rows)
            ran = self._runner.run(steps, wanted)
        except HadronError as error:
            return self._failed(steps, error)
        except BaseException:
            for step in steps:
                step.request.abort()
                self._release(step.request)
            raise
        self.stats.steps += 1
        if (drafter := self._runner.drafter) is None:
            due = self._scheduler.commit(steps)  # before logits fill the processor's caches
            said = self._take_all(steps, rows, ran.logits, gathered)
        else:
            said = self._take_all(steps, rows, ran.logits, gathered)
            steps = settle(self._runner, ran, steps, [sum(event.token_id is not None for event in own) for own in said])
            guesses = propose(drafter, ran, steps)
            due = self._scheduler.commit(steps)
            for step, own in zip(steps, guesses, strict=True):
                if own:
                    self._scheduler.draft(step.request, own)
        self._scheduler.keep(due)
        for step in steps:
            if step.request.finish_reason is not None:
                self._release(step.request)
        return list(chain.from_iterable(said))

    def abort(self, request_id: str) -> bool:
        """End a request, wherever it stands, and give its cache back; False where it has ended already."""
        request = self._scheduler.get(request_id)
        if request is None:
            return False
        request.abort()
        self._release(request)
        return True

    def abort_all(self) -> None:
        """End every request."""
        for request in (*self._scheduler.waiting, *self._scheduler.running):
            self.abort(request.request_id)

    def logits(self, ids: tuple[int, ...], selections: Selections | None = None) -> NDArray[np.float32]:
        """float32 [tokens, vocabulary] of a prompt that `check_prompt` gave back; while no request runs.

        `NumericsError` where a logit is not finite.
        """
        assert not self.has_requests
        return prompt_logits(self._runner, ids, self._budget, selections)

    def _take_all(
        self, steps: Sequence[Scheduled], rows: Sequence[range], logits: Logits | None, gathered: Gathered
    ) -> list[list[TokenEvent]]:
        """What the step gave each request. rows: its own of the logits."""
        faults = self._runner.faults or [None] * len(steps)
        known = gathered.answers(logits)
        taken = enumerate(zip(steps, rows, faults, strict=True))
        return [self._take(step, logits, own, known.get(i), fault) for i, (step, own, fault) in taken]

    def _take(
        self,
        step: Scheduled,
        logits: Logits | None,
        rows: range,
        known: Sequence[Likeliest | None] | None,
        fault: str | None,
    ) -> list[TokenEvent]:
        """What a step gave one request: log-probabilities of its prompt, tokens, or its end.

        rows: its own of the logits; known: of the last of them, and of those of its guesses. The first token that is
        not the guess is the last one.
        """
        request, params = step.request, step.request.params
        events: list[TokenEvent] = []
        try:
            if fault is not None:
                raise not_finite(fault)
            if known and not step.drafts and params.logprobs is None and params.prompt_logprobs is None:
                likely = known[0]
                if likely is not None and likely.token is not None:  # as nearly always
                    return [self._said(request, likely.token)]
            if logits is None or not rows:
                return events
            if params.prompt_logprobs is not None and request.wants_prompt_logprobs:
                all_rows = logits.rows(rows.start, rows.stop)
                self._take_prompt(request, all_rows, step.cache.tokens - len(all_rows) + 1)
            if known is None:
                return events
            for row, own, guess in zip_longest(rows[-1 - step.drafts :], known, step.guesses):
                choice = self._chooser.choose(request, logits.rows(row, row + 1), own)
                events.append(self._said(request, choice.token, choice.logprobs))
                if request.is_finished or events[-1].token_id != guess:
                    break
        except (NumericsError, RequestError) as error:
            events.append(self._fail(request, error))
        if step.drafts:
            self._count(step, events)
        return events

    def _count(self, step: Scheduled, events: Sequence[TokenEvent]) -> None:
        right = sum(event.token_id == guess for event, guess in zip(events, step.guesses, strict=False))
        step.request.num_draft_tokens += step.drafts
        step.request.num_accepted_tokens += right
        self.stats.verified(step.drafts, right)

    def _take_prompt(self, request: Request, logits: Logits, first: int) -> None:
        """logits: of the tokens from position `first` on; those of the prompt that are new are kept."""
        most, known = request.params.prompt_logprobs, len(request.prompt_logprobs)
        assert most is not None
        expected = request.prompt_token_ids[known : first + len(logits)]
        if not expected:  # computed again after the cache was lost
            return
        rows = logits.rows(known - first, known - first + len(expected))
        request.prompt_logprobs += map(self._with_text, sampler.prompt_logprobs(rows, expected, most, position=known))

    def _said(self, request: Request, token: int, logprobs: dict[int, Logprob] | None = None) -> TokenEvent:
        complete = request.params.structured is not None and self._chooser.accept(request, token)
        text = request.append(token, None if logprobs is None else self._with_text(logprobs), complete=complete)
        self.stats.generated_tokens += 1
        reason = None if request.finish_reason is None else str(request.finish_reason)
        return TokenEvent(request.request_id, token, text, reason, request.index)

    def _with_text(self, row: dict[int, Logprob]) -> dict[int, Logprob]:
        text = None if self._tokenizer is None else self._tokenizer.token_text
        return row if text is None else {i: replace(entry, decoded_token=text(i)) for i, entry in row.items()}

    def _failed(self, steps: list[Scheduled], error: HadronError) -> list[TokenEvent]:
        if len(steps) > 1 or steps[0].drafts:  # what fails may be a guess, which nobody asked for
            self._scheduler.isolate(steps)
            return []
        event = self._fail(steps[0].request, error)
        self._release(steps[0].request)
        return [event]

    def _fail(self, request: Request, error: HadronError) -> TokenEvent:
        request.fail(error)
        self.stats.failures += 1
        self._scheduler.distrust(request)
        return TokenEvent(request.request_id, None, "", str(request.finish_reason), request.index)

    def _release(self, request: Request) -> None:
        self._chooser.end(request)
        self._scheduler.release(request)
