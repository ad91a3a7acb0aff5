"""What decides a token that is drawn by chance, besides its logits.

A row's tokens stand in the order of their likelihood, on a tie by id, and a number in [0, 1) picks among them. So the
few likeliest decide nearly always, and where the number lies behind them more are asked for. Random numbers are
hashes of a seed and a position: there is no generator to carry along.
"""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache

from hadron.sampling_params import SamplingParams

#: How many tokens are asked for first where any may come.
FIRST = 64


def limit(params: SamplingParams, vocabulary: int) -> int:
    """Of how many of the likeliest tokens one is drawn."""
    assert params.top_k is not None
    return min(params.top_k, vocabulary) if params.top_k > 0 else vocabulary


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 bits: the first of the 64-bit integer at place `position % 8` of BLAKE2b-512 of the
    seed and `position // 8`, all of them 64-bit and little-endian (RFC 7693)."""
    return _eight(seed, position >> 3)[position & 7]


_PAIR, _EIGHT = struct.Struct("<QQ"), struct.Struct("<8Q")


@lru_cache(maxsize=4096)  # a request asks for one after another
def _eight(seed: int, number: int) -> tuple[float, ...]:
    digest = hashlib.blake2b(_PAIR.pack(seed, number)).digest()
    return tuple([(word >> 11) * 2.0**-53 for word in _EIGHT.unpack(digest)])
