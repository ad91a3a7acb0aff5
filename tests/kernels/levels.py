"""What the tests of native operations share: every level this machine has, distances, odd addresses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hadron.kernels.cpu import native
from hadron.kernels.ops import OPERATIONS

needs_native = pytest.mark.skipif(
    not native.levels(), reason="this build has no native kernels: install with a C++ compiler to run these"
)
every_level = pytest.mark.parametrize("isa", native.levels())


def handle(isa: str) -> Any:
    """A level as native calls take it."""
    return native.extension().level(isa)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def near(operation: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within the operation's tolerance of its definition."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    error = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
    # the last bit may fall either way
    rounding = torch.finfo(found.dtype).eps if found.dtype in (torch.bfloat16, torch.float16) else 0.0
    assert float(error) <= OPERATIONS[operation].tolerance + rounding, float(error)


def unaligned(tensor: torch.Tensor, by: int = 1) -> torch.Tensor:
    """The same values at an odd address: safetensors aligns headers, not tensors."""
    raw = torch.empty(tensor.numel() * tensor.element_size() + 64 + by, dtype=torch.uint8).numpy()
    start = -raw.ctypes.data % 64 + by
    view = raw[start : start + tensor.numel() * tensor.element_size()]
    view[:] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return torch.frombuffer(view.data, dtype=tensor.dtype).view(tensor.shape)
