"""Tensors of plain numbers as the extension takes them: an address and a code of the dtype."""

from __future__ import annotations

import torch

_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def number_type(dtype: torch.dtype) -> int:
    """The code of a dtype that native functions read; `KeyError` for others."""
    return _CODES[dtype]


def numbers(tensor: torch.Tensor) -> tuple[int, int]:
    """(address, code) of a contiguous parameter at any address; the caller keeps the tensor."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu", "a parameter is contiguous, on the CPU"
    return tensor.data_ptr(), _CODES[tensor.dtype]


def activations(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, contiguous, as float32 or bfloat16."""
    return (tensor if tensor.dtype in (torch.float32, torch.bfloat16) else tensor.float()).contiguous()
