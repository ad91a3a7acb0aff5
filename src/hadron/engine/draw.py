"""Tokens drawn by chance: which may come, how likely each is, and which it is.

A row's tokens stand in the order of their likelihood, on a tie by id, and a number in [0, 1) picks among them. So the
few likeliest decide nearly always, and where the number lies behind them more are asked for. Rows of several requests
are worked on together, number by number as each alone: a row's neighbours change none of its bits. Random numbers are
a hash of (seed, position): there is no generator to carry along.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from hadron.sampling_params import SamplingParams

#: How many tokens are asked for first where any may come, and by how much more than the last time after that.
FIRST, FURTHER = 64, 16


class Chance(NamedTuple):
    """What decides the token at a position, besides its logits. params: with a temperature, its defaults filled in."""

    params: SamplingParams
    seed: int
    position: int


def limit(params: SamplingParams, vocabulary: int) -> int:
    """Of how many of the likeliest tokens one is drawn."""
    assert params.top_k is not None
    return min(params.top_k, vocabulary) if params.top_k > 0 else vocabulary


_PAIR = struct.Struct("<QQ")


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 bits: the first of BLAKE2b-64 of both as 64-bit integers, little-endian (RFC 7693)."""
    digest = hashlib.blake2b(_PAIR.pack(seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


# A tiny temperature sends all but the likeliest to minus infinity, and rows that are not finite may be among the rest.
@np.errstate(over="ignore", invalid="ignore")
def drawn(
    ids: NDArray[np.int64],
    values: NDArray[np.float32],
    chances: Sequence[Chance],
    log_sum: NDArray[np.float64] | None = None,
) -> list[int | None]:
    """The token of each row, None where it may be one that is not given.

    ids, values: [n, m], the likeliest tokens of each row and their logits, best first. log_sum: [n], of whole rows at
    their own temperature (`Best.log_sum`), where there are others that may come. Of a row that is not finite, any.
    """
    temperature, top_p, min_p, number = np.array(
        [(c.params.temperature, c.params.top_p, c.params.min_p, uniform(c.seed, c.position)) for c in chances],
        np.float64,
    ).T[:, :, None]
    rows, most = np.arange(len(ids)), ids.shape[1]
    scaled = values.astype(np.float64)
    scaled -= scaled[:, :1]
    scaled /= temperature
    weights = np.exp(scaled)
    passed = weights.cumsum(axis=1)
    total = passed[:, -1:] if log_sum is None else np.maximum(np.exp(log_sum)[:, None], passed[:, -1:])
    # the likeliest always, and those after it while the ones before have not reached top_p
    further = passed[:, :-1] < top_p * total
    further &= weights[:, 1:] >= min_p
    last = further.sum(axis=1)
    kept = passed[rows, last][:, None]
    if log_sum is None:
        at = (passed <= number * kept).sum(axis=1)
        return cast(list[int | None], ids[rows, np.minimum(at, last)].tolist())
    unfiltered = (top_p == 1) & (min_p == 0)
    at = (passed <= number * np.where(unfiltered, total, kept)).sum(axis=1)
    complete = (unfiltered[:, 0] | (last + 1 < most)) & (at < most)
    tokens = ids[rows, np.minimum(at, last)].tolist()
    return [token if known else None for token, known in zip(tokens, complete.tolist(), strict=True)]
