"""Numbers of (seed, position) are numpy's, bit for bit."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hadron.engine.philox import uniform


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**65))
@example(0, 0)
@example(2**64 - 1, 2**64 - 1)
@example(2**127 + 5, 2**255 + 9)
def test_the_first_number_of_numpys_generator(seed: int, position: int) -> None:
    assert uniform(seed, position) == np.random.Generator(np.random.Philox(key=seed, counter=position)).random()
