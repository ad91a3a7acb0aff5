"""The logits of every token of a prompt, in pieces of a step, by a runner that nobody else uses meanwhile."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hadron.batch import RequestStep, Selections
from hadron.engine import sampler
from hadron.engine.runner import Runner
from hadron.errors import HadronError, NumericsError


def prompt_logits(
    runner: Runner, ids: tuple[int, ...], most: int, selections: Selections | None = None
) -> NDArray[np.float32]:
    """float32 [tokens, vocabulary], `most` tokens a step. `NumericsError` where a logit is not finite."""
    manager = runner.manager
    # what imposed choices give is nobody else's, nor are pages without the rows of what guesses
    cache = manager.admit(findable=selections is None and runner.drafter is None)
    rows = []
    try:
        for start in range(0, len(ids), most):
            piece = ids[start : start + most]
            manager.grow(cache, len(piece))
            logits = runner.run([RequestStep(cache, piece)], [len(piece)], selections).logits
            if runner.faults and runner.faults[0] is not None:
                raise not_finite(runner.faults[0])
            assert logits is not None
            sampler.check_finite(logits, logits.best(1), start + 1)
            rows.append(logits.values.cpu().numpy())
    except HadronError:
        manager.forget(cache)
        raise
    finally:
        manager.release(cache)
    return np.concatenate(rows)


def not_finite(where: str) -> NumericsError:
    """What is said where a layer's output was looked at (`--debug-nonfinite`)."""
    return NumericsError(
        "the model computed values that are not finite", where=where, found="NaN or infinite values",
        accepted="finite values", hint="run `hadron check MODEL --data`: it names tensors with such values",
    )  # fmt: skip
