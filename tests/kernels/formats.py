"""The formats of the published files written out in numpy, as the tests' second opinion.

Encoders take codes, never values: what a code is worth is in tables spelt out here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, np.dtype[Any]]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
E2M3 = np.array(
    [*(i / 8 for i in range(8)), *(1 + i / 8 for i in range(8)), *(2 + i / 4 for i in range(8)),
     *(4 + i / 2 for i in range(8))], np.float32,
)  # fmt: skip
E2M3 = np.concatenate([E2M3, -E2M3])
E3M2 = np.array(
    [0, 0.0625, 0.125, 0.1875, 0.25, 0.3125, 0.375, 0.4375, 0.5, 0.625, 0.75, 0.875, 1, 1.25, 1.5, 1.75,
     2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28], np.float32,
)  # fmt: skip
E3M2 = np.concatenate([E3M2, -E3M2])


def e4m3_value(code: int) -> float:
    """E4M3FN: four exponent bits, bias 7, no infinities; 0x7f and 0xff are NaN."""
    sign, exponent, mantissa = (-1.0 if code & 0x80 else 1.0), (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


E4M3 = np.array([e4m3_value(code) for code in range(256)], np.float32)
E8M0 = np.array([2.0 ** (byte - 127) if byte < 255 else float("nan") for byte in range(256)], np.float32)


def pack_nibbles(codes: Array) -> torch.Tensor:
    """[O, N] of 0..15 -> uint8 [O, N/2], column 2j in the low nibble of byte j."""
    even, odd = codes[:, 0::2], codes[:, 1::2]
    return torch.from_numpy((even | odd << 4).astype(np.uint8))


def pack_sixes(codes: Array) -> torch.Tensor:
    """[O, N] of 0..63 -> uint8 [O, N*6/8], four codes in three bytes, least significant bit first."""
    quads = codes.astype(np.uint32).reshape(codes.shape[0], -1, 4)
    words = quads[..., 0] | quads[..., 1] << 6 | quads[..., 2] << 12 | quads[..., 3] << 18
    triples = np.stack([words & 255, words >> 8 & 255, words >> 16 & 255], axis=-1)
    return torch.from_numpy(triples.astype(np.uint8).reshape(codes.shape[0], -1))


def pack_words(codes: Array, order: tuple[int, ...] = tuple(range(8)), offset: int = 0) -> torch.Tensor:
    """[R, C] of -8..7 -> int32 [R, ceil(C/8)]; slot i of a word is column 8c + order[i]; absent columns are 0."""
    rows, columns = codes.shape
    words = np.zeros((rows, -(-columns // 8)), np.uint32)
    for column in range(columns):
        slot = order.index(column % 8)
        words[:, column // 8] |= ((codes[:, column] + offset).astype(np.uint32) & 15) << np.uint32(4 * slot)
    return torch.from_numpy(words.view(np.int32))


INTERLEAVED = (0, 2, 4, 6, 1, 3, 5, 7)


def fp8(codes: Array) -> torch.Tensor:
    """Bytes as F8_E4M3."""
    return torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn)


def fp8_codes(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Random E4M3 codes without the two NaNs."""
    codes = rng.integers(0, 254, shape)
    return codes + (codes >= 0x7F)


def spread(scale: Array, rows: int, columns: int, shape: tuple[int, int]) -> Array:
    """One value for each block of rows x columns -> one for each element; edge blocks are partial."""
    out = np.empty(shape, np.float32)
    for r in range(shape[0]):
        for c in range(shape[1]):
            out[r, c] = scale[r // rows, c // columns]
    return out
