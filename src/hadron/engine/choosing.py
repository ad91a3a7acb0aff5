"""How the tokens of each request are chosen: what it asks of its rows of logits, and what it changes about them."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from typing import NamedTuple

from hadron.engine import sampler
from hadron.engine.logit_rules import LogitRules
from hadron.engine.request import Request
from hadron.engine.sampler import Asked, Choice, Kind, Likeliest
from hadron.engine.scheduler import Scheduled
from hadron.engine.structured import Grammars
from hadron.errors import RequestError
from hadron.kernels.rules import RowRules
from hadron.layers.logits import Logits
from hadron.sampling_params import SamplingParams
from hadron.tokenizer.tokenizer import Tokenizer


class _Wishes(NamedTuple):
    """What a request asks of its rows. same: what changes all of them alike; rules: those that its text decides."""

    kind: Kind
    same: RowRules | None
    rules: LogitRules | None


class Gathered(NamedTuple):
    """What is asked of a step's logits. alone: by the number of a step, its rows that `Chooser.choose` asks about one
    by one."""

    asked: Asked
    alone: dict[int, Sequence[None]]

    def answers(self, logits: Logits | None) -> dict[int, Sequence[Likeliest | None]]:
        """By the number of each step that gets a token; None for a row that is asked about alone."""
        return {} if logits is None else {**self.asked.answers(logits), **self.alone}


class Chooser:
    """For the requests of an engine. vocabulary: of its model's logits. eos: the ids that end a text. prompt_only: ids
    that no answer holds."""

    def __init__(
        self, vocabulary: int, *, tokenizer: Tokenizer | None, eos: frozenset[int], prompt_only: Collection[int]
    ) -> None:
        self._vocabulary = vocabulary
        self._prompt_only = tuple(sorted(set(prompt_only)))
        self._grammars = None if tokenizer is None else Grammars(tokenizer, vocabulary, eos)
        self._never = RowRules(banned=array("q", self._prompt_only))  # of answers that have no other rules
        self._wishes: dict[str, _Wishes] = {}  # by the request's id

    def check(self, params: SamplingParams) -> None:
        """`RequestError` for a grammar that cannot be used."""
        if params.structured is None:
            return
        if self._grammars is None:
            raise RequestError(
                "a grammar needs a tokenizer",
                where="structured_outputs",
                found="a checkpoint without tokenizer.json",
                accepted="a checkpoint with one",
                hint="copy the original release's tokenizer files beside the weights",
            )
        self._grammars.check(params.structured)

    def begin(self, request: Request, *, answer: bool, calls: bool) -> None:
        """Take a request, whose params are checked. answer, calls: as `Engine.add` has them."""
        params, prompt = request.params, request.prompt_token_ids
        matcher = None
        ends: tuple[int, ...] = ()
        if self._grammars is not None:
            if params.structured is not None:
                matcher = self._grammars.matcher(params.structured, prompt if answer else ())
            if params.thinking_budget is not None:
                ends = self._grammars.thought_ends(prompt, calls=calls)
        rules = LogitRules(request, self._prompt_only if answer else (), request.eos, matcher, ends)
        same = None
        if not (rules.idle or rules.follow_text):
            same = rules.now() if params.logit_bias else self._never
        kind = Kind.of(params, self._vocabulary, ruled=not rules.idle)
        self._wishes[request.request_id] = _Wishes(kind, same, rules if rules.follow_text else None)

    def end(self, request: Request) -> None:
        """Forget a request."""
        self._wishes.pop(request.request_id, None)

    def gather(self, steps: Sequence[Scheduled], rows: Sequence[range]) -> Gathered:
        """What will be asked of the logits of each step that gets a token, before there are any: of its last row, and
        of those of its guesses. rows: whose they are."""
        asked = Asked()
        alone: dict[int, Sequence[None]] = {}
        for i, (step, whose) in enumerate(zip(steps, rows, strict=True)):
            if not step.last:
                continue
            own = whose if len(whose) == 1 + step.drafts else whose[-1 - step.drafts :]
            request = step.request
            kind, changes, rules = self._wishes[request.request_id]
            if rules is not None:
                if step.drafts:  # a row's rules depend on the guess before it
                    alone[i] = [None] * len(own)
                    continue
                try:
                    changes = rules.now()
                except RequestError:  # which `choose` meets again
                    alone[i] = [None]
                    continue
            seed, position = request.seed, request.num_tokens
            asked.add(i, own, kind, request.params, seed=seed, position=position, rules=changes)
        return Gathered(asked, alone)

    def choose(self, request: Request, logits: Logits, known: Likeliest | None) -> Choice:
        """The request's next token, from the row that decides it. known: of `Gathered`. `NumericsError` where logits
        are not finite, `RequestError` where the grammar gave up."""
        wishes, changes = self._wishes[request.request_id], None
        if known is None:
            changes = wishes.same if wishes.rules is None else wishes.rules.now()
        return sampler.choose(
            logits, request.params, seed=request.seed, position=request.num_tokens, known=known, rules=changes,
            also=() if request.scoring is None else request.scoring.candidates,
        )  # fmt: skip

    def accept(self, request: Request, token: int) -> bool:
        """Go on by a token that was chosen; whether nothing can follow in the request's grammar. `RequestError` where
        that gave up."""
        rules = self._wishes[request.request_id].rules
        if rules is None or rules.matcher is None:
            return False
        rules.matcher.accept(token)
        return rules.matcher.finished
