"""Definition of every weight scheme: stored codes and scales -> float32 [out, in].

A code's value times its scale, in float32; codes that are NaN stay NaN. Sources: OCP MX v1.0
(E2M1, E2M3, E3M2, E4M3, E8M0), the files of Quark, ModelOpt and compressed-tensors.
"""

from __future__ import annotations

from functools import cache

import torch

from hadron.kernels.repack import unpack_words
from hadron.kernels.stored import StoredWeight
from hadron.quantization.dtypes import Element
from hadron.quantization.scheme import Granularity, Packing

#: exponent bits, mantissa bits and exponent bias of the formats below one byte
_MINIFLOATS = {Element.E2M1: (2, 1, 1), Element.E2M3: (2, 3, 1), Element.E3M2: (3, 2, 3)}


def dequantize(weight: StoredWeight) -> torch.Tensor:
    """The weight as float32 [out, in]."""
    out, codes = weight.shape[0], _codes(weight)
    if weight.scale is None:
        return codes
    scale = scale_values(weight.scale)
    if weight.zero_point is not None:
        codes = codes - _per_column(weight, _zero_points(weight))
    if weight.global_scale is not None:
        scale = scale * weight.global_scale
    if weight.scheme.granularity is Granularity.BLOCK:
        scale = scale.repeat_interleave(weight.scheme.rows, dim=0)[weight.first_row : weight.first_row + out]
    return codes * _per_column(weight, scale)


def scale_values(scale: torch.Tensor) -> torch.Tensor:
    """Scales as float32; uint8 is E8M0: 2^(byte-127), where byte 0 is 2^-127 and 255 is NaN."""
    if scale.dtype is torch.uint8:
        return _e8m0_table(scale.device)[scale.int()]
    return scale.float()


def _per_column(weight: StoredWeight, values: torch.Tensor) -> torch.Tensor:
    """Spread one value a group (or block) of columns over its columns; the last may be partial."""
    scheme, columns = weight.scheme, weight.shape[1]
    if scheme.granularity in (Granularity.TENSOR, Granularity.CHANNEL):
        return values
    return values.repeat_interleave(scheme.columns, dim=1)[:, :columns]


def _zero_points(weight: StoredWeight) -> torch.Tensor:
    """float32 [out, groups]."""
    assert weight.zero_point is not None
    codes = unpack_words(weight.zero_point.T, offset=True).T.float()
    return codes[weight.first_row : weight.first_row + weight.shape[0]]


def _codes(weight: StoredWeight) -> torch.Tensor:
    """Codes as float32 [out, in], without any scale."""
    element, stored, columns = weight.scheme.element, weight.weight, weight.shape[1]
    if weight.packing is Packing.INT4_ROWS:
        return unpack_words(stored, offset=True)[:, :columns].float()
    if element in (Element.E2M1, Element.INT4):
        table = _pair_table(element, stored.device)
        return table[stored.int()].flatten(-2)[:, :columns]
    if element in (Element.E2M3, Element.E3M2):
        triples = stored.reshape(stored.shape[0], -1, 3).int()
        words = triples[..., 0] | triples[..., 1] << 8 | triples[..., 2] << 16
        shifts = torch.arange(0, 24, 6, dtype=torch.int32, device=stored.device)
        codes = (words.unsqueeze(-1) >> shifts) & 63
        return _minifloat_table(element, stored.device)[codes].flatten(-2)[:, :columns]
    return stored.float()


@cache
def _minifloat_table(element: Element, device: torch.device) -> torch.Tensor:
    """float32 value of every code: sign, exponent, mantissa from the top; no infinities and no NaN."""
    exponent_bits, mantissa_bits, bias = _MINIFLOATS[element]
    values = []
    for code in range(1 << (1 + exponent_bits + mantissa_bits)):
        sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
        exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
        mantissa = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
        leading, power = (1.0, exponent - bias) if exponent else (0.0, 1 - bias)
        values.append(sign * (leading + mantissa) * 2.0**power)
    return torch.tensor(values, dtype=torch.float32, device=device)


@cache
def _pair_table(element: Element, device: torch.device) -> torch.Tensor:
    """float32 [256, 2]: the two codes of a byte, the low nibble first."""
    if element is Element.INT4:
        nibbles = torch.tensor([*range(8), *range(-8, 0)], dtype=torch.float32, device=device)
    else:
        nibbles = _minifloat_table(element, device)
    byte = torch.arange(256, device=device)
    return torch.stack((nibbles[byte & 15], nibbles[byte >> 4]), dim=1)


@cache
def _e8m0_table(device: torch.device) -> torch.Tensor:
    return torch.tensor([2.0 ** (byte - 127) for byte in range(255)] + [float("nan")], device=device)
