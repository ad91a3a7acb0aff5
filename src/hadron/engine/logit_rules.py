"""What a request changes about its logits before a token is drawn: penalties, biases, tokens that may not come.

Every rule depends on the request's own tokens alone. What may not come gets the lowest finite value, which
no draw and no maximum takes while anything else is left; minus infinity would hide a fault of the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from hadron.engine.request import Request
from hadron.engine.structured import Matcher

Row = NDArray[np.float32]
LOWEST = np.finfo(np.float32).min


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
        self._never = _ids(never)
        self._ends = _ids({*eos, *params.stop_token_ids})
        bias = params.logit_bias or {}
        self._biased, self._bias = _ids(bias), np.array(list(bias.values()), np.float32)
        self._repetition = np.float32(1.0 if params.repetition_penalty is None else params.repetition_penalty)
        self._frequency, self._presence = np.float32(params.frequency_penalty), np.float32(params.presence_penalty)
        self._prompt = np.unique(_ids(request.prompt_token_ids)) if self._repetition != 1 else _ids(())
        self._counts: Counter[int] = Counter()
        self._counted = 0

    @property
    def idle(self) -> bool:
        """Whether nothing is ever changed but that some ids never come (`sampler.Kind.never`)."""
        return not (
            len(self._biased) or self._repetition != 1 or self._frequency or self._presence
            or self._request.params.min_tokens or self.matcher is not None or self._thought_ends
        )  # fmt: skip

    def apply(self, logits: Row) -> None:
        """Change a row [vocabulary] in place."""
        params, generated = self._request.params, self._request.output_token_ids
        if self._repetition != 1 or self._frequency or self._presence:
            self._counts.update(generated[self._counted :])
            self._counted = len(generated)
            self._penalize(logits)
        logits[self._biased] += self._bias
        if self._close_thought(logits):
            return
        banned = self._never
        if len(generated) < params.min_tokens:
            banned = np.concatenate([banned, self._ends])
        allowed = None if self.matcher is None else self.matcher.allowed()
        if allowed is None:
            logits[banned] = LOWEST
            return
        both = allowed.copy()
        both[banned] = False
        logits[~(both if both.any() else allowed)] = LOWEST

    def _close_thought(self, logits: Row) -> bool:
        """Leave nothing but the end of the thought, where it is open and has used up its budget."""
        generated = self._request.output_token_ids
        if not self._thought_ends:
            return False
        if any(end in generated for end in self._thought_ends):
            self._thought_ends = ()
            return False
        budget = self._request.params.thinking_budget
        assert budget is not None
        if len(generated) < budget:
            return False
        end = self._thought_ends[0]
        value = logits[end]
        logits[:] = LOWEST
        logits[end] = value
        return True

    def _penalize(self, logits: Row) -> None:
        seen = _ids(self._counts)
        if self._repetition != 1:
            either = np.union1d(self._prompt, seen)
            values = logits[either]
            logits[either] = np.where(values > 0, values / self._repetition, values * self._repetition)
        counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
        logits[seen] -= counts * self._frequency + self._presence


def _ids(values: Collection[int]) -> NDArray[np.int64]:
    return np.fromiter(values, np.int64, len(values))
