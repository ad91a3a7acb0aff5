"""Random numbers of (seed, position): what a seed means, and that nothing shows through of how they were asked for."""

from __future__ import annotations

import numpy as np
import pytest

from hadron.engine.draw import uniform

MANY = 40_000


# words of the digests by `printf … | b2sum` of the sixteen bytes
@pytest.mark.parametrize(
    ("seed", "position", "digest"),
    [
        (0, 0, "739a3012ff930845"),
        (1, 0, "536126854197cdc6"),
        (0, 1, "420e90a6eb728902"),
        (2**64 - 1, 2**40, "70b4b335756f02ee"),
    ],
)
def test_a_seed_means_the_same_for_ever(seed: int, position: int, digest: str) -> None:
    assert uniform(seed, position) == (int.from_bytes(bytes.fromhex(digest), "little") >> 11) / 2**53


@pytest.mark.parametrize("by", ["position", "seed", "both"])
def test_neighbours_are_uniform_and_independent(by: str) -> None:
    asked = {"position": lambda i: (7, i), "seed": lambda i: (i, 7), "both": lambda i: (i, i)}[by]
    numbers = np.array([uniform(*asked(i)) for i in range(MANY)])
    # Kolmogorov-Smirnov at 1e-4, and correlations within 4.5 standard deviations
    distance = np.abs(np.sort(numbers) - (np.arange(MANY) + 0.5) / MANY).max()
    assert distance < 2.23 / MANY**0.5
    for lag in (1, 2, 64):
        assert abs(np.corrcoef(numbers[:-lag], numbers[lag:])[0, 1]) < 4.5 / MANY**0.5
