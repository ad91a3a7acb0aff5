"""Rows of an FP8 cache: the definition against a table of E4M3 and against arithmetic written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hadron.kernels.reference.mla import encode_rows, row_values
from tests.kernels.formats import E4M3

FINITE = np.array([code for code in range(256) if code & 0x7F != 0x7F], dtype=np.uint8)


def nearest(values: np.ndarray) -> np.ndarray:
    """E4M3 values nearest to float64 values, ties to the even code, by looking at all of them."""
    grid = E4M3[FINITE].astype(np.float64)
    distance = np.abs(values[..., None] - grid)
    tied = distance == distance.min(-1, keepdims=True)
    return grid[np.where(tied, FINITE % 2, 2).argmin(-1)]


def scale_of(row: torch.Tensor, rank: int) -> float:
    return float(row[rank : rank + 4].clone().view(torch.float32))


@settings(max_examples=50, deadline=None)
@given(rank=st.integers(1, 40), rope=st.integers(0, 6), seed=st.integers(0, 1000), exponent=st.integers(-30, 30))
def test_codes_are_the_nearest_under_a_scale_of_amax_over_448(rank: int, rope: int, seed: int, exponent: int) -> None:
    rows = torch.randn(5, rank + rope, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    stored = encode_rows(rows, rank)
    assert stored.dtype == torch.uint8 and stored.shape == (5, rank + 4 + 2 * rope)
    values = row_values(stored, rank)
    latent = rows[:, :rank].numpy()
    for i in range(5):
        scale = np.float32(np.abs(latent[i]).max()) / np.float32(448)
        assert scale_of(stored[i], rank) == scale
        expected = nearest((latent[i] / scale).astype(np.float64)).astype(np.float32) * scale
        np.testing.assert_array_equal(values[i, :rank].numpy(), expected)
    assert torch.equal(values[:, rank:], rows[:, rank:].bfloat16().float())


def test_every_code_is_read_as_it_is_defined() -> None:
    row = torch.cat([torch.arange(256, dtype=torch.uint8), torch.tensor([0.375]).view(torch.uint8)]).unsqueeze(0)
    np.testing.assert_array_equal(row_values(row, 256)[0].numpy(), E4M3 * np.float32(0.375))


def test_zeros_stay_zeros_and_get_the_scale_1() -> None:
    stored = encode_rows(torch.cat([torch.zeros(1, 8), torch.ones(1, 2)], dim=-1), 8)
    assert scale_of(stored[0], 8) == 1.0
    assert row_values(stored, 8).tolist() == [[0.0] * 8 + [1.0, 1.0]]


@pytest.mark.parametrize("largest", [1e-44, 1e-40, 1e-30, 1e30, torch.finfo(torch.float32).max])
def test_no_magnitude_becomes_nan_or_infinite(largest: float) -> None:
    values = row_values(encode_rows(torch.tensor([[largest, -largest / 3, 0.0]]), 3), 3)
    assert torch.isfinite(values).all() and float((values[0, 0] - largest).abs()) <= max(2**-4 * largest, 1e-38)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_its_own_row_nan(bad: float) -> None:
    rows = torch.ones(2, 6)
    rows[0, 1] = bad
    values = row_values(encode_rows(rows, 4), 4)
    assert torch.isnan(values[0, :4]).all() and torch.equal(values[0, 4:], torch.ones(2))
    assert torch.equal(values[1], torch.ones(6))


def test_br56_a_rotary_part_twenty_times_the_latent_saturates_nothing() -> None:
    """One scale from the latent's maximum alone would cut the rotary part; from that of both it would leave the
    latent three of the mantissa's steps. Here the scale is the latent's and the rotary part has none."""
    rows = torch.cat([torch.linspace(-0.05, 0.05, 512), torch.linspace(-1, 1, 64)]).unsqueeze(0)
    stored = encode_rows(rows, 512)
    assert scale_of(stored[0], 512) == pytest.approx(0.05 / 448, rel=1e-6)
    values = row_values(stored, 512)[0]
    assert float((values[:512] - rows[0, :512]).abs().max()) <= 0.05 * 2**-4
    assert float((values[512:] - rows[0, 512:]).abs().max()) <= 2**-9


def test_br56_a_scale_of_1_would_lose_what_a_scale_of_the_row_keeps() -> None:
    """Latents of 0.001: E4M3 alone has steps of 2^-9 there."""
    latent = torch.randn(1, 512, generator=torch.Generator().manual_seed(0)) * 1e-3
    kept = row_values(encode_rows(latent, 512), 512)
    unscaled = latent.to(torch.float8_e4m3fn).float()
    assert (
        float((kept - latent).norm() / latent.norm()) < 0.04 < 0.3 < float((unscaled - latent).norm() / latent.norm())
    )


def test_a_row_depends_on_no_other_row() -> None:
    rows = torch.randn(33, 70, generator=torch.Generator().manual_seed(1))
    together = encode_rows(rows, 64)
    assert torch.equal(torch.cat([encode_rows(rows[i : i + 1], 64) for i in range(33)]), together)
    assert torch.equal(encode_rows(rows * torch.arange(1, 34).unsqueeze(1) ** 0, 64)[5:9], together[5:9])
