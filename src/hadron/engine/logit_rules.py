"""What a request changes about its logits before a token is drawn: penalties, biases, tokens that may not come.

Every rule depends on the request's own tokens alone, and is kept up with them: here a step costs what its new tokens
do, however long the text is. The changing itself is an operation of `lm_head`.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection

from hadron.engine.request import Request
from hadron.engine.structured import Matcher
from hadron.kernels.rules import RowRules


class LogitRules:
    """The rules of one request. never: ids that only prompts hold. eos: the model's end tokens. matcher: of the
    grammar that the text must follow; it has the last word. thought_ends: the ids that end the thought which the
    prompt leaves open; the first is what closes it when its budget is used up."""

    def __init__(
        self,
        request: Request,
        never: Collection[int],
        eos: Collection[int],
        matcher: Matcher | None = None,
        thought_ends: tuple[int, ...] = (),
    ) -> None:
        params = request.params
        self._request = request
        self.matcher = matcher
        self._thought_ends = () if params.thinking_budget is None else thought_ends
        self._min_tokens = params.min_tokens
        self._never = array("q", never)
        self._early = array("q", {*never, *eos, *params.stop_token_ids})
        bias = params.logit_bias or {}
        self._row = RowRules(
            repetition=1.0 if params.repetition_penalty is None else params.repetition_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
            biased=array("q", bias),
            bias=array("f", bias.values()),
            banned=self._early if params.min_tokens else self._never,
        )
        self._penalized = self._row.repetition != 1 or bool(params.frequency_penalty or params.presence_penalty)
        if self._row.repetition != 1:
            self._row.seen = array("q", dict.fromkeys(request.prompt_token_ids))
            self._row.counts = array("f", bytes(4 * len(self._row.seen)))
        self._places = dict(zip(self._row.seen, range(len(self._row.seen)), strict=True))  # id -> place in `seen`
        self._counted = self._read = 0  # generated tokens that are counted, in which no thought ended
        #: Whether a row's rules depend on the tokens before it.
        self.follow_text = bool(self._penalized or params.min_tokens or matcher is not None or self._thought_ends)

    @property
    def idle(self) -> bool:
        """Whether no row is ever changed."""
        return not (self.follow_text or self._never or self._row.biased)

    def now(self) -> RowRules:
        """The rules of the row that decides the next token; they hold until the next call. `RequestError` where the
        grammar gave up."""
        row, generated = self._row, self._request.output_token_ids
        if self._penalized:
            for token in generated[self._counted :]:
                self._count(token)
            self._counted = len(generated)
        if self._min_tokens and len(generated) >= self._min_tokens:
            row.banned, self._min_tokens = self._never, 0
        if self._thought_ends:
            row.only = self._close_thought(generated)
        if self.matcher is not None and row.only is None:
            row.allowed = self.matcher.allowed()
        return row

    def _count(self, token: int) -> None:
        place = self._places.get(token)
        if place is None:
            self._places[token] = len(self._places)
            self._row.seen.append(token)
            self._row.counts.append(1)
        else:
            self._row.counts[place] += 1

    def _close_thought(self, generated: list[int]) -> int | None:
        """The end of the thought, where it is open and has used up its budget."""
        for token in generated[self._read :]:
            if token in self._thought_ends:
                self._thought_ends = ()
                return None
        self._read = len(generated)
        budget = self._request.params.thinking_budget
        assert budget is not None
        return None if len(generated) < budget else self._thought_ends[0]
