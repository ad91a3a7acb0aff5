"""A long text in windows that a model can read, each token predicted once with as much before it as fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def rolling_windows(
    ids: Sequence[int], prefix: Sequence[int], length: int, stride: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Contexts and the tokens to predict after them, in order; together they predict every token once.

    prefix: stands before the text, at least one token. length: most tokens the model reads at once, more than the
    prefix has. stride: how many tokens a window after the first predicts, 1 to `length`; its context is as long
    as fits. With a prefix of one token and a stride of `length - context_len + 1` these are the windows of lm-eval.
    """
    assert prefix and len(prefix) <= length and 1 <= stride <= length
    whole = [*prefix, *ids]
    start, end = len(prefix), min(len(whole), length + 1)
    while start < len(whole):
        # the last of the tokens to predict is not read
        yield whole[max(0, end - 1 - length) : start], whole[start:end]
        start, end = end, min(len(whole), end + stride)
