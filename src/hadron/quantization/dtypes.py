"""Number formats: what safetensors stores and what quantized elements are.

Knows bits and ranges, nothing of scales (`scheme`) or of tensors. Sources: OCP MX v1.0 for E2M1,
E2M3, E3M2, E4M3, E8M0; the safetensors format for the storage names.
"""

from __future__ import annotations

from enum import StrEnum

#: bits of one element of every dtype a safetensors header may name
STORAGE_BITS: dict[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip

#: plain (unquantized) storage dtypes that a parameter may have, and their scheme names
PLAIN: dict[str, str] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


class Element(StrEnum):
    """The number format of one weight or activation element."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    E4M3 = "fp8_e4m3"
    E2M1 = "fp4_e2m1"
    E2M3 = "fp6_e2m3"
    E3M2 = "fp6_e3m2"
    INT8 = "int8"
    INT4 = "int4"


ELEMENT_BITS: dict[Element, int] = {
    Element.F32: 32, Element.F16: 16, Element.BF16: 16, Element.E4M3: 8, Element.E2M1: 4,
    Element.E2M3: 6, Element.E3M2: 6, Element.INT8: 8, Element.INT4: 4,
}  # fmt: skip

#: largest finite magnitude of the quantized formats
ELEMENT_MAX: dict[Element, float] = {
    Element.E4M3: 448.0, Element.E2M1: 6.0, Element.E2M3: 7.5, Element.E3M2: 28.0,
    Element.INT8: 127.0, Element.INT4: 7.0,
}  # fmt: skip
