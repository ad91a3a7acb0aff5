"""What the tests of native operations share: every level this machine has, distances, odd addresses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hadron.kernels.cpu import native
from hadron.kernels.ops import OPERATIONS

needs_native = pytest.mark.skipif(
    not native.levels(), reason="this build has no native kernels: install with a C++ compiler to run these"
)
#: numbers of tokens and of threads that the promise on bits is tested with
BATCHES = (1, 2, 3, 7, 16, 33, 128, 512)
THREADS = (1, 2, 3, 4)
every_level = pytest.mark.parametrize("isa", native.levels())


def handle(isa: str) -> Any:
    """A level as native calls take it."""
    return native.extension().level(isa)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batches(tokens: int) -> Iterator[slice]:
    """Every batch of BATCHES out of so many tokens: at their beginning, from the second on, at their end."""
    for batch in BATCHES:
        for first in sorted({0, 1, tokens - batch}):
            if 0 <= first <= tokens - batch:
                yield slice(first, first + batch)


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
