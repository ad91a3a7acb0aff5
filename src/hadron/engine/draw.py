"""Tokens drawn by chance: which may come, how likely each is, and which it is.

Rows of several requests are worked on together, number by number as each alone: sums run along a row in order, so a
row's neighbours change none of its bits. Random numbers are a hash of (seed, position): there
is no generator to carry along.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from hadron.sampling_params import SamplingParams

Real = TypeVar("Real", np.float32, np.float64)
_Pair: TypeAlias = tuple[NDArray[np.int64], NDArray[Real]]


class Chance(NamedTuple):
    """What decides the token at a position, besides its logits. params: with a temperature, its defaults filled in."""

    params: SamplingParams
    seed: int
    position: int

    def kind(self, vocabulary: int) -> tuple[int, bool]:
        """`limit`, and whether `top_p` leaves some out: `drawn` takes rows of one kind."""
        assert self.params.top_p is not None
        return limit(self.params, vocabulary), self.params.top_p < 1


def limit(params: SamplingParams, vocabulary: int) -> int:
    """Of how many of the likeliest tokens one is drawn; 0: of all."""
    assert params.top_k is not None
    return params.top_k if 0 < params.top_k < vocabulary else 0


_PAIR = struct.Struct("<QQ")


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 bits: the first of BLAKE2b-64 of both as 64-bit integers, little-endian (RFC 7693)."""
    digest = hashlib.blake2b(_PAIR.pack(seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def candidates(
    ids: NDArray[np.int64], values: NDArray[np.float32], params: Sequence[SamplingParams], *, limited: bool
) -> _Pair[np.float64]:
    """Tokens [n, m] and their unnormalized probabilities, 0 for those that may not come, in a fixed order.

    ids, values: [n, k], of each row the `top_k` likeliest tokens, best first, where `top_k` leaves some out
    (limited), else all by id. Of equally likely tokens at an edge, those with the lowest ids stay. The order is what a
    seed means: by id, where `top_k` leaves some out with those that equal its last at the end; the likeliest first
    with a `top_p`, which all rows have or none.
    """
    temperature, top_p, min_p = (
        np.array([[getattr(own, name)] for own in params], np.float64) for name in ("temperature", "top_p", "min_p")
    )
    if limited:
        ids, values = _sorted(ids, values, np.lexsort((ids, values == values[:, -1:])))
    scaled = values.astype(np.float64)
    scaled -= scaled.max(axis=1, keepdims=True)
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the likeliest to minus infinity
        scaled /= temperature
    weights = np.exp(scaled)
    if top_p[0, 0] < 1:
        total = weights.cumsum(axis=1)[:, -1:]
        # what is left out here holds less than 1 - top_p of every row together: a cheap way to have few to sort
        kept = (weights >= (1 - top_p) * total / weights.shape[1]).any(axis=0)
        ids, weights = ids[:, kept], weights[:, kept]
        ids, weights = _sorted(ids, weights, np.lexsort((ids, -weights)))
        outside = weights.cumsum(axis=1) - weights >= top_p * total
        outside[:, 0] = False
        weights[outside] = 0
    weights[weights < min_p] = 0  # the likeliest weighs 1
    return ids, weights


def _sorted(ids: NDArray[np.int64], values: NDArray[Real], order: NDArray[np.intp]) -> _Pair[Real]:
    at = np.arange(len(ids))[:, None], order
    return ids[at], values[at]


def drawn(
    ids: NDArray[np.int64], values: NDArray[np.float32], chances: Sequence[Chance], *, limited: bool
) -> list[int]:
    """The token of each row; see `candidates`. The chances are of one kind."""
    ids, weights = candidates(ids, values, [chance.params for chance in chances], limited=limited)
    cumulative = weights.cumsum(axis=1)
    numbers = np.array([[uniform(chance.seed, chance.position)] for chance in chances])
    # below the sum of all, since the numbers are below 1 by more than a product is rounded
    passed = (cumulative <= numbers * cumulative[:, -1:]).sum(axis=1)
    found: list[int] = ids[np.arange(len(ids)), passed].tolist()
    return found
