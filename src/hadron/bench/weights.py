"""Random weights in the layout that kernels receive, and copies of them spread over an arena.

Copies lie one after the other and 8 bytes off a cache line, as tensors do in a safetensors file whose
header has an odd length; kernels that run through the copies in turn find none of them in a cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from hadron.bench.limits import Arena
from hadron.kernels.stored import StoredWeight
from hadron.quantization.dtypes import Element
from hadron.quantization.scheme import Granularity, Packing, QuantizationScheme

OFFSET = 8
LINE = 64
_FLOATS = {Element.F32: torch.float32, Element.F16: torch.float16, Element.BF16: torch.bfloat16}


def random_weight(scheme: QuantizationScheme, rows: int, columns: int, seed: int = 0) -> StoredWeight:
    """A weight [rows, columns] of that scheme, with codes and scales such as a trained model has."""
    random = torch.Generator().manual_seed(seed)

    def raw(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)

    groups = -(-columns // scheme.columns) if scheme.columns else 1
    packing = Packing.ROW_MAJOR
    element = scheme.element
    if element in _FLOATS:
        weight = (torch.randn(rows, columns, generator=random) / columns**0.5).to(_FLOATS[element])
    elif element is Element.E4M3:
        # as quantizers leave them: the largest of a block at 448, few subnormals
        weight = (torch.randn(rows, columns, generator=random) * 112).clamp(-448, 448).to(torch.float8_e4m3fn)
    elif element is Element.INT8:
        weight = raw(rows, columns).view(torch.int8)
    elif element is Element.INT4:
        weight, packing = raw(rows, -(-columns // 8) * 4).view(torch.int32), Packing.INT4_ROWS
    else:
        weight = raw(rows, -(-columns * scheme.bits // 8))
    zeros = raw(-(-rows // 8), groups * 4).view(torch.int32) if scheme.zero_point else None
    has_global = scheme.global_scale or scheme.fp8_stage
    return StoredWeight(
        scheme, packing, (rows, columns), weight, _scale(scheme, rows, groups, random),
        torch.tensor(0.01) if has_global else None, zeros,
    )  # fmt: skip


def _scale(scheme: QuantizationScheme, rows: int, groups: int, random: torch.Generator) -> torch.Tensor | None:
    def floats(*shape: int) -> torch.Tensor:
        return (torch.rand(*shape, generator=random) + 0.5) * 1e-3

    match scheme.granularity:
        case Granularity.NONE:
            return None
        case Granularity.TENSOR:
            return floats(1)[0]
        case Granularity.CHANNEL:
            return floats(rows, 1)
        case Granularity.BLOCK:
            return floats(-(-rows // scheme.rows), groups)
    if scheme.scale == "e8m0":
        # as far apart as real files have them: within 128 columns of a row, never more than three binades
        return torch.randint(118, 122, (rows, groups), generator=random, dtype=torch.uint8)
    if scheme.scale == "e4m3":
        codes = torch.randint(0x28, 0x48, (rows, groups), generator=random, dtype=torch.uint8)
        return codes.view(torch.float8_e4m3fn)
    return floats(rows, groups).bfloat16()


def weight_bytes(weight: StoredWeight) -> int:
    """Bytes that a product by this weight reads."""
    return sum(t.numel() * t.element_size() for t in weight.tensors())


class Space:
    """Places weights in an arena, one after the other; starts over when it is full."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._at = OFFSET

    def room(self, weight: StoredWeight) -> int:
        """How many copies the whole arena holds."""
        return max(0, (self._arena.size - OFFSET) // self._need(weight))

    def copy(self, weight: StoredWeight) -> StoredWeight:
        """A copy at the next place."""
        if self._at + self._need(weight) > self._arena.size:
            self._at = OFFSET

        def placed(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return self._place(tensor) if tensor is not None and tensor.dim() else tensor

        return replace(
            weight,
            weight=self._place(weight.weight),
            scale=placed(weight.scale),
            zero_point=placed(weight.zero_point),
        )

    def copies(self, weight: StoredWeight) -> Iterator[StoredWeight]:
        """As many copies as there is room for, from the beginning."""
        self._at = OFFSET
        for _ in range(self.room(weight)):
            yield self.copy(weight)

    def _need(self, weight: StoredWeight) -> int:
        return sum(_padded(t.numel() * t.element_size()) for t in weight.tensors() if t.dim())

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.numel() * tensor.element_size()
        place = self._arena.tensor[self._at : self._at + size].view(tensor.dtype).view(tensor.shape)
        place.copy_(tensor)
        self._at += _padded(size)
        return place


def _padded(size: int) -> int:
    return -(-size // LINE) * LINE
