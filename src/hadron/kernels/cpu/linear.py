"""Native `linear`: products straight from the packed codes of a mapped checkpoint.

x is rounded to bfloat16 (float32 and float16 weights: not rounded), sums are float32. The row of a
result depends on its row of x alone: not on the batch, not on the thread count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hadron.kernels.cpu.native import extension, level
from hadron.kernels.stored import StoredWeight
from hadron.quantization.scheme import Granularity

_SCALE_TYPES = {
    torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.uint8: "e8m0",
    torch.float8_e8m0fnu: "e8m0", torch.float8_e4m3fn: "e4m3",
}  # fmt: skip


class Product:
    """One weight, bound: its addresses are taken once, and its tensors kept alive."""

    __slots__ = ("_bias", "_call", "_kept", "level", "native", "rows", "threads")

    def __init__(self, weight: StoredWeight, bias: torch.Tensor | None, threads: int, *, exact: bool = False) -> None:
        self.threads = threads
        self.rows = weight.shape[0]
        self._bias = None if bias is None else bias.float().contiguous()
        self._kept = weight
        self.level = level()
        self.native = _bind(weight, self._bias, exact=exact)
        self._call = extension().linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, in] of any float dtype -> float32 [tokens, out]."""
        wide = x.float().contiguous()
        y = torch.empty(wide.shape[0], self.rows)
        self._call(self.level, self.native, wide.data_ptr(), wide.shape[0], y.data_ptr(), self.threads)
        return y

    def exact(self) -> Product:
        """The same product, but that x is not rounded whatever the weight's scheme."""
        return Product(self._kept, self._bias, self.threads, exact=True)

    @staticmethod
    def group(products: Sequence[Product]) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
        """Products in one call: one x [tokens, in] for each -> [tokens, out] for each, in the inputs' dtype.

        What is the same tensor to several is prepared once.
        """
        weights, kept = extension().WeightList(), tuple(products)
        for product in kept:
            weights.add(product.native)
        call, level, threads = extension().linears, kept[0].level, kept[0].threads
        rows = [product.rows for product in kept]

        def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            assert len(inputs) == len(kept)  # and their tensors live as long as this function
            wide = {id(x): x.float().contiguous() for x in inputs}
            tokens = inputs[0].shape[0]
            y = torch.empty(tokens * sum(rows))
            call(level, weights, [wide[id(x)].data_ptr() for x in inputs], tokens, y.data_ptr(), threads)
            parts = torch.split(y.to(inputs[0].dtype), [tokens * n for n in rows])
            return [part.view(tokens, n) for part, n in zip(parts, rows, strict=True)]

        return run


def bind(weight: StoredWeight, bias: torch.Tensor | None, threads: int) -> Product:
    """The product of one weight [out, in] and bias [out], for so many threads."""
    return Product(weight, bias, threads)


def dequantize(weight: StoredWeight) -> torch.Tensor:
    """The weight as float32 [out, in], by the native reader of its format."""
    out = torch.empty(weight.shape)
    extension().dequantize(level(), _bind(weight, None), out.data_ptr())
    return out


def _bind(weight: StoredWeight, bias: torch.Tensor | None, *, exact: bool = False) -> Any:
    scheme, scale, zeros = weight.scheme, weight.scale, weight.zero_point
    codes = weight.weight
    assert all(t.device.type == "cpu" and (t.dim() < 2 or t.stride(-1) == 1) for t in weight.tensors())
    inside = scheme.granularity in (Granularity.BLOCK, Granularity.GROUP)
    return extension().weight(
        element=str(scheme.element),
        granularity=str(scheme.granularity),
        scale_type="f32" if scale is None else _SCALE_TYPES[scale.dtype],
        rows=weight.shape[0],
        columns=weight.shape[1],
        block_rows=scheme.rows or 1,
        block_columns=scheme.columns if inside else weight.shape[1],
        first_row=weight.first_row,
        row_bytes=codes.stride(0) * codes.element_size(),
        scale_stride=scale.stride(0) if scale is not None and scale.dim() == 2 else 0,
        zero_stride=0 if zeros is None else zeros.stride(0),
        codes=codes.data_ptr(),
        scales=0 if scale is None else scale.data_ptr(),
        zeros=0 if zeros is None else zeros.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        global_scale=1.0 if weight.global_scale is None else float(weight.global_scale),
        exact=exact,
    )
