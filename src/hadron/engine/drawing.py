"""From a request's rows of logits to its next token and to log-probabilities: rules, draw, texts.

Log-probabilities are the model's; the token is drawn from what the request's rules leave of them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hadron.engine import sampler
from hadron.engine.logit_rules import LogitRules
from hadron.engine.request import Logprob, Request
from hadron.tokenizer.tokenizer import Tokenizer

Rows = NDArray[np.float32]


def next_token(
    request: Request, logits: Rows, rules: LogitRules | None, tokenizer: Tokenizer | None
) -> tuple[int, dict[int, Logprob] | None]:
    """The token that follows, and its log-probabilities where they were asked for.

    logits: [1, vocabulary]. `NumericsError` where one is not finite.
    """
    row, params = logits[0], request.params
    drawn_from = row
    if rules is not None:
        drawn_from = row.copy()
        rules.apply(drawn_from)
    token = sampler.sample(drawn_from, params, seed=request.seed, position=request.num_tokens)
    if params.logprobs is None:
        return token, None
    return token, _with_text(sampler.logprobs(row, token, params.logprobs), tokenizer)


def prompt_entry(request: Request, logits: Rows, position: int, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """Log-probabilities of the prompt's token at `position`. logits: [1, vocabulary], those it was expected with.

    `NumericsError` where one is not finite.
    """
    most = request.params.prompt_logprobs
    assert most is not None
    sampler.check_finite(logits[0], position)
    return _with_text(sampler.logprobs(logits[0], request.prompt_token_ids[position], most), tokenizer)


def _with_text(row: dict[int, Logprob], tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    if tokenizer is None:
        return row
    return {token: replace(entry, decoded_token=tokenizer.token_text(token)) for token, entry in row.items()}
