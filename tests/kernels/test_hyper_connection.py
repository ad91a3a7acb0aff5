"""mHC against numpy in float64, and how close its mixing matrix comes to doubly stochastic."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hadron.kernels.reference.hyper_connection import collapse, mixes, spread
from hadron.layers.dimensions import HyperConnectionDimensions

HIDDEN = 12


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def site(streams: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    size = (2 + streams) * streams
    fn = normal(size, streams * HIDDEN, seed=1) / 4
    return normal(7, streams, HIDDEN), fn, normal(size, seed=2), 1 + normal(3, seed=3) / 4


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-x)))


@pytest.mark.parametrize("rounds", [1, 3, 20])
@pytest.mark.parametrize("m", [1, 2, 4])
def test_against_numpy(m: int, rounds: int) -> None:
    dims = HyperConnectionDimensions(HIDDEN, m, rounds, 1e-6, 1e-5)
    given = site(m)
    x, fn, base, scale = (t.double().numpy() for t in given)
    flat = x.reshape(7, -1)
    flat = flat / np.sqrt((flat**2).mean(axis=1, keepdims=True) + 1e-5)
    mix = flat @ fn.T
    logits = (mix[:, 2 * m :] * scale[2] + base[2 * m :]).reshape(7, m, m)
    comb = np.exp(logits - logits.max(axis=2, keepdims=True))
    comb = comb / comb.sum(axis=2, keepdims=True) + 1e-6
    comb = comb / (comb.sum(axis=1, keepdims=True) + 1e-6)
    for _ in range(rounds - 1):
        comb = comb / (comb.sum(axis=2, keepdims=True) + 1e-6)
        comb = comb / (comb.sum(axis=1, keepdims=True) + 1e-6)
    found = mixes(*given, dims)
    np.testing.assert_allclose(found[0].numpy(), sigmoid(mix[:, :m] * scale[0] + base[:m]) + 1e-6, atol=1e-6)
    np.testing.assert_allclose(found[1].numpy(), 2 * sigmoid(mix[:, m : 2 * m] * scale[1] + base[m : 2 * m]), atol=1e-6)
    np.testing.assert_allclose(found[2].numpy(), comb, atol=1e-6)


def test_collapse_and_spread() -> None:
    streams, pre, post = normal(5, 4, 3), normal(5, 4, seed=1), normal(5, 4, seed=2)
    comb, output = normal(5, 4, 4, seed=3), normal(5, 3, seed=4)
    np.testing.assert_allclose(
        collapse(streams, pre).numpy(), np.einsum("tm,tmh->th", pre.numpy(), streams.numpy()), atol=1e-6
    )
    expected = np.einsum("tj,th->tjh", post.numpy(), output.numpy())
    expected += np.einsum("tij,tih->tjh", comb.numpy(), streams.numpy())
    np.testing.assert_allclose(spread(output, post, comb, streams).numpy(), expected, atol=1e-5)


def test_br58_row_sums_stay_within_1e_4_of_1_in_float32_and_not_in_bfloat16() -> None:
    """Parameters stored in bfloat16 are computed with in float32; rounds in bfloat16 would not converge."""
    dims = HyperConnectionDimensions(HIDDEN, 4, 20, 1e-6, 1e-5)
    streams, fn, base, scale = site(4)
    fn, base = fn / 4, base / 2  # gentle enough for 20 rounds to converge
    for kept in ((fn, base, scale), (fn.bfloat16(), base, scale), (fn.bfloat16(), base.bfloat16(), scale.bfloat16())):
        comb = mixes(streams.bfloat16(), *kept, dims)[2]
        assert comb.dtype == torch.float32
        assert float((comb.sum(dim=-1) - 1).abs().max()) < 1e-4
    rounded = mixes(streams, fn, base, scale, dims)[2].bfloat16()
    for i in range(8):
        rounded = rounded / (rounded.sum(dim=-1 - i % 2, keepdim=True) + 1e-6)
    assert float((rounded.float().sum(dim=-1) - 1).abs().max()) > 1e-4
