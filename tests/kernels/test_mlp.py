"""The gated MLP: clamp, halves in schemes of their own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hadron.layers.dimensions import MlpDimensions
from hadron.layers.mlp import Mlp
from tests.kernels.held import Held, block_fp8, close, dense, mxfp4, nvfp4, swiglu

HIDDEN, WIDE = 64, 96


def held(rng: np.random.Generator, gate, up, down):  # type: ignore[no-untyped-def]
    weights, values = Held(), []
    for name, make, shape in (
        ("gate_proj", gate, (WIDE, HIDDEN)), ("up_proj", up, (WIDE, HIDDEN)), ("down_proj", down, (HIDDEN, WIDE)),
    ):  # fmt: skip
        weights.linears[f"mlp.{name}"], value = make(rng, shape)
        values.append(value)
    return weights, values


@pytest.mark.parametrize("limit", [None, 10.0, 0.5])
def test_swiglu_clamps_gate_from_above_and_up_on_both_sides(limit: float | None) -> None:
    rng = np.random.default_rng(0)
    weights, values = held(rng, dense, dense, dense)
    x = rng.standard_normal((7, HIDDEN)).astype(np.float32) * 4
    found = Mlp("mlp", MlpDimensions(HIDDEN, WIDE, limit), weights)(torch.from_numpy(x))
    close(found, swiglu(x, *values, limit))
    unclamped = swiglu(x, *values)
    if limit == 0.5:
        assert np.abs(unclamped - swiglu(x, *values, limit)).max() > 0.1, "the limit matters on this input"
        gate = x.astype(np.float64) @ values[0].T
        assert (gate < -limit).any(), "gate has values below the limit, which stay"


def test_br24_gate_and_up_with_global_scales_of_their_own() -> None:
    rng = np.random.default_rng(1)
    weights, values = held(rng, lambda r, shape: nvfp4(r, shape, 1e-3), lambda r, shape: nvfp4(r, shape, 1e-4), dense)
    x = rng.standard_normal((5, HIDDEN)).astype(np.float32)
    found = Mlp("mlp", MlpDimensions(HIDDEN, WIDE, None), weights)(torch.from_numpy(x))
    close(found, swiglu(x, *values))


def test_three_projections_in_three_schemes() -> None:
    rng = np.random.default_rng(2)
    weights, values = held(rng, mxfp4, block_fp8, dense)
    x = rng.standard_normal((5, HIDDEN)).astype(np.float32) * 0.1
    found = Mlp("mlp", MlpDimensions(HIDDEN, WIDE, 10.0), weights)(torch.from_numpy(x))
    close(found, swiglu(x, *values, 10.0))


def test_bf16_activations_stay_near() -> None:
    rng = np.random.default_rng(3)
    weights, values = held(rng, dense, dense, dense)
    x = torch.from_numpy(rng.standard_normal((5, HIDDEN)).astype(np.float32)).bfloat16()
    found = Mlp("mlp", MlpDimensions(HIDDEN, WIDE, None), weights)(x)
    assert found.dtype is torch.bfloat16
    close(found, swiglu(x.float().numpy(), *values), 2e-2)
