"""One request from prompt to finished text: its state, its lengths, and what a caller gets back.

Lengths are arithmetic on three numbers, here and nowhere else: the prompt's tokens, the tokens
generated, and the tokens whose state is in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from hadron.errors import HadronError, RequestError
from hadron.sampling_params import SamplingParams
from hadron.tokenizer.detokenizer import Detokenizer, StopStrings


class State(StrEnum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """`stop`: an end token, a stop token or a stop string. `length`: max_tokens, or the context is full.

    `abort`: the caller ended it. `error`: it could not go on (`Request.error`).
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural logarithm of a token's probability before temperature; rank 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class Scoring:
    """Log-probabilities of a given text are asked for, not a new one.

    first: the position in the prompt of the first token whose log-probability is wanted, at least 1; what
    stands before may come from the cache. candidates: tokens that might follow the prompt, each wanted too.
    """

    first: int
    candidates: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One continuation. text is None without a tokenizer; token_ids include the token that ended it.

    logprobs: for each token, id -> `Logprob` of the chosen token and the likeliest ones, best first.
    stop_reason: the stop string or stop id that ended it, None for an end token of the model.
    """

    token_ids: list[int]
    text: str | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    index: int = 0

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum over the generated tokens, where log-probabilities were asked for."""
        if self.logprobs is None:
            return None
        return sum(row[token].logprob for token, row in zip(self.token_ids, self.logprobs, strict=True))


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request and its continuations, as far as they have come.

    prompt_logprobs: where they were asked for, as `CompletionOutput.logprobs`; None for the first token.
    num_cached_tokens: of the prompt, found in the cache when it began. num_preemptions: how often it lost
    its cache to others and computed it again. num_draft_tokens, num_accepted_tokens: guesses that were checked, and
    how many of them were right.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """A request inside the engine: one continuation of a prompt.

    params: with every default filled in. seed: of this request, drawn where params has none.
    stop_token_ids: the caller's. eos: the model's, empty when they are to be ignored.
    capacity: most tokens the context and the cache can hold, prompt included.
    index: which of the continuations that were asked for. priority: lower goes first. follows: a request of
    the same prompt, or with the same beginning, whose cache this one waits for.
    scoring: of what prompt_logprobs are wanted; None: of the whole prompt.
    computed: tokens, counted from the first, whose state is in the cache; only the scheduler changes it.
    max_new_tokens: most tokens to generate, by max_tokens and by what fits.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    eos: frozenset[int]
    capacity: int
    prompt: str | None = None
    detokenizer: Detokenizer | None = None
    index: int = 0
    priority: int = 0
    follows: Request | None = None
    scoring: Scoring | None = None
    computed: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    error: HadronError | None = None
    state: State = State.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=lambda: [None])
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    stop_strings: StopStrings = field(init=False)
    _said: list[str] = field(default_factory=list)
    num_prompt_tokens: int = field(init=False)
    max_new_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.stop_strings = StopStrings(self.params.stop_strings)
        self.num_prompt_tokens = len(self.prompt_token_ids)
        # the last token need not fit: it is returned and never fed back
        room = self.capacity - self.num_prompt_tokens + 1
        self.max_new_tokens = room if self.params.max_tokens is None else min(self.params.max_tokens, room)
        if self.scoring is not None:
            self.prompt_logprobs = [None] * self.scoring.first

    @property
    def num_tokens(self) -> int:
        """Tokens known: the prompt's and the generated ones."""
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def text(self) -> str:
        """What has become certain of the text."""
        return "".join(self._said)

    @property
    def token_ids(self) -> list[int]:
        """The prompt and the generated tokens."""
        return [*self.prompt_token_ids, *self.output_token_ids]

    @property
    def reusable_tokens(self) -> int:
        """How long a beginning may be taken from the cache, but for its last token: its logits are not asked for."""
        if self.scoring is not None:
            return self.scoring.first
        return self.num_tokens if self.params.prompt_logprobs is None else 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt are still to come."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens

    def wanted_logits(self, count: int, drafts: int = 0) -> int:
        """Of how many of the next `count` tokens, the last ones, the logits are needed. drafts: guesses among them."""
        end = self.computed + count
        if self.params.prompt_logprobs is not None and self.wants_prompt_logprobs:
            return max(0, min(count, end + 1 - len(self.prompt_logprobs)))
        return 1 + drafts if end - drafts == self.num_prompt_tokens + len(self.output_token_ids) else 0

    @property
    def num_uncomputed(self) -> int:
        """Known tokens that the model has not seen; 1 while decoding."""
        return self.num_prompt_tokens + len(self.output_token_ids) - self.computed

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come."""
        return self.state is State.FINISHED

    def next_tokens(self, most: int) -> tuple[list[int], bool]:
        """Up to `most` tokens that the model has not seen, in order, and whether these are all."""
        known, first = self.num_prompt_tokens + len(self.output_token_ids), self.computed
        if first + 1 == known and self.output_token_ids:  # decoding
            return self.output_token_ids[-1:], True
        return self.tokens_between(first, min(known, first + most)), first + most >= known

    def tokens_between(self, start: int, end: int) -> list[int]:
        """Known tokens from position `start` to before `end`."""
        split = self.num_prompt_tokens
        return [*self.prompt_token_ids[start:end], *self.output_token_ids[max(0, start - split) : max(0, end - split)]]

    def append(self, token: int, row: dict[int, Logprob] | None = None, *, complete: bool = False) -> str:
        """Take a generated token; returns the text that became certain. Finishes the request when due.

        complete: nothing can follow in the text's grammar.
        """
        self.output_token_ids.append(token)
        if row is not None:
            self.logprobs.append(row)
        added = ""
        if token in self.params.stop_token_ids:  # the token that ends a text has none itself
            self._finish(FinishReason.STOP, token)
        elif token in self.eos:
            self._finish(FinishReason.STOP, None)
        elif self.detokenizer is not None:
            added = self._take_text(self.detokenizer, token)
        if self.state is not State.FINISHED:
            if complete:
                self._finish(FinishReason.STOP, None)
            elif len(self.output_token_ids) >= self.max_new_tokens:
                self._finish(FinishReason.LENGTH, None)
        if self.state is State.FINISHED:
            added += self._flush()
        if added:
            self._said.append(added)
        return added

    def _take_text(self, detokenizer: Detokenizer, token: int) -> str:
        added = detokenizer.push(token)
        if not self.params.stop or len(self.output_token_ids) < self.params.min_tokens:
            return added
        added = self.stop_strings.push(added)
        if self.stop_strings.matched is not None:
            self._finish(FinishReason.STOP, self.stop_strings.matched)
        return added

    def _flush(self) -> str:
        """What was held back, once it is certain that no more tokens come."""
        if self.detokenizer is None or self.stop_strings.matched is not None:
            return ""
        added = self.stop_strings.push(self.detokenizer.finish())
        if self.stop_strings.matched is not None:
            self._finish(FinishReason.STOP, self.stop_strings.matched)
            return added
        return added + self.stop_strings.finish()

    def abort(self) -> None:
        """End it here, as the caller wishes."""
        self._finish(FinishReason.ABORT, None)

    def fail(self, error: HadronError) -> None:
        """End it here, because it cannot go on."""
        self.error = error
        self._finish(FinishReason.ERROR, None)

    def _finish(self, reason: FinishReason, stop_reason: str | int | None) -> None:
        self.state = State.FINISHED
        self.finish_reason, self.stop_reason = reason, stop_reason

    @property
    def completion(self) -> CompletionOutput:
        """The continuation as far as it has come."""
        return CompletionOutput(
            token_ids=list(self.output_token_ids),
            text=None if self.detokenizer is None else self.text,
            finish_reason=None if self.finish_reason is None else str(self.finish_reason),
            stop_reason=self.stop_reason,
            logprobs=None if self.params.logprobs is None else list(self.logprobs),
            index=self.index,
        )

    def output(self, *others: Request) -> RequestOutput:
        """A snapshot for the caller, with the other continuations of the same prompt."""
        several = (self, *others)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.prompt_token_ids),
            outputs=[request.completion for request in several],
            finished=all(request.is_finished for request in several),
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=sum(request.num_preemptions for request in several),
            prompt_logprobs=None if self.params.prompt_logprobs is None else list(self.prompt_logprobs),
            num_draft_tokens=sum(request.num_draft_tokens for request in several),
            num_accepted_tokens=sum(request.num_accepted_tokens for request in several),
        )


def check_token_ids(ids: tuple[int, ...], vocabulary: int, where: str, *, keys: bool = False) -> None:
    """`RequestError` for an empty list and for ids outside the vocabulary, naming the first. keys: they are those of
    a mapping."""
    if not ids:
        raise RequestError(
            "a prompt has no tokens",
            where=where,
            found="an empty list",
            accepted="at least one token",
            hint="give some text, or the id of the token that opens a text",
        )
    for index, token in enumerate(ids):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocabulary:
            raise RequestError(
                "a token id is outside the vocabulary",
                where=f"{where}.{token}" if keys else f"{where}[{index}]",
                found=repr(token)[:80],
                accepted=f"an integer from 0 to {vocabulary - 1}",
                hint="encode the prompt with this checkpoint's own tokenizer",
            )
