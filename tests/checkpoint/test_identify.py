"""A weight's scheme from dtypes, companions and shapes alone, square and partial ones included."""

from __future__ import annotations

import pytest

from hadron.checkpoint.facts import Tensor
from hadron.checkpoint.identify import identify
from hadron.quantization.scheme import Packing, QuantizationScheme, parse_scheme

#: what Quark's in-memory export stores beside a square INT4 weight
IN_MEMORY = "weight I32 256x32, weight_scale BF16 8x256, weight_zero_point I32 8x32"


def parse(beside: str) -> dict[str, Tensor]:
    """`weight F8_E4M3 64x32, weight_scale F32` -> suffix -> tensor."""
    found = {}
    for part in beside.split(", "):
        suffix, dtype, *shape = part.split()
        found[suffix] = Tensor(dtype, tuple(int(n) for n in shape[0].split("x")) if shape else (), (0, 0))
    return found


def named(name: str | None) -> QuantizationScheme | None:
    return parse_scheme(name) if name else None


@pytest.mark.parametrize(
    ("shape", "beside", "hint", "expected"),
    [
        ((64, 32), "weight BF16 64x32", None, "bf16"),
        ((64, 32), "weight BF16 64x32", "mxfp4", "bf16"),  # the file decides
        ((8,), "weight F32 8", None, "f32"),
        # FP8: granularity from the scale's shape
        ((256, 256), "weight F8_E4M3 256x256, weight_scale_inv F32 2x2", None, "fp8_e4m3_block_128x128"),
        ((256, 256), "weight F8_E4M3 256x256, weight_scale F32 2x2", "mxfp4", "fp8_e4m3_block_128x128"),
        ((192, 256), "weight F8_E4M3 192x256, weight_scale_inv F32 2x2", None, "fp8_e4m3_block_128x128"),
        ((64, 64), "weight F8_E4M3 64x64, weight_scale F32 1x1", None, "fp8_e4m3_block_128x128"),
        ((64, 64), "weight F8_E4M3 64x64, weight_scale F32", None, "fp8_e4m3_tensor"),
        ((64, 64), "weight F8_E4M3 64x64, weight_scale BF16 1", None, "fp8_e4m3_tensor"),
        ((256, 256), "weight F8_E4M3 256x256, weight_scale F32 4x4", None, "fp8_e4m3_block_64x64"),
        ((256, 256), "weight F8_E4M3 256x256, weight_scale F32 4x2", "fp8_e4m3_block_64x128", "fp8_e4m3_block_64x128"),
        ((128, 128), "weight F8_E4M3 128x128, weight_scale F32 128", None, "fp8_e4m3_channel"),
        ((128, 128), "weight F8_E4M3 128x128, weight_scale F32 128x1", None, "fp8_e4m3_channel"),
        ((128, 128), "weight F8_E4M3 128x128, weight_scale U8 128x4", None, "mxfp8_e4m3"),
        # packed floats
        ((64, 96), "weight U8 64x48, weight_scale U8 64x3", None, "mxfp4"),
        ((64, 96), "weight_packed U8 64x48, weight_scale U8 64x3", None, "mxfp4"),
        ((64, 80), "weight U8 64x40, weight_scale U8 64x3", None, "mxfp4"),
        ((64, 96), "weight U8 64x72, weight_scale U8 64x3", "mxfp6_e2m3", "mxfp6_e2m3"),
        ((64, 96), "weight U8 64x72, weight_scale U8 64x3", "mxfp6_e3m2", "mxfp6_e3m2"),
        ((64, 96), "weight U8 64x48, weight_scale F8_E4M3 64x6, weight_scale_2 F32", None, "nvfp4"),
        # integers
        ((64, 32), "weight I8 64x32, weight_scale F32", None, "int8_tensor"),
        ((64, 32), "weight I8 64x32, weight_scale F32 64", None, "int8_channel"),
        ((64, 32), "weight I8 64x32, weight_scale F32 64x1", "int8_tensor", "int8_channel"),
        ((64, 256), "weight_packed I32 64x32, weight_scale BF16 64x2, weight_shape I64 2", None, "int4_group_128"),
        ((64, 128), "weight_packed I32 64x16, weight_scale BF16 64x1", "int4_group_128", "int4_group_128"),
        ((64, 128), "weight_packed I32 64x16, weight_scale BF16 64x1", None, "int4_channel"),
        ((64, 64), "weight_packed I32 64x8, weight_scale BF16 64x2, weight_zero_point I32 8x2", None, "int4_group_32_asym"),
    ],
)  # fmt: skip
def test_the_scheme_comes_from_what_lies_side_by_side(
    shape: tuple[int, ...], beside: str, hint: str | None, expected: str
) -> None:
    found = identify(shape, parse(beside), named(hint))
    assert found.fault is None and found.scheme is not None
    assert found.scheme.name == expected
    assert found.leftovers == ()
    assert {suffix for _, suffix in found.roles} == set(parse(beside))


@pytest.mark.parametrize(
    ("beside", "hint", "expected", "packing"),
    [
        # square [256, 256]: the transposed words [256, 32] have the shape of untransposed ones
        ("weight I32 256x32, weight_scale F32 256x8", "int4_group_32", "int4_group_32", Packing.INT4_COLUMNS),
        ("weight I32 256x32, weight_scale F32 256x8", None, "int4_group_32", Packing.INT4_COLUMNS),
        (IN_MEMORY, "int4_group_32", "int4_group_32", Packing.INT4_COLUMNS_INTERLEAVED),
        (IN_MEMORY, "int4_group_32_asym", "int4_group_32_asym", Packing.INT4_COLUMNS_INTERLEAVED),
        ("weight I32 256x32, weight_scale F32 256", None, "int4_channel", Packing.INT4_ROWS_SIGNED),
        ("weight I32 256x32, weight_scale F32, weight_scale_2 F32 256", None, "int4_channel_fp8", Packing.INT4_ROWS_INTERLEAVED),
        ("weight_packed I32 256x32, weight_scale F32 256x8", None, "int4_group_32", Packing.INT4_ROWS),
    ],
)  # fmt: skip
def test_square_int4_weights_are_told_apart(beside: str, hint: str | None, expected: str, packing: Packing) -> None:
    found = identify((256, 256), parse(beside), named(hint))
    assert found.scheme is not None and found.scheme.name == expected
    assert found.storage.packing is packing


def test_the_two_stage_scale_of_int4_is_the_per_channel_one() -> None:
    """`weight_scale` is the FP8 stage's scalar, `weight_scale_2` one scale a row: roles name what they do."""
    beside = "weight I32 64x4, weight_scale F32, weight_scale_2 F32 64"
    roles = dict(identify((64, 32), parse(beside), None).roles)
    assert roles == {"weight": "weight", "scale": "weight_scale_2", "global_scale": "weight_scale"}


def test_br25_the_global_scale_is_divided_by_only_under_its_own_name() -> None:
    ours = identify((64, 32), parse("weight U8 64x16, weight_scale F8_E4M3 64x2, weight_scale_2 F32"), None)
    beside = "weight_packed U8 64x16, weight_scale F8_E4M3 64x2, weight_global_scale F32 1"
    theirs = identify((64, 32), parse(beside), None)
    assert ours.scheme == theirs.scheme
    assert (ours.storage.global_scale_divides, theirs.storage.global_scale_divides) == (False, True)


@pytest.mark.parametrize(
    ("shape", "beside", "hint", "code", "words"),
    [
        ((64, 32), "weight BF16 64x16", None, "HC303", "BF16 [64, 16]"),
        ((64, 32), "weight F8_E4M3 64x32", None, "HC304", "without a scale"),
        ((64, 32), "weight F8_E4M3 64x32, weight_scale F32 7", None, "HC404", "scale F32 [7]"),
        ((64, 32), "weight F8_E4M3 32x64, weight_scale F32", None, "HC303", "F8_E4M3 [32, 64]"),
        ((64, 96), "weight U8 64x72, weight_scale U8 64x3", None, "HC404", "6-bit codes"),
        ((64, 96), "weight U8 64x48, weight_scale U8 64x6", None, "HC404", "scale U8 [64, 6]"),
        ((64, 96), "weight U8 64x48, weight_scale F8_E4M3 64x6", None, "HC304", "no global scale"),
        ((64, 32), "weight I8 64x32, weight_scale F32 3", None, "HC404", "F32 [3]"),
        ((64, 32), "weight I64 64x32", None, "HC404", "I64 [64, 32]"),
        ((64, 32), "weight_scale F32", None, "HC301", "weight_scale"),
        ((64,), "weight F8_E4M3 64, weight_scale F32", None, "HC405", "F8_E4M3 [64]"),
        ((64, 32), "weight_packed I32 64x8, weight_scale F32 64", None, "HC404", "4-bit codes"),
        # companions that a kernel would read as something else
        ((64, 32), "weight BF16 64x32, bias BF16 1", None, "HC303", "a bias BF16 [1]"),
        ((64,), "weight BF16 64, bias I64 64", None, "HC303", "a bias I64 [64]"),
        ((64, 32), "weight F8_E4M3 64x32, weight_scale F32, input_scale I64 2", None, "HC404", "input scale I64 [2]"),
        ((64, 32), "weight F8_E4M3 64x32, weight_scale F32, input_scale F32 64", None, "HC404", "one F32, F16 or BF16"),
        ((64, 64), "weight_packed I32 64x8, weight_scale BF16 64x2, weight_zero_point I8 8x2", None, "HC404", "zero points I8"),
        ((64, 64), "weight_packed I32 64x8, weight_scale BF16 64x2, weight_zero_point I32 3", None, "HC404", "I32 [8, 2]"),
        ((256, 256), IN_MEMORY.replace("8x32", "1x3"), "int4_group_32", "HC404", "I32 [8, 32]"),
        ((64, 64), "weight_packed I32 64x8, weight_scale BF16 64x2, weight_shape F32 7", None, "HC404", "weight_shape F32"),
    ],
)  # fmt: skip
def test_what_fits_nothing_is_refused_with_both_sides(
    shape: tuple[int, ...], beside: str, hint: str | None, code: str, words: str
) -> None:
    found = identify(shape, parse(beside), named(hint))
    assert found.scheme is None and found.fault is not None
    assert found.fault.code == code
    assert words in f"{found.fault.found} {found.fault.accepted}"


def test_br16_a_scale_beside_a_plain_weight_is_left_over() -> None:
    found = identify((64, 32), parse("weight BF16 64x32, weight_scale_inv F32 1x1"), None)
    assert found.leftovers == ("weight_scale_inv",)
