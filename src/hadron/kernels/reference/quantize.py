"""Definition of `quantize`: what a declared activation quantization makes of the input of a product.

Quantized and dequantized again, in float32 throughout, groups along the columns of one token, ties to
even. A row or group of zeros gives zeros; NaN makes all NaN that shares a scale taken from it. Static
scales are the file's and saturate. A tensor-wide dynamic scale looks at all tokens given. Source: the
quantizers of Quark 0.13, compressed-tensors 0.19 and ModelOpt 0.47; OCP MX v1.0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from hadron.quantization.dtypes import ELEMENT_MAX, Element
from hadron.quantization.scheme import ActivationScheme, Granularity

#: mantissa bits, and exponent of the smallest normal number
_MINIFLOATS = {Element.E2M1: (1, 0), Element.E2M3: (3, 0), Element.E3M2: (2, -2), Element.E4M3: (3, -6)}
#: exponent of the largest number
_LARGEST = {Element.E2M1: 2, Element.E2M3: 2, Element.E3M2: 4, Element.E4M3: 8}


def quantize(x: torch.Tensor, scheme: ActivationScheme, input_scale: torch.Tensor | None = None) -> torch.Tensor:
    """x [tokens, columns] of any float dtype -> float32 of the same shape, on the scheme's grid.

    input_scale: float32 [], the file's, where the scheme is static (for NVFP4 the global scale).
    """
    wide = x.float()
    element = scheme.element
    if element is None:
        return wide
    if scheme.scale == "e4m3":
        assert scheme.dynamic or input_scale is not None, scheme.name
        return _grouped(wide, scheme.columns, lambda groups: _nvfp4(groups, scheme, input_scale))
    if scheme.scale == "e8m0":
        return _grouped(wide, scheme.columns, lambda groups: _mx(groups, element, scheme.mx_mode))
    limit = ELEMENT_MAX[element]
    if not scheme.dynamic:
        return _scaled(wide, input_scale, element)
    if scheme.granularity is Granularity.TENSOR:
        return _scaled(wide, wide.abs().amax() / limit, element)
    if scheme.granularity is Granularity.CHANNEL:
        return _scaled(wide, _amax(wide) / limit, element)
    return _grouped(wide, scheme.columns, lambda groups: _scaled(groups, _amax(groups) / limit, element))


def bind(scheme: ActivationScheme, input_scale: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """`quantize` for one layer: its own granularity and its own stored scale."""
    return partial(quantize, scheme=scheme, input_scale=input_scale)


def round_to(values: torch.Tensor, element: Element) -> torch.Tensor:
    """The nearest values of a format, ties to the even code, saturating at its largest; NaN stays NaN."""
    limit = ELEMENT_MAX[element]
    if element is Element.INT8:
        return values.round().clamp(-limit - 1, limit)
    mantissa_bits, smallest = _MINIFLOATS[element]
    values = values.clamp(-limit, limit)
    exponent = values.frexp().exponent - 1
    # Steps of a binade are equal; an integer number of them is even where the code is.
    step = torch.ldexp(torch.ones_like(values), exponent.clamp(min=smallest) - mantissa_bits)
    return (values / step).round() * step


def _scaled(x: torch.Tensor, scale: torch.Tensor | None, element: Element) -> torch.Tensor:
    assert scale is not None
    return torch.where(scale == 0, 0.0, round_to(x / scale, element) * scale)


def _amax(x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax(dim=-1, keepdim=True)


def _grouped(x: torch.Tensor, columns: int, convert: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Convert [..., groups, columns]; a short last group is filled up with zeros, which change no scale."""
    width = x.shape[-1]
    padded = functional.pad(x, (0, -width % columns))
    return convert(padded.reshape(*x.shape[:-1], -1, columns)).flatten(-2)[..., :width]


def _mx(groups: torch.Tensor, element: Element, mode: str) -> torch.Tensor:
    """One power of two a group. The modes differ in how its exponent comes from the group's largest."""
    amax = _amax(groups)
    bits = amax.view(torch.int32)
    if mode == "even":  # to the next power of two where the mantissa would round up to it
        bits = bits + (1 << (22 - _MINIFLOATS[element][0]))
    elif mode == "ceil":
        bits = bits + 0x7FFFFF
    else:
        assert mode == "floor", mode
    exponent = ((bits >> 23) - 127 - _LARGEST[element]).clamp(-127, 127)
    scale = torch.ldexp(torch.ones_like(amax), exponent)
    return _scaled(groups, torch.where(amax.isnan(), amax, scale), element)


def _nvfp4(groups: torch.Tensor, scheme: ActivationScheme, stored: torch.Tensor | None) -> torch.Tensor:
    """E4M3 scales under one global scale g, or its reciprocal G (compressed-tensors), which rounds otherwise."""
    largest = ELEMENT_MAX[Element.E2M1]
    amax = _amax(groups)
    if scheme.reciprocal:
        reciprocal = stored if stored is not None else 2688.0 / amax.amax()
        scale = round_to(reciprocal * (amax / largest), Element.E4M3) / reciprocal
    else:
        multiplier = stored if stored is not None else amax.amax() / 2688.0
        scale = round_to(amax / (largest * multiplier), Element.E4M3) * multiplier
    return torch.where(amax == 0, 0.0, _scaled(groups, scale, Element.E2M1))  # g is 0 where all of x is
