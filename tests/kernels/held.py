"""Weights for layers under test, held in dictionaries; and matrices in several schemes with their values."""

from __future__ import annotations

import numpy as np
import torch

from hadron.kernels.select import KernelChoice, select
from hadron.kernels.stored import stored_weight
from hadron.layers.linear import Linear, Product
from hadron.quantization import scheme as s
from hadron.quantization.scheme import PLAIN_STORAGE, QuantizationScheme
from tests.kernels import formats as f


class Held:
    """Implements `layers.weights.Weights`."""

    def __init__(self) -> None:
        self.linears: dict[str, Linear] = {}
        self.tensors: dict[str, torch.Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.linears or name in self.tensors

    def linear(self, name: str) -> Linear:
        return self.linears[name]

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def product(
    scheme: QuantizationScheme,
    shape: tuple[int, int],
    *,
    bias: torch.Tensor | None = None,
    quantize: Product | None = None,
    **tensors: torch.Tensor,
) -> Linear:
    choice = select("linear", scheme)
    assert isinstance(choice, KernelChoice)
    return Linear(stored_weight("layer", scheme, PLAIN_STORAGE, shape, tensors), choice, bias=bias, quantize=quantize)


def dense(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[Linear, f.Array]:
    values = torch.from_numpy(rng.standard_normal(shape).astype(np.float32) * 0.2).bfloat16()
    return product(s.BF16, shape, weight=values), values.float().numpy()


def mxfp4(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[Linear, f.Array]:
    codes, scale = rng.integers(0, 16, shape), rng.integers(121, 125, (shape[0], shape[1] // 32))
    values = f.E2M1[codes] * f.spread(f.E8M0[scale], 1, 32, shape)
    tensors = {"weight": f.pack_nibbles(codes), "scale": torch.from_numpy(scale.astype(np.uint8))}
    return product(s.MXFP4, shape, **tensors), values


def nvfp4(rng: np.random.Generator, shape: tuple[int, int], global_scale: float) -> tuple[Linear, f.Array]:
    codes, scale = rng.integers(0, 16, shape), rng.integers(0x50, 0x78, (shape[0], shape[1] // 16))
    values = f.E2M1[codes] * f.spread(f.E4M3[scale], 1, 16, shape) * np.float32(global_scale)
    tensors = {"weight": f.pack_nibbles(codes), "scale": f.fp8(scale), "global_scale": torch.tensor(global_scale)}
    return product(s.NVFP4, shape, **tensors), values


def block_fp8(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[Linear, f.Array]:
    codes = f.fp8_codes(rng, shape) & 0xBF
    scale = rng.uniform(0.05, 0.2, (-(-shape[0] // 128), -(-shape[1] // 128))).astype(np.float32)
    values = f.E4M3[codes] * f.spread(scale, 128, 128, shape)
    return product(s.fp8_block(128, 128), shape, weight=f.fp8(codes), scale=torch.from_numpy(scale)), values


def swiglu(x: f.Array, gate: f.Array, up: f.Array, down: f.Array, limit: float | None = None) -> f.Array:
    """Written out in float64."""
    x, gate, up, down = (a.astype(np.float64) for a in (x, gate, up, down))
    g, u = x @ gate.T, x @ up.T
    if limit is not None:
        g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
    return (g / (1 + np.exp(-g)) * u) @ down.T


def close(found: torch.Tensor, expected: f.Array, tolerance: float = 1e-5) -> None:
    """Within a share of the largest expected value."""
    error = np.abs(found.float().numpy() - expected).max() / np.abs(expected).max()
    assert error <= tolerance, error
