"""Every stored scheme against its format written out in numpy, and the shapes that must be refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hadron.errors import CheckpointError
from hadron.kernels.reference.dequantize import dequantize, scale_values
from hadron.kernels.stored import StoredWeight, stored_weight
from hadron.quantization import scheme as s
from hadron.quantization.scheme import PLAIN_STORAGE, Packing, QuantizationScheme, Storage
from tests.kernels import formats as f


def stored(
    scheme: QuantizationScheme, shape: tuple[int, int], storage: Storage = PLAIN_STORAGE, **tensors: torch.Tensor
) -> StoredWeight:
    return stored_weight("layer", scheme, storage, shape, tensors)


def same(weight: StoredWeight, expected: f.Array) -> None:
    found = dequantize(weight)
    assert found.dtype is torch.float32 and tuple(found.shape) == weight.shape
    np.testing.assert_allclose(found.numpy(), expected, rtol=3e-7, atol=0)


def test_br30_every_e4m3_code_and_its_two_nans() -> None:
    codes = np.arange(256).reshape(1, 256)
    found = dequantize(stored(s.FP8_TENSOR, (1, 256), weight=f.fp8(codes), scale=torch.tensor(1.0)))
    np.testing.assert_array_equal(found.numpy()[0], f.E4M3)
    assert np.isnan(found.numpy()[0]).nonzero()[0].tolist() == [0x7F, 0xFF]


def test_br30_every_e8m0_byte_from_the_smallest_power_to_nan() -> None:
    found = scale_values(torch.arange(256, dtype=torch.uint8)).numpy()
    np.testing.assert_array_equal(found, f.E8M0)
    assert found[0] == np.float32(2.0**-127) and found[127] == 1 and np.isnan(found[255])


def test_br30_a_packed_block_of_32_distinct_positions_keeps_its_order() -> None:
    """Two scale groups make 32 values out of 16 codes; every position must come back as its own."""
    codes = np.tile(np.arange(16), 4).reshape(1, 64)
    codes[0, :32] = np.random.default_rng(0).permutation(codes[0, :32])
    weight = stored(s.MXFP4, (1, 64), weight=f.pack_nibbles(codes), scale=torch.tensor([[127, 130]], dtype=torch.uint8))
    same(weight, f.E2M1[codes] * np.repeat(np.float32([1, 8]), 32))
    bytes_in_order = torch.arange(32, dtype=torch.uint8).reshape(1, 32)  # byte j holds code j%16, then j//16
    found = dequantize(stored(s.MXFP4, (1, 64), weight=bytes_in_order, scale=torch.full((1, 2), 127).byte()))
    np.testing.assert_array_equal(found[0, 0::2].numpy(), f.E2M1[np.arange(32) % 16])
    np.testing.assert_array_equal(found[0, 1::2].numpy(), f.E2M1[np.arange(32) // 16])


def test_every_byte_of_e2m1_pairs() -> None:
    every = torch.arange(256, dtype=torch.uint8).reshape(1, 256)
    found = dequantize(stored(s.MXFP4, (1, 512), weight=every, scale=torch.full((1, 16), 127).byte())).numpy()
    np.testing.assert_array_equal(found[0, 0::2], f.E2M1[np.arange(256) & 15])
    np.testing.assert_array_equal(found[0, 1::2], f.E2M1[np.arange(256) >> 4])


@pytest.mark.parametrize(("scheme", "table"), [(s.MXFP6_E2M3, f.E2M3), (s.MXFP6_E3M2, f.E3M2)])
def test_every_six_bit_code_at_every_slot(scheme: QuantizationScheme, table: f.Array) -> None:
    codes = (np.arange(64)[:, None] + np.arange(64)[None, :]) % 64
    scale = np.random.default_rng(1).integers(100, 150, (64, 2))
    weight = stored(scheme, (64, 64), weight=f.pack_sixes(codes), scale=torch.from_numpy(scale.astype(np.uint8)))
    same(weight, table[codes] * f.spread(f.E8M0[scale], 1, 32, (64, 64)))


def test_mxfp8() -> None:
    rng = np.random.default_rng(2)
    codes, scale = f.fp8_codes(rng, (3, 80)), rng.integers(100, 150, (3, 3))
    weight = stored(s.MXFP8, (3, 80), weight=f.fp8(codes), scale=torch.from_numpy(scale.astype(np.uint8)))
    same(weight, f.E4M3[codes] * f.spread(f.E8M0[scale], 1, 32, (3, 80)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(256, 256), (192, 256), (129, 200), (32, 48), (1, 128)])
def test_br18_block_scales_with_partial_edges(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rng = np.random.default_rng(3)
    blocks = (-(-shape[0] // 128), -(-shape[1] // 128))
    codes, scale = f.fp8_codes(rng, shape), torch.from_numpy(rng.uniform(0.01, 1, blocks)).to(dtype)
    weight = stored(s.fp8_block(128, 128), shape, weight=f.fp8(codes), scale=scale)
    expected = f.E4M3[codes] * f.spread(scale.float().numpy(), 128, 128, shape)
    same(weight, expected)
    for start, stop in ((0, shape[0] // 2), (shape[0] // 2, shape[0]), (shape[0] - 1, shape[0])):
        if start < stop:  # a half whose first row lies inside a block of scales
            same(weight.rows(start, stop), expected[start:stop])
            assert weight.rows(start, stop).weight.data_ptr() == weight.weight[start:].data_ptr(), "a view"


def test_br18_a_part_of_192_rows_beside_one_of_256() -> None:
    """Two scale rows each; joined, they would not be the four rows of a weight of 448."""
    rng = np.random.default_rng(4)
    for rows in (256, 192):
        codes, scale = f.fp8_codes(rng, (rows, 256)), np.float32([[1, 2], [4, 8]])
        weight = stored(s.fp8_block(128, 128), (rows, 256), weight=f.fp8(codes), scale=torch.from_numpy(scale))
        same(weight, f.E4M3[codes] * f.spread(scale, 128, 128, (rows, 256)))


def test_rows_of_rows_keep_their_place_in_a_block() -> None:
    rng = np.random.default_rng(5)
    codes, scale = f.fp8_codes(rng, (20, 4)), np.float32([[1], [2], [3]])
    weight = stored(s.fp8_block(8, 8), (20, 4), weight=f.fp8(codes), scale=torch.from_numpy(scale))
    expected = f.E4M3[codes] * f.spread(scale, 8, 8, (20, 4))
    same(weight.rows(3, 19).rows(4, 15), expected[7:18])


@pytest.mark.parametrize("scale_shape", [(128,), (128, 1)])
def test_br20_a_channel_scale_of_a_square_weight_is_per_row(scale_shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(6)
    codes, scale = f.fp8_codes(rng, (128, 128)), rng.uniform(0.01, 1, 128).astype(np.float32)
    weight = stored(s.FP8_CHANNEL, (128, 128), weight=f.fp8(codes), scale=torch.from_numpy(scale).reshape(scale_shape))
    same(weight, f.E4M3[codes] * scale[:, None])
    same(weight.rows(64, 128), (f.E4M3[codes] * scale[:, None])[64:])


@pytest.mark.parametrize("scale_shape", [(1, 128), (64,), (128, 2), ()])
def test_br20_other_shapes_of_a_channel_scale_are_refused(scale_shape: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError) as caught:
        stored(s.FP8_CHANNEL, (128, 128), weight=f.fp8(np.zeros((128, 128))), scale=torch.ones(scale_shape))
    text = str(caught.value)
    assert "layer, role scale" in text and str(list(scale_shape)) in text and "[128] or [128, 1]" in text


@pytest.mark.parametrize("scale_shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensor_scales(scale_shape: tuple[int, ...], dtype: torch.dtype) -> None:
    codes, scale = f.fp8_codes(np.random.default_rng(7), (4, 6)), torch.full(scale_shape, 0.3, dtype=dtype)
    expected = np.float32(scale.float().item())
    same(stored(s.FP8_TENSOR, (4, 6), weight=f.fp8(codes), scale=scale), f.E4M3[codes] * expected)
    values = np.random.default_rng(8).integers(-128, 128, (4, 6))
    weight = stored(s.INT8_TENSOR, (4, 6), weight=torch.from_numpy(values.astype(np.int8)), scale=scale)
    same(weight, values.astype(np.float32) * expected)


def test_int8_channel() -> None:
    rng = np.random.default_rng(9)
    values, scale = rng.integers(-128, 128, (5, 5)), rng.uniform(0.01, 1, 5).astype(np.float32)
    weight = stored(
        s.INT8_CHANNEL, (5, 5), weight=torch.from_numpy(values.astype(np.int8)), scale=torch.from_numpy(scale)
    )
    same(weight, values.astype(np.float32) * scale[:, None])


def nvfp4(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[f.Array, f.Array]:
    return rng.integers(0, 16, shape), f.fp8_codes(rng, (shape[0], -(-shape[1] // 16))) & 0x7F


def test_br25_the_same_matrix_in_both_nvfp4_dialects() -> None:
    rng = np.random.default_rng(10)
    codes, scale = nvfp4(rng, (6, 96))
    scale[scale == 0x7F] = 0x7E
    shared = {"weight": f.pack_nibbles(codes), "scale": f.fp8(scale)}
    multiplied = stored(s.NVFP4, (6, 96), **shared, global_scale=torch.tensor(2.0**-9))
    divided = stored(
        s.NVFP4, (6, 96), Storage(global_scale_divides=True), **shared, global_scale=torch.tensor([2.0**9])
    )
    same(multiplied, f.E2M1[codes] * f.spread(f.E4M3[scale], 1, 16, (6, 96)) * np.float32(2.0**-9))
    assert torch.equal(dequantize(multiplied), dequantize(divided))


def test_br26_the_global_scale_counts() -> None:
    codes, scale = nvfp4(np.random.default_rng(11), (2, 32))
    scale[:] = 0x38  # one
    for expert in (1.0, 0.25):
        weight = stored(
            s.NVFP4, (2, 32), weight=f.pack_nibbles(codes), scale=f.fp8(scale), global_scale=torch.tensor(expert)
        )
        same(weight, f.E2M1[codes] * np.float32(expert))


def test_br01_two_kinds_of_weight_scale_beside_each_other() -> None:
    """Block-FP8 kept by Quark and MXFP4 both call theirs weight_scale; dtype and shape tell them apart."""
    rng = np.random.default_rng(12)
    codes, scale = f.fp8_codes(rng, (256, 256)), np.float32([[0.5, 1], [2, 4]])
    kept = stored(s.fp8_block(128, 128), (256, 256), weight=f.fp8(codes), scale=torch.from_numpy(scale))
    same(kept, f.E4M3[codes] * f.spread(scale, 128, 128, (256, 256)))
    nibbles, exponents = rng.integers(0, 16, (64, 256)), rng.integers(110, 140, (64, 8))
    packed = stored(
        s.MXFP4, (64, 256), weight=f.pack_nibbles(nibbles), scale=torch.from_numpy(exponents.astype(np.uint8))
    )
    same(packed, f.E2M1[nibbles] * f.spread(f.E8M0[exponents], 1, 32, (64, 256)))


PACKINGS = [Packing.INT4_ROWS, Packing.INT4_ROWS_SIGNED, Packing.INT4_ROWS_INTERLEAVED, Packing.INT4_COLUMNS,
            Packing.INT4_COLUMNS_INTERLEAVED]  # fmt: skip


def int4(
    packing: Packing, codes: f.Array, scale: f.Array, zeros: f.Array | None, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], f.Array]:
    """Stored tensors as the tools write them, and the scales as they come back from `dtype`."""
    order = f.INTERLEAVED if "interleaved" in packing else tuple(range(8))
    offset = 8 if packing is Packing.INT4_ROWS else 0
    columns = "columns" in packing
    weight = f.pack_words(codes.T if columns else codes, order, offset)
    kept = torch.from_numpy(scale).to(dtype)
    tensors = {"weight": weight, "scale": kept}
    if packing is Packing.INT4_COLUMNS_INTERLEAVED:
        tensors["scale"] = kept.T.contiguous()
    if zeros is not None:  # packed along the rows of the weight
        packed = f.pack_words(zeros.T, order, offset)
        tensors["zero_point"] = packed.T.contiguous() if packing is Packing.INT4_ROWS else packed
    return tensors, kept.float().numpy()


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("shape", [(32, 32), (24, 64), (13, 96)])
def test_int4_groups_in_every_packing(packing: Packing, asymmetric: bool, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(13)
    out, columns = shape
    codes, scale = rng.integers(-8, 8, shape), rng.uniform(0.01, 1, (out, columns // 32)).astype(np.float32)
    zeros = rng.integers(-8, 8, scale.shape) if asymmetric else None
    tensors, kept = int4(packing, codes, scale, zeros, torch.bfloat16)
    weight = stored(s.int4_group(32, asymmetric), shape, Storage(packing), **tensors)
    shift = 0 if zeros is None else f.spread(zeros.astype(np.float32), 1, 32, shape)
    expected = (codes - shift) * f.spread(kept, 1, 32, shape)
    same(weight, expected)
    half = out // 2
    same(weight.rows(0, half), expected[:half])
    same(weight.rows(half, out), expected[half:])
    same(weight.rows(half, out).rows(1, 3), expected[half + 1 : half + 3])


@pytest.mark.parametrize("packing", PACKINGS[:3])
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("columns", [16, 19])
def test_int4_channels(packing: Packing, asymmetric: bool, columns: int) -> None:
    rng = np.random.default_rng(14)
    codes, scale = rng.integers(-8, 8, (16, columns)), rng.uniform(0.01, 1, 16).astype(np.float32)
    zeros = rng.integers(-8, 8, (16, 1)) if asymmetric else None
    tensors, _ = int4(packing, codes, scale, zeros, torch.float32)
    if asymmetric and packing is not Packing.INT4_ROWS:
        tensors["zero_point"] = tensors["zero_point"].flatten()  # Quark keeps one dimension
    weight = stored(s.int4_channel(asymmetric), (16, columns), Storage(packing), **tensors)
    same(weight, (codes - (0 if zeros is None else zeros)) * scale[:, None])


def test_two_stage_int4_multiplies_both_scales() -> None:
    """The scale of a row is that of the INT4 stage, the global one that of the FP8 stage."""
    rng = np.random.default_rng(15)
    codes, rows = rng.integers(-8, 8, (16, 24)), rng.uniform(1, 50, 16).astype(np.float32)
    weight = stored(
        s.INT4_CHANNEL_FP8, (16, 24), Storage(Packing.INT4_ROWS_INTERLEAVED),
        weight=f.pack_words(codes, f.INTERLEAVED), scale=torch.from_numpy(rows), global_scale=torch.tensor([0.001]),
    )  # fmt: skip
    same(weight, codes * rows[:, None] * np.float32(0.001))


def test_zero_points_that_a_symmetric_scheme_leaves_out_must_be_zeros() -> None:
    rng = np.random.default_rng(16)
    codes, scale = rng.integers(-8, 8, (32, 32)), np.ones((32, 1), np.float32)
    packing = Packing.INT4_COLUMNS_INTERLEAVED
    tensors, _ = int4(packing, codes, scale, np.zeros((32, 1), np.int64), torch.float32)
    same(stored(s.int4_group(32, False), (32, 32), Storage(packing), **tensors), codes.astype(np.float32))
    tensors["zero_point"][0, 2] = 7
    with pytest.raises(CheckpointError) as caught:
        stored(s.int4_group(32, False), (32, 32), Storage(packing), **tensors)
    assert "zero points were taken for zeros" in str(caught.value) and "1 of 4" in str(caught.value)


def test_only_what_cannot_be_multiplied_in_place_is_copied() -> None:
    codes = np.zeros((32, 64), np.int64)
    rows = f.pack_words(codes, offset=8)
    kept = stored(
        s.int4_group(32, False), (32, 64), Storage(Packing.INT4_ROWS), weight=rows, scale=torch.ones(32, 2).bfloat16()
    )
    assert kept.weight.data_ptr() == rows.data_ptr() and kept.scale is not None
    assert kept.scale.dtype is torch.bfloat16, "group scales stay as they are stored"
    columns = f.pack_words(codes.T)
    made = stored(
        s.int4_group(32, False), (32, 64), Storage(Packing.INT4_COLUMNS), weight=columns, scale=torch.ones(32, 2)
    )
    assert made.packing is Packing.INT4_ROWS and torch.equal(made.weight, rows)


@pytest.mark.parametrize(
    ("scheme", "packing", "weight", "scale"),
    [
        (s.MXFP4, Packing.ROW_MAJOR, (8, 32), (8, 4)),
        (s.MXFP4, Packing.ROW_MAJOR, (8, 16), (8, 1)),
        (s.fp8_block(128, 128), Packing.ROW_MAJOR, (8, 64), (2, 1)),
        (s.int4_group(32, False), Packing.INT4_COLUMNS, (8, 8), (8, 2)),
        (s.int4_group(32, False), Packing.INT4_COLUMNS_INTERLEAVED, (64, 1), (8, 2)),
        (s.int4_group(32, False), Packing.INT4_ROWS_SIGNED, (64, 1), (8, 2)),
    ],
)
def test_shapes_that_a_role_cannot_have_are_refused(
    scheme: QuantizationScheme, packing: Packing, weight: tuple[int, ...], scale: tuple[int, ...]
) -> None:
    with pytest.raises(CheckpointError, match=r"a shape that its role cannot have\n  where:    layer, role "):
        stored(
            scheme, (8, 64), Storage(packing), weight=torch.zeros(weight, dtype=torch.int32), scale=torch.ones(scale)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_plain_weights(dtype: torch.dtype) -> None:
    values = torch.randn(4, 6).to(dtype)
    scheme = {torch.float32: s.F32, torch.float16: s.F16, torch.bfloat16: s.BF16}[dtype]
    same(stored(scheme, (4, 6), weight=values), values.float().numpy())
