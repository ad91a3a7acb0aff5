"""How the tokens of each request are chosen: what it asks of its rows of logits, and what it changes about them."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from contextlib import suppress

from hadron.engine import sampler
from hadron.engine.logit_rules import LogitRules
from hadron.engine.request import Request
from hadron.engine.runner import Ran
from hadron.engine.sampler import Asked, Choice, Kind, Likeliest
from hadron.engine.scheduler import Scheduled
from hadron.engine.structured import Grammars
from hadron.errors import RequestError
from hadron.kernels.rules import RowRules
from hadron.layers.logits import Logits
from hadron.sampling_params import SamplingParams
from hadron.tokenizer.tokenizer import Tokenizer


class Chooser:
    """For the requests of an engine. vocabulary: of its model's logits. eos: the ids that end a text. prompt_only: ids
    that no answer holds."""

    def __init__(
        self, vocabulary: int, *, tokenizer: Tokenizer | None, eos: frozenset[int], prompt_only: Collection[int]
    ) -> None:
        self._vocabulary = vocabulary
        self._prompt_only = tuple(sorted(set(prompt_only)))
        self._grammars = None if tokenizer is None else Grammars(tokenizer, vocabulary, eos)
        self._answers = RowRules(banned=array("q", self._prompt_only))  # of all answers that nothing else is wished of
        # by the request's id; rules: those that its text decides
        self._kinds: dict[str, tuple[Kind, LogitRules | None]] = {}

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
        if rules.follow_text:
            self._kinds[request.request_id] = Kind.of(params, self._vocabulary, ruled=True), rules
            return
        same = None if rules.idle else rules.now() if params.logit_bias else self._answers
        self._kinds[request.request_id] = Kind.of(params, self._vocabulary, rules=same), None

    def end(self, request: Request) -> None:
        """Forget a request."""
        self._kinds.pop(request.request_id, None)

    def ask(self, steps: Sequence[Scheduled], ran: Ran) -> dict[int, Sequence[Likeliest | None]]:
        """What is asked of the rows of each step that gets a token, by its number: of the last, and of those of its
        guesses; None where `choose` is to ask."""
        if ran.logits is None:
            return {}
        asked = Asked()
        later: dict[int, Sequence[None]] = {}
        for i, (step, rows) in enumerate(zip(steps, ran.rows, strict=True)):
            if not step.last:
                continue
            own = rows if len(rows) == 1 + step.drafts else rows[-1 - step.drafts :]
            request, changes = step.request, None
            kind, rules = self._kinds[request.request_id]
            if rules is not None:
                with suppress(RequestError):  # its own fault, which it meets again alone
                    changes = None if step.drafts else rules.now()
                if changes is None:
                    later[i] = [None] * len(own)
                    continue
            seed, position = request.seed, request.num_tokens
            asked.add(i, own, kind, request.params, seed=seed, position=position, rules=changes)
        return {**asked.answers(ran.logits), **later}

    def choose(self, request: Request, logits: Logits, known: Likeliest | None) -> Choice:
        """The request's next token, from the row that decides it. known: of `ask`. `NumericsError` where the logits
        are not finite, `RequestError` where the grammar gave up."""
        _, rules = self._kinds[request.request_id]
        return sampler.choose(
            logits, request.params, seed=request.seed, position=request.num_tokens, known=known,
            rules=rules.now() if rules is not None and known is None else None,
            also=() if request.scoring is None else request.scoring.candidates,
        )  # fmt: skip

    def accept(self, request: Request, token: int) -> bool:
        """Go on by a token that was chosen; whether nothing can follow in the request's grammar. `RequestError` where
        that gave up."""
        _, rules = self._kinds[request.request_id]
        if rules is None or rules.matcher is None:
            return False
        rules.matcher.accept(token)
        return rules.matcher.finished
