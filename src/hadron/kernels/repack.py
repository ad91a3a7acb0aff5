"""Rewriting packed INT4: any order of nibbles in int32 words <-> codes in int8.

Done once a parameter at load, in row blocks of the source so that the peak stays near the size of the
weight. Layouts: `quantization/scheme.py: Packing`. Sources: Quark's and compressed-tensors' files.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

#: slot of a word -> place among its eight, as Quark's `reorder` writes them
INTERLEAVED = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack_words(words: torch.Tensor, *, interleaved: bool = False, offset: bool = False) -> torch.Tensor:
    """int32 [rows, words] -> int8 [rows, words * 8]; two's complement, or minus 8 where `offset`."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    nibbles = ((words.unsqueeze(-1) >> shifts) & 15).to(torch.int8)
    if interleaved:
        nibbles = nibbles[..., [INTERLEAVED.index(place) for place in range(8)]]
    codes = nibbles - 8 if offset else (nibbles ^ 8) - 8
    return codes.flatten(-2)


def unpack_rows(words: torch.Tensor, columns: int, *, interleaved: bool) -> torch.Tensor:
    """Two's-complement int32 [out, ceil(columns/8)] -> int8 [out, columns]."""
    return _by_blocks(words, lambda block: unpack_words(block, interleaved=interleaved))[:, :columns]


def unpack_columns(words: torch.Tensor, rows: int, *, interleaved: bool) -> torch.Tensor:
    """Two's-complement int32 [in, ceil(rows/8)], packed along rows -> int8 [rows, in]."""
    return unpack_rows(words, rows, interleaved=interleaved).T


def pack_rows(codes: torch.Tensor) -> torch.Tensor:
    """int8 [out, in] of -8..7 -> int32 [out, ceil(in/8)]: code j of a word in bits 4j..4j+3, plus 8."""
    if codes.shape[1] % 8:
        codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 8))
    return _by_blocks(codes, _pack)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    nibbles = (codes.reshape(codes.shape[0], -1, 8) + 8).int()
    words = torch.zeros(nibbles.shape[:2], dtype=torch.int32, device=codes.device)
    for slot in range(8):
        words |= nibbles[..., slot] << (4 * slot)
    return words


def _by_blocks(source: torch.Tensor, convert: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    step = max(1, (1 << 22) // max(1, source.shape[1]))
    blocks = [convert(block) for block in torch.split(source, step)]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)
