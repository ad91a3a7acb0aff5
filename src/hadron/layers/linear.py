"""`Linear`: a weight in its stored scheme, the kernel that multiplies by it, and nothing else.

Binding happens once, when the layer is built. Activation emulation is part of the layer, so that its
granularity is always the layer's own and never its neighbour's.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

import torch

from hadron.kernels.reference.dequantize import dequantize
from hadron.kernels.select import KernelChoice
from hadron.kernels.stored import StoredWeight
from hadron.layers.weights import LinearLike

Product = Callable[[torch.Tensor], torch.Tensor]


class Linear:
    """x @ weight.T + bias. weight: views of the checkpoint. kernel: the plan's choice for this module.

    bias: [out] or None. quantize: what the declared activation quantization makes of x, or None to
    leave it alone. threads: of native kernels. `run` is the bound product, without `quantize`.
    """

    __slots__ = ("_quantize", "run", "weight")

    def __init__(
        self,
        weight: StoredWeight,
        kernel: KernelChoice,
        *,
        bias: torch.Tensor | None = None,
        quantize: Product | None = None,
        threads: int = 1,
    ) -> None:
        self.weight = weight
        self._quantize = quantize
        self.run = bind(kernel, weight, bias, threads)

    @property
    def quantizes(self) -> bool:
        """Whether x goes through the declared activation quantization first."""
        return self._quantize is not None

    @property
    def in_features(self) -> int:
        """Columns of the weight."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        """Rows of the weight."""
        return self.weight.shape[0]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, in] -> [tokens, out] in x's dtype."""
        return self.run(x if self._quantize is None else self._quantize(x)).to(x.dtype)

    def dequantized(self) -> torch.Tensor:
        """The weight as float32 [out, in], by the reference definition."""
        return dequantize(self.weight)


def exact(product: LinearLike) -> LinearLike | Product:
    """The product that does not round its activations, where what the kernel bound has one; else itself."""
    make: Callable[[], Product] | None = getattr(getattr(product, "run", None), "exact", None)
    return product if make is None else make()


class Linears:
    """Products that a layer needs at the same time, in one call where their kernel can: a bound product whose
    class has `group` runs together with others of that class."""

    def __init__(self, products: Sequence[LinearLike | Product]) -> None:
        self._products = products
        self._run: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None = None
        bound = [p.run if isinstance(p, Linear) and not p.quantizes else p for p in products]
        kinds = {type(p) for p in bound}
        group = getattr(kinds.pop(), "group", None) if len(kinds) == 1 else None
        if group is not None:
            self._run = group(bound)

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """inputs [tokens, in] of one dtype: one for each product, or one for all -> [tokens, out] of each."""
        given = inputs * len(self._products) if len(inputs) == 1 else inputs
        assert len({x.dtype for x in inputs}) == 1, "products that run together take one dtype"
        if self._run is not None:
            return self._run(given)
        return [product(x) for product, x in zip(self._products, given, strict=True)]


def bind(kernel: KernelChoice, weight: StoredWeight, bias: torch.Tensor | None, threads: int) -> Product:
    """The kernel's function, bound to one weight: x [tokens, in] -> float32 [tokens, out]."""
    module, _, function = kernel.path.rpartition(".")
    product: Product = getattr(importlib.import_module(module), function)(weight, bias, threads)
    return product
