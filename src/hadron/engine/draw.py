"""What decides a token that is drawn by chance, besides its logits.

A row's tokens stand in the order of their likelihood, on a tie by id, and a number in [0, 1) picks among them. So the
few likeliest decide nearly always, and where the number lies behind them more are asked for. Random numbers are a
hash of (seed, position): there is no generator to carry along.
"""

from __future__ import annotations

import hashlib
import struct

from hadron.sampling_params import SamplingParams

#: How many tokens are asked for first where any may come, and by how much more than the last time after that.
FIRST, FURTHER = 64, 16


def limit(params: SamplingParams, vocabulary: int) -> int:
    """Of how many of the likeliest tokens one is drawn."""
    assert params.top_k is not None
    return min(params.top_k, vocabulary) if params.top_k > 0 else vocabulary


_PAIR = struct.Struct("<QQ")


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 bits: the first of BLAKE2b-64 of both as 64-bit integers, little-endian (RFC 7693)."""
    digest = hashlib.blake2b(_PAIR.pack(seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
