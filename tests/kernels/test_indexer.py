"""Pooling, scoring and exact selection of the indexer, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hadron.errors import NumericsError
from hadron.kernels.reference.indexer import BOUND, expand_pools, pool_keys, scores, select


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_scores() -> None:
    q, w, k = normal(5, 3, 8), normal(5, 3, seed=1), normal(11, 8, seed=2)
    expected = np.zeros((5, 11))
    for t in range(5):
        for j in range(11):
            for h in range(3):
                dot = float(q[t, h].double() @ k[j].double()) / np.sqrt(8)
                expected[t, j] += float(w[t, h]) / np.sqrt(3) * max(dot, 0.0)
    np.testing.assert_allclose(scores(q, w, k).numpy(), expected, atol=1e-5)


def test_the_released_factor_is_one_64th() -> None:
    """32 heads of 128: 128^-0.5 * 32^-0.5 = 1/64."""
    q, w, k = torch.zeros(1, 32, 128), torch.zeros(1, 32), torch.zeros(1, 128)
    q[0, 3, 5], w[0, 3], k[0, 5] = 4.0, 2.0, 8.0
    assert float(scores(q, w, k)) == pytest.approx(64 / 64)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), n=st.integers(1, 12), count=st.integers(1, 14))
def test_selection_is_exact_and_ties_go_to_the_lowest_index(data: st.DataObject, n: int, count: int) -> None:
    """One head and one element, keys from a few values: mostly ties, many zeros behind the ReLU."""
    values = data.draw(st.lists(st.sampled_from([-1.0, 0.0, 1.0, 2.0]), min_size=n, max_size=n))
    sign = data.draw(st.sampled_from([-1.0, 1.0]))
    visible = data.draw(st.integers(0, n))
    found = select(
        torch.ones(1, 1, 1), torch.full((1, 1), sign), torch.tensor(values)[:, None], torch.tensor([visible]), count
    )
    scored = [sign * max(v, 0.0) for v in values[:visible]]
    best = sorted(sorted(range(visible), key=lambda j: (-scored[j], j))[:count])
    assert found.shape == (1, min(count, n))
    assert found[0].tolist() == best + [-1] * (found.shape[1] - len(best))


@pytest.mark.parametrize("bound", [1, 7, 64, 1000])
def test_br53_tiles_change_nothing(bound: int) -> None:
    q, w, k = normal(9, 4, 8), normal(9, 4, seed=1), normal(50, 8, seed=2)
    visible = torch.arange(42, 51)
    assert torch.equal(select(q, w, k, visible, 6, bound), select(q, w, k, visible, 6))
    assert torch.allclose(scores(q, w, k, bound), scores(q, w, k), atol=1e-6)


def test_br53_no_intermediate_exceeds_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor of products at a context of 3000 keys under a small bound."""
    sizes: list[int] = []
    einsum = torch.einsum

    def spy(equation: str, *operands: torch.Tensor) -> torch.Tensor:
        out = einsum(equation, *operands)
        sizes.append(out.numel())
        return out

    monkeypatch.setattr(torch, "einsum", spy)
    select(normal(20, 4, 8), normal(20, 4, seed=1), normal(3000, 8, seed=2), torch.full((20,), 3000), 16, 6000)
    assert max(sizes) <= 6000
    assert BOUND < 2**31


def test_br53_a_needle_beyond_131072_keys_is_found() -> None:
    n, needle = 140_000, 137_531
    keys = normal(n, 8) * 0.1
    query = torch.zeros(2, 2, 8)
    query[:, :, 0] = 1.0
    keys[needle, 0] = 5.0
    found = select(query, torch.ones(2, 2), keys, torch.tensor([n, needle]), 2048)
    assert found.shape == (2, 2048)
    assert needle in found[0].tolist()
    assert needle not in found[1].tolist()
    assert found[0].unique().numel() == 2048
    assert int(found[0, 0]) < 2000  # and it is not simply the last 2048
    assert (found.diff(dim=1) > 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scores_that_are_not_finite_raise(bad: float) -> None:
    keys = normal(6, 8)
    keys[3] = bad
    query, weights = torch.ones(2, 1, 8), torch.ones(2, 1)
    with pytest.raises(NumericsError) as error:
        select(query, weights, keys, torch.tensor([3, 5]), 2)
    assert "query row 1, key 3" in str(error.value)
    select(query, weights, keys, torch.tensor([3, 2]), 2)  # a key that nobody sees harms nobody


def test_pooled_keys() -> None:
    keys, gates, table = normal(3, 4, 5), normal(3, 4, 5, seed=1), normal(4, 5, seed=2)
    weights = np.exp((gates + table).double().numpy())
    expected = (weights / weights.sum(axis=1, keepdims=True) * keys.numpy()).sum(axis=1)
    np.testing.assert_allclose(pool_keys(keys, gates, table).numpy(), expected, atol=1e-6)


def test_a_pool_of_one_is_its_key() -> None:
    keys = normal(3, 1, 5)
    assert torch.equal(pool_keys(keys, normal(3, 1, 5, seed=1), normal(1, 5, seed=2)), keys[:, 0])


@settings(max_examples=80, deadline=None)
@given(data=st.data(), pool=st.sampled_from([1, 2, 4, 16]), position=st.integers(0, 70), tail=st.booleans())
def test_pools_become_ascending_positions(data: st.DataObject, pool: int, position: int, tail: bool) -> None:
    closed = (position + 1) // pool
    chosen = sorted(data.draw(st.sets(st.integers(0, closed - 1), max_size=4))) if closed else []
    pools = torch.tensor([[*chosen, *[-1] * (5 - len(chosen))]])
    found = expand_pools(pools, pool, torch.tensor([position]), tail)[0].tolist()
    expected = [p * pool + i for p in chosen for i in range(pool)]
    if tail:
        expected += range(closed * pool, position + 1)
    assert found == expected + [-1] * (len(found) - len(expected))
    assert max(found, default=0) <= position
