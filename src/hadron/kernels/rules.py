"""`RowRules`: what changes one row of logits before a token is chosen, as kernels of every provider receive it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


def _ids(values: Sequence[int] = ()) -> array[int]:
    return array("q", values)


def _floats(values: Sequence[float] = ()) -> array[float]:
    return array("f", values)


@dataclass(slots=True, eq=False)
class RowRules:
    """Changes in the order of these fields; the owner may change them between rows. A logit that is not finite, or no
    longer is, stays as it is: no rule hides a fault.

    seen, counts: ids that a penalty may be due for, each once, and how often each has come (float32; 0 where only the
    prompt has it). repetition: positive logits of `seen` are divided by it, others multiplied; frequency: what a logit
    loses for every time that its id has come; presence: for having come at all. All are float32, the result is made in
    float64 and rounded once.
    biased, bias: ids, and what is added to their logits (float32).
    banned: ids that may not come, each once. allowed: int32 [ceil(vocabulary / 32)], of which bit i % 32 of word
    i // 32 says whether id i may come; None: all may. Where `banned` would leave none of those, it is not heeded. only:
    the one id that may come, then neither of the two is heeded; None: no such id.
    """

    seen: array[int] = field(default_factory=_ids)
    counts: array[float] = field(default_factory=_floats)
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    biased: array[int] = field(default_factory=_ids)
    bias: array[float] = field(default_factory=_floats)
    banned: array[int] = field(default_factory=_ids)
    allowed: torch.Tensor | None = None
    only: int | None = None
