"""A weight's scheme from dtypes, companions and shapes alone, square and partial ones included."""

from __future__ import annotations

import pytest

from hadron.checkpoint.facts import Tensor
from hadron.checkpoint.identify import identify
from hadron.quantization.scheme import Packing, QuantizationScheme, parse_scheme


def tensor(dtype: str, *shape: int) -> Tensor:
    return Tensor(dtype, shape, (0, 0))


def named(name: str | None) -> QuantizationScheme | None:
    return parse_scheme(name) if name else None


F8, U8, F32, BF16 = "F8_E4M3", "U8", "F32", "BF16"


@pytest.mark.parametrize(
    ("shape", "beside", "hint", "expected"),
    [
        ((64, 32), {"weight": tensor(BF16, 64, 32)}, None, "bf16"),
        ((64, 32), {"weight": tensor(BF16, 64, 32)}, "mxfp4", "bf16"),  # the file decides
        ((8,), {"weight": tensor(F32, 8)}, None, "f32"),
        # FP8: granularity from the scale's shape
        ((256, 256), {"weight": tensor(F8, 256, 256), "weight_scale_inv": tensor(F32, 2, 2)}, None, "fp8_e4m3_block_128x128"),
        ((256, 256), {"weight": tensor(F8, 256, 256), "weight_scale": tensor(F32, 2, 2)}, "mxfp4", "fp8_e4m3_block_128x128"),
        ((192, 256), {"weight": tensor(F8, 192, 256), "weight_scale_inv": tensor(F32, 2, 2)}, None, "fp8_e4m3_block_128x128"),
        ((64, 64), {"weight": tensor(F8, 64, 64), "weight_scale": tensor(F32, 1, 1)}, None, "fp8_e4m3_block_128x128"),
        ((64, 64), {"weight": tensor(F8, 64, 64), "weight_scale": tensor(F32)}, None, "fp8_e4m3_tensor"),
        ((64, 64), {"weight": tensor(F8, 64, 64), "weight_scale": tensor(BF16, 1)}, None, "fp8_e4m3_tensor"),
        ((256, 256), {"weight": tensor(F8, 256, 256), "weight_scale": tensor(F32, 4, 4)}, None, "fp8_e4m3_block_64x64"),
        ((256, 256), {"weight": tensor(F8, 256, 256), "weight_scale": tensor(F32, 4, 2)}, "fp8_e4m3_block_64x128", "fp8_e4m3_block_64x128"),
        ((128, 128), {"weight": tensor(F8, 128, 128), "weight_scale": tensor(F32, 128)}, None, "fp8_e4m3_channel"),
        ((128, 128), {"weight": tensor(F8, 128, 128), "weight_scale": tensor(F32, 128, 1)}, None, "fp8_e4m3_channel"),
        ((128, 128), {"weight": tensor(F8, 128, 128), "weight_scale": tensor(U8, 128, 4)}, None, "mxfp8_e4m3"),
        # packed floats
        ((64, 96), {"weight": tensor(U8, 64, 48), "weight_scale": tensor(U8, 64, 3)}, None, "mxfp4"),
        ((64, 96), {"weight_packed": tensor(U8, 64, 48), "weight_scale": tensor(U8, 64, 3)}, None, "mxfp4"),
        ((64, 80), {"weight": tensor(U8, 64, 40), "weight_scale": tensor(U8, 64, 3)}, None, "mxfp4"),
        ((64, 96), {"weight": tensor(U8, 64, 72), "weight_scale": tensor(U8, 64, 3)}, "mxfp6_e2m3", "mxfp6_e2m3"),
        ((64, 96), {"weight": tensor(U8, 64, 72), "weight_scale": tensor(U8, 64, 3)}, "mxfp6_e3m2", "mxfp6_e3m2"),
        ((64, 96), {"weight": tensor(U8, 64, 48), "weight_scale": tensor(F8, 64, 6), "weight_scale_2": tensor(F32)}, None, "nvfp4"),
        # integers
        ((64, 32), {"weight": tensor("I8", 64, 32), "weight_scale": tensor(F32)}, None, "int8_tensor"),
        ((64, 32), {"weight": tensor("I8", 64, 32), "weight_scale": tensor(F32, 64)}, None, "int8_channel"),
        ((64, 32), {"weight": tensor("I8", 64, 32), "weight_scale": tensor(F32, 64, 1)}, "int8_tensor", "int8_channel"),
        ((64, 256), {"weight_packed": tensor("I32", 64, 32), "weight_scale": tensor(BF16, 64, 2), "weight_shape": tensor("I64", 2)}, None, "int4_group_128"),
        ((64, 128), {"weight_packed": tensor("I32", 64, 16), "weight_scale": tensor(BF16, 64, 1)}, "int4_group_128", "int4_group_128"),
        ((64, 128), {"weight_packed": tensor("I32", 64, 16), "weight_scale": tensor(BF16, 64, 1)}, None, "int4_channel"),
        ((64, 256), {"weight_packed": tensor("I32", 64, 32), "weight_scale": tensor(BF16, 64, 2), "weight_zero_point": tensor("I32", 8, 2)}, None, "int4_group_128_asym"),
    ],
)  # fmt: skip
def test_the_scheme_comes_from_what_lies_side_by_side(
    shape: tuple[int, ...], beside: dict[str, Tensor], hint: str | None, expected: str
) -> None:
    found = identify(shape, beside, named(hint))
    assert found.fault is None and found.scheme is not None
    assert found.scheme.name == expected
    assert found.leftovers == ()
    assert {suffix for _, suffix in found.roles} == set(beside)


@pytest.mark.parametrize(
    ("beside", "hint", "expected", "packing"),
    [
        # square [256, 256]: the transposed words [256, 32] have the shape of untransposed ones
        ({"weight": tensor("I32", 256, 32), "weight_scale": tensor(F32, 256, 8)}, "int4_group_32", "int4_group_32", Packing.INT4_COLUMNS),
        ({"weight": tensor("I32", 256, 32), "weight_scale": tensor(F32, 256, 8)}, None, "int4_group_32", Packing.INT4_COLUMNS),
        ({"weight": tensor("I32", 256, 32), "weight_scale": tensor(BF16, 8, 256), "weight_zero_point": tensor("I32", 8, 32)}, "int4_group_32", "int4_group_32", Packing.INT4_COLUMNS_INTERLEAVED),
        ({"weight": tensor("I32", 256, 32), "weight_scale": tensor(BF16, 8, 256), "weight_zero_point": tensor("I32", 8, 32)}, "int4_group_32_asym", "int4_group_32_asym", Packing.INT4_COLUMNS_INTERLEAVED),
        ({"weight": tensor("I32", 256, 32), "weight_scale": tensor(F32, 256)}, None, "int4_channel", Packing.INT4_ROWS_SIGNED),
        ({"weight": tensor("I32", 256, 32), "weight_scale": tensor(F32), "weight_scale_2": tensor(F32, 256)}, None, "int4_channel_fp8", Packing.INT4_ROWS_INTERLEAVED),
        ({"weight_packed": tensor("I32", 256, 32), "weight_scale": tensor(F32, 256, 8)}, None, "int4_group_32", Packing.INT4_ROWS),
    ],
)  # fmt: skip
def test_square_int4_weights_are_told_apart(
    beside: dict[str, Tensor], hint: str | None, expected: str, packing: Packing
) -> None:
    found = identify((256, 256), beside, named(hint))
    assert found.scheme is not None and found.scheme.name == expected
    assert found.storage.packing is packing


def test_the_two_stage_scale_of_int4_is_the_per_channel_one() -> None:
    """`weight_scale` is the FP8 stage's scalar, `weight_scale_2` one scale a row: roles name what they do."""
    beside = {"weight": tensor("I32", 64, 4), "weight_scale": tensor(F32), "weight_scale_2": tensor(F32, 64)}
    roles = dict(identify((64, 32), beside, None).roles)
    assert roles == {"weight": "weight", "scale": "weight_scale_2", "global_scale": "weight_scale"}


def test_br25_the_global_scale_is_divided_by_only_under_its_own_name() -> None:
    packed, scale = tensor(U8, 64, 16), tensor(F8, 64, 2)
    ours = identify((64, 32), {"weight": packed, "weight_scale": scale, "weight_scale_2": tensor(F32)}, None)
    theirs = identify(
        (64, 32), {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": tensor(F32, 1)}, None
    )
    assert ours.scheme == theirs.scheme
    assert (ours.storage.global_scale_divides, theirs.storage.global_scale_divides) == (False, True)


@pytest.mark.parametrize(
    ("shape", "beside", "hint", "code", "words"),
    [
        ((64, 32), {"weight": tensor(BF16, 64, 16)}, None, "HC303", "BF16 [64, 16]"),
        ((64, 32), {"weight": tensor(F8, 64, 32)}, None, "HC304", "without a scale"),
        ((64, 32), {"weight": tensor(F8, 64, 32), "weight_scale": tensor(F32, 7)}, None, "HC404", "scale F32 [7]"),
        ((64, 32), {"weight": tensor(F8, 32, 64), "weight_scale": tensor(F32)}, None, "HC303", "F8_E4M3 [32, 64]"),
        ((64, 96), {"weight": tensor(U8, 64, 72), "weight_scale": tensor(U8, 64, 3)}, None, "HC404", "6-bit codes"),
        ((64, 96), {"weight": tensor(U8, 64, 48), "weight_scale": tensor(U8, 64, 6)}, None, "HC404", "scale U8 [64, 6]"),
        ((64, 96), {"weight": tensor(U8, 64, 48), "weight_scale": tensor(F8, 64, 6)}, None, "HC304", "no global scale"),
        ((64, 32), {"weight": tensor("I8", 64, 32), "weight_scale": tensor(F32, 3)}, None, "HC404", "F32 [3]"),
        ((64, 32), {"weight": tensor("I64", 64, 32)}, None, "HC404", "I64 [64, 32]"),
        ((64, 32), {"weight_scale": tensor(F32)}, None, "HC301", "weight_scale"),
        ((64,), {"weight": tensor(F8, 64), "weight_scale": tensor(F32)}, None, "HC405", "F8_E4M3 [64]"),
        ((64, 32), {"weight_packed": tensor("I32", 64, 8), "weight_scale": tensor(F32, 64)}, None, "HC404", "4-bit codes"),
    ],
)  # fmt: skip
def test_what_fits_nothing_is_refused_with_both_sides(
    shape: tuple[int, ...], beside: dict[str, Tensor], hint: str | None, code: str, words: str
) -> None:
    found = identify(shape, beside, named(hint))
    assert found.scheme is None and found.fault is not None
    assert found.fault.code == code
    assert words in f"{found.fault.found} {found.fault.accepted}"


def test_br16_a_scale_beside_a_plain_weight_is_left_over() -> None:
    found = identify((64, 32), {"weight": tensor(BF16, 64, 32), "weight_scale_inv": tensor(F32, 1, 1)}, None)
    assert found.leftovers == ("weight_scale_inv",)
