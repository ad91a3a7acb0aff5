"""Random numbers keyed by (seed, position): the first of numpy's `Generator(Philox(key=seed, counter=position))`.

Philox 4x64-10 of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC'11), written out because one number
of a fresh generator is all that a token takes, and numpy's asks the system for entropy before it looks at the key.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 bits. seed, position: 0 <= x < 2**128 and 2**256 - 1."""
    counter = position + 1  # numpy counts before it draws
    a, b, c, d = counter & _MASK, counter >> 64 & _MASK, counter >> 128 & _MASK, counter >> 192 & _MASK
    low, high = seed & _MASK, seed >> 64
    for _ in range(_ROUNDS - 1):
        first, second = _MULTIPLIERS[0] * a, _MULTIPLIERS[1] * c
        a, c = second >> 64 ^ b ^ low, first >> 64 ^ d ^ high
        b, d = second & _MASK, first & _MASK
        low, high = low + _WEYL[0] & _MASK, high + _WEYL[1] & _MASK
    # of the last round one number in four is used
    return ((_MULTIPLIERS[1] * c >> 64 ^ b ^ low) >> 11) * 2.0**-53
