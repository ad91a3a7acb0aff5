"""The router against the same choice written out in numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hadron.kernels.reference.router import route


@dataclass(frozen=True)
class Sizes:
    top_k: int
    groups: int
    topk_groups: int
    normalize: bool
    scaling: float


def choose(scores: np.ndarray, bias: np.ndarray, d: Sizes) -> tuple[list[int], list[float]]:
    """One token, one step at a time; scores and bias are exact in float64."""
    choice = scores + bias
    size = len(scores) // d.groups
    groups = [sorted(choice[g * size : (g + 1) * size])[-2:] for g in range(d.groups)]
    kept = sorted(range(d.groups), key=lambda g: (-sum(groups[g]), g))[: d.topk_groups]
    allowed = [e for e in range(len(scores)) if e // size in kept]
    ids = sorted(sorted(allowed, key=lambda e: (-choice[e], e))[: d.top_k])
    weights = scores[ids]
    if d.normalize:
        weights = weights / (weights.sum() + 1e-20)
    return ids, (weights * d.scaling).tolist()


@settings(max_examples=80, deadline=None)
@given(data=st.data(), groups=st.sampled_from([1, 2, 4]), normalize=st.booleans())
def test_against_numpy_with_ties(data: st.DataObject, groups: int, normalize: bool) -> None:
    """Scores from a few values, so that ties are everywhere and must go to the lowest expert."""
    experts = 8
    topk_groups = data.draw(st.integers(1, groups))
    top_k = data.draw(st.integers(1, topk_groups * experts // groups))
    d = Sizes(top_k, groups, topk_groups, normalize, 2.5)
    logits = np.array(data.draw(st.lists(st.sampled_from([-1.0, 0.0, 2.0]), min_size=experts, max_size=experts)))
    bias = np.array(data.draw(st.lists(st.sampled_from([-0.5, 0.0, 0.5]), min_size=experts, max_size=experts)))
    scores = torch.tensor(logits, dtype=torch.float32).sigmoid().numpy()
    ids, weights = route(
        torch.ones(1, 1), torch.tensor(logits, dtype=torch.float32)[:, None], torch.tensor(bias).float(), d
    )
    expected = choose(scores, bias.astype(np.float32), d)
    assert ids[0].tolist() == expected[0]
    np.testing.assert_allclose(weights[0].numpy(), expected[1], rtol=1e-5)


def test_the_bias_picks_and_does_not_weigh() -> None:
    weight = torch.tensor([[2.0], [1.0], [0.0]])
    ids, weights = route(torch.ones(1, 1), weight, torch.tensor([0.0, 0.0, 30.0]), Sizes(2, 1, 1, False, 1.0))
    assert ids.tolist() == [[0, 2]]
    np.testing.assert_allclose(weights[0].numpy(), 1 / (1 + np.exp([-2.0, 0.0])), rtol=1e-6)


def test_a_large_and_nearly_constant_bias_keeps_the_order() -> None:
    """Released biases are 12 to 35 and nearly constant; scores must not vanish beside them."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(50, 16, generator=generator), torch.randn(32, 16, generator=generator) / 4
    plain = route(x, weight, torch.zeros(32), Sizes(8, 1, 1, True, 2.5))
    biased = route(x, weight, torch.full((32,), 16.0), Sizes(8, 1, 1, True, 2.5))
    assert torch.equal(plain[0], biased[0])


def test_everything_is_float32_whatever_the_storage() -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(20, 16, generator=generator).bfloat16(), torch.randn(8, 16, generator=generator).bfloat16()
    d = Sizes(3, 1, 1, True, 2.5)
    ids, weights = route(x, weight, torch.zeros(8), d)
    wide = route(x.double().float(), weight.float(), torch.zeros(8), d)
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int64
    assert torch.equal(ids, wide[0])
    assert torch.equal(weights, wide[1])


@pytest.mark.parametrize("scaling", [1.0, 2.5])
def test_br62_normalised_weights_sum_to_the_scaling_factor(scaling: float) -> None:
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn(9, 16, generator=generator), torch.randn(8, 16, generator=generator)
    _, weights = route(x, weight, torch.zeros(8), Sizes(3, 1, 1, True, scaling))
    np.testing.assert_allclose(weights.sum(dim=1).numpy(), scaling, rtol=1e-6)
