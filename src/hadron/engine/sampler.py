"""Logits to tokens and log-probabilities, one row at a time.

numpy in float64, random numbers from a counter-based generator keyed by (seed, position): a token
depends on its row of logits, the seed and the position, never on what else is in the batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hadron.engine.request import Logprob
from hadron.errors import NumericsError
from hadron.sampling_params import SamplingParams

Row = NDArray[np.float32]


def sample(logits: Row, params: SamplingParams, *, seed: int, position: int) -> int:
    """The token at `position`, from logits [vocabulary]. params must have its defaults filled in.

    `NumericsError` when a logit is not finite.
    """
    check_finite(logits, position)
    if not params.temperature:
        return int(np.argmax(logits))
    ids, weights = candidates(logits, params)
    cumulative = np.cumsum(weights)
    drawn = np.random.Generator(np.random.Philox(key=seed, counter=position)).random() * cumulative[-1]
    return int(ids[min(int(np.searchsorted(cumulative, drawn, side="right")), len(ids) - 1)])


def candidates(logits: Row, params: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Tokens that may be drawn and their unnormalized probabilities (> 0), in an order fixed by the arguments.

    Of equally likely tokens at an edge, those with the lowest ids stay.
    """
    assert params.temperature is not None
    assert params.top_p is not None
    assert params.top_k is not None
    scaled = logits.astype(np.float64)
    scaled -= scaled.max()
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the likeliest to minus infinity
        scaled /= params.temperature
    weights = np.exp(scaled)
    ids = _largest(weights, params.top_k) if params.top_k > 0 else np.arange(len(weights))
    ids = ids[weights[ids] > 0]
    total = float(weights[ids].sum())
    if params.top_p < 1:
        # those left out here hold less than 1 - top_p together: a cheap way to have few to sort
        ids = ids[weights[ids] >= (1 - params.top_p) * total / len(ids)]
        ids = ids[np.lexsort((ids, -weights[ids]))]
        before = np.cumsum(weights[ids]) - weights[ids]
        ids = ids[: max(1, int(np.searchsorted(before, params.top_p * total)))]
    if params.min_p > 0:
        ids = ids[weights[ids] >= params.min_p]  # the likeliest weighs 1
    return ids, weights[ids]


def _largest(values: NDArray[np.floating[Any]], count: int) -> NDArray[np.int64]:
    """Where the `count` largest are; of equal ones at the edge those with the lowest index. Not sorted."""
    if count >= len(values):
        return np.arange(len(values))
    edge = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > edge)
    return np.concatenate([above, np.flatnonzero(values == edge)[: count - len(above)]])


def logprobs(logits: Row, chosen: int, most: int) -> dict[int, Logprob]:
    """Log-probabilities of the `most` likeliest tokens and of the chosen one, best first."""
    values = logits.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    top = _largest(logits, most) if most else np.zeros(0, np.int64)
    top = top[np.lexsort((top, -logits[top]))]
    row = {int(token): Logprob(float(values[token]), rank) for rank, token in enumerate(top, 1)}
    if chosen not in row:
        ahead = np.count_nonzero(logits > logits[chosen]) + np.count_nonzero(logits[:chosen] == logits[chosen])
        row[chosen] = Logprob(float(values[chosen]), int(ahead) + 1)
    return row


def check_finite(logits: Row, position: int) -> None:
    """`NumericsError` when a logit is NaN or infinite: nothing is clamped to hide it."""
    finite = np.isfinite(logits)
    if not finite.all():
        first = int(np.flatnonzero(~finite)[0])
        raise NumericsError(
            "the model computed logits that are not finite",
            where=f"position {position}, token {first}",
            found=f"{logits[first]} ({int((~finite).sum())} of {len(logits)} logits)",
            accepted="finite logits",
            hint="run `hadron check MODEL --data`: it names tensors with NaN or infinite values",
        )
