"""Windows of long texts."""

from __future__ import annotations

import pytest
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from hadron.eval.windows import rolling_windows


def test_the_example_of_the_definition() -> None:
    assert list(rolling_windows(range(10), [99], 4, 4)) == [
        ([99, 0, 1, 2][:1], [0, 1, 2, 3]),
        ([3], [4, 5, 6, 7]),
        ([5, 6, 7], [8, 9]),
    ]


@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 9, 16, 17, 40])
@pytest.mark.parametrize(("length", "stride"), [(1, 1), (4, 4), (4, 1), (4, 3), (16, 5), (64, 64)])
def test_they_are_those_of_lm_eval(tokens: int, length: int, stride: int) -> None:
    ids = list(range(100, 100 + tokens))
    theirs = get_rolling_token_windows(ids, 7, length, length - stride + 1)
    assert list(rolling_windows(ids, [7], length, stride)) == [make_disjoint_window(window) for window in theirs]


@pytest.mark.parametrize(("length", "stride"), [(2, 2), (5, 2), (8, 8), (100, 3)])
def test_every_token_is_predicted_once_after_what_stands_before_it(length: int, stride: int) -> None:
    ids, prefix = list(range(31)), [-2, -1]
    whole, done = [*prefix, *ids], 0
    for context, wanted in rolling_windows(ids, prefix, length, stride):
        assert context and len(context) + len(wanted) - 1 <= length
        begin = len(prefix) + done
        assert whole[begin - len(context) : begin + len(wanted)] == context + wanted
        done += len(wanted)
    assert done == len(ids)
