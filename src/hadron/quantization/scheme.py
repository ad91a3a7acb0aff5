"""`QuantizationScheme` and `ActivationScheme`: the one currency between checkpoint, plan and kernels.

Frozen values, equal when they mean the same numbers, named as `hadron check` prints them. How the
bytes lie in the file (packing order, transposition, reciprocal scales) is not part of a scheme: that
is `Storage`, because two dialects may store one scheme differently.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from hadron.quantization.dtypes import ELEMENT_BITS, Element


class Granularity(StrEnum):
    """How many elements share one scale."""

    NONE = "none"
    TENSOR = "tensor"
    CHANNEL = "channel"  # one scale per output row
    BLOCK = "block"  # rows x columns
    GROUP = "group"  # `columns` consecutive columns of one row


@dataclass(frozen=True, slots=True)
class QuantizationScheme:
    """How the values of a weight [out, in] are represented.

    element: format of one code. granularity, rows, columns: extent of one scale (block: rows x
    columns; group: columns). scale: "float" (F32/BF16/F16 storage), "e8m0" or "e4m3".
    global_scale: a second, per-tensor float scale multiplies the first (NVFP4).
    zero_point: codes are offset by stored zero points. fp8_stage: Quark's two-stage INT4, whose
    codes times `scale` are FP8 values with a per-tensor scale of their own, in role `global_scale`.
    """

    element: Element
    granularity: Granularity = Granularity.NONE
    rows: int = 0
    columns: int = 0
    scale: str = ""
    global_scale: bool = False
    zero_point: bool = False
    fp8_stage: bool = False

    @property
    def name(self) -> str:
        """The name `hadron check` prints, e.g. `fp8_e4m3_block_128x128`."""
        return _name(self)

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return ELEMENT_BITS[self.element]

    @property
    def quantized(self) -> bool:
        """Whether codes need a scale to become values."""
        return self.granularity is not Granularity.NONE


F32 = QuantizationScheme(Element.F32)
F16 = QuantizationScheme(Element.F16)
BF16 = QuantizationScheme(Element.BF16)
FP8_TENSOR = QuantizationScheme(Element.E4M3, Granularity.TENSOR, scale="float")
FP8_CHANNEL = QuantizationScheme(Element.E4M3, Granularity.CHANNEL, scale="float")
MXFP4 = QuantizationScheme(Element.E2M1, Granularity.GROUP, columns=32, scale="e8m0")
MXFP6_E2M3 = QuantizationScheme(Element.E2M3, Granularity.GROUP, columns=32, scale="e8m0")
MXFP6_E3M2 = QuantizationScheme(Element.E3M2, Granularity.GROUP, columns=32, scale="e8m0")
MXFP8 = QuantizationScheme(Element.E4M3, Granularity.GROUP, columns=32, scale="e8m0")
NVFP4 = QuantizationScheme(Element.E2M1, Granularity.GROUP, columns=16, scale="e4m3", global_scale=True)
INT8_TENSOR = QuantizationScheme(Element.INT8, Granularity.TENSOR, scale="float")
INT8_CHANNEL = QuantizationScheme(Element.INT8, Granularity.CHANNEL, scale="float")
INT4_CHANNEL_FP8 = QuantizationScheme(Element.INT4, Granularity.CHANNEL, scale="float", fp8_stage=True)


@cache
def fp8_block(rows: int, columns: int) -> QuantizationScheme:
    """FP8 E4M3 with one float scale per block of rows x columns; edge blocks are partial."""
    return QuantizationScheme(Element.E4M3, Granularity.BLOCK, rows=rows, columns=columns, scale="float")


@cache
def int4_channel(zero_point: bool) -> QuantizationScheme:
    """INT4 with one float scale per output row."""
    return QuantizationScheme(Element.INT4, Granularity.CHANNEL, scale="float", zero_point=zero_point)


@cache
def int4_group(columns: int, zero_point: bool) -> QuantizationScheme:
    """INT4 with one float scale per `columns` consecutive columns of a row."""
    return QuantizationScheme(Element.INT4, Granularity.GROUP, columns=columns, scale="float", zero_point=zero_point)


_FIXED: dict[str, QuantizationScheme] = {
    "f32": F32, "f16": F16, "bf16": BF16,
    "fp8_e4m3_tensor": FP8_TENSOR, "fp8_e4m3_channel": FP8_CHANNEL,
    "mxfp4": MXFP4, "mxfp6_e2m3": MXFP6_E2M3, "mxfp6_e3m2": MXFP6_E3M2, "mxfp8_e4m3": MXFP8,
    "nvfp4": NVFP4, "int8_tensor": INT8_TENSOR, "int8_channel": INT8_CHANNEL,
    "int4_channel": int4_channel(False), "int4_channel_asym": int4_channel(True),
    "int4_channel_fp8": INT4_CHANNEL_FP8,
}  # fmt: skip
_NAMES = {scheme: name for name, scheme in _FIXED.items()}
_BLOCK = re.compile(r"fp8_e4m3_block_(\d+)x(\d+)")
_GROUP = re.compile(r"int4_group_(\d+)(_asym)?")


@cache
def _name(scheme: QuantizationScheme) -> str:
    if scheme in _NAMES:
        return _NAMES[scheme]
    if scheme.granularity is Granularity.BLOCK:
        return f"{scheme.element}_block_{scheme.rows}x{scheme.columns}"
    return f"{scheme.element}_group_{scheme.columns}" + ("_asym" if scheme.zero_point else "")


@cache
def parse_scheme(name: str) -> QuantizationScheme:
    """The scheme a printed name stands for; `ValueError` for any other text."""
    if name in _FIXED:
        return _FIXED[name]
    if match := _BLOCK.fullmatch(name):
        return fp8_block(int(match[1]), int(match[2]))
    if match := _GROUP.fullmatch(name):
        return int4_group(int(match[1]), match[2] is not None)
    raise ValueError(f"{name!r} is not a scheme name")


@dataclass(frozen=True, slots=True)
class ActivationScheme:
    """What a checkpoint declares for the input of a linear layer.

    name: as printed (`none`, `fp8_e4m3_token_dynamic`, …). granularity: TENSOR, CHANNEL (here: one
    scale per token) or GROUP of `columns`. dynamic: the scale comes from the input; otherwise from
    the file. mx_mode: how an E8M0 scale is chosen (`even`, `floor`, `ceil`). reciprocal: the stored
    global scale is divided by (compressed-tensors), which rounds differently from multiplying.
    """

    element: Element | None = None
    granularity: Granularity = Granularity.NONE
    columns: int = 0
    scale: str = ""
    dynamic: bool = False
    mx_mode: str = "even"
    reciprocal: bool = False

    @property
    def name(self) -> str:
        """The name `hadron check` prints."""
        return _activation_name(self)


NO_ACTIVATION = ActivationScheme()


@cache
def _activation_name(scheme: ActivationScheme) -> str:
    if scheme.element is None:
        return "none"
    when = "dynamic" if scheme.dynamic else "static"
    if scheme.scale == "e4m3":
        return f"nvfp4_{when}"
    if scheme.scale == "e8m0":
        base = {Element.E2M1: "mxfp4", Element.E2M3: "mxfp6_e2m3", Element.E3M2: "mxfp6_e3m2"}
        return f"{base.get(scheme.element, 'mxfp8_e4m3')}_{when}"
    extent = {Granularity.TENSOR: "tensor", Granularity.CHANNEL: "token"}.get(
        scheme.granularity, f"group{scheme.columns}"
    )
    return f"{scheme.element}_{extent}_{when}"


class Packing(StrEnum):
    """How the codes of a weight [O, N] lie in their tensor."""

    ROW_MAJOR = "row_major"
    """[O, N] for 8, 16 and 32 bits; [O, N*bits/8] bytes, least significant bits first, below 8."""
    INT4_ROWS = "int4_rows"
    """I32 [O, N/8]: code j of a word in bits 4j..4j+3, stored plus 8."""
    INT4_ROWS_SIGNED = "int4_rows_signed"
    """I32 [O, N/8]: as INT4_ROWS in two's complement."""
    INT4_ROWS_INTERLEAVED = "int4_rows_interleaved"
    """I32 [O, N/8]: slots hold columns 0, 2, 4, 6, 1, 3, 5, 7 of their eight, two's complement."""
    INT4_COLUMNS = "int4_columns"
    """I32 [N, O/8]: transposed; slot i of word c is row 8c+i, two's complement."""
    INT4_COLUMNS_INTERLEAVED = "int4_columns_interleaved"
    """As INT4_COLUMNS with slots holding rows 0, 2, 4, 6, 1, 3, 5, 7; scales and zero points transposed."""


@dataclass(frozen=True, slots=True)
class Storage:
    """How one dialect lays out a scheme. Roles of tensors: `weight`, `scale`, `global_scale`,
    `zero_point`, `input_scale` (see `checkpoint/identify.py`).

    packing: see `Packing`. global_scale_divides: the stored global scale (weight and input) is the
    reciprocal of the multiplier. converts: the CPU cannot multiply from it in place; it is
    rewritten once at load.
    """

    packing: Packing = Packing.ROW_MAJOR
    global_scale_divides: bool = False

    @property
    def converts(self) -> bool:
        """Whether the bytes are rewritten once at load."""
        return self.packing not in (Packing.ROW_MAJOR, Packing.INT4_ROWS)


PLAIN_STORAGE = Storage()
