"""Native products at every level the processor has: against the definition, and bit for bit against themselves."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hadron.errors import UnsupportedError, UsageError
from hadron.kernels.cpu import native
from hadron.kernels.ops import OPERATIONS
from hadron.kernels.reference.dequantize import dequantize
from hadron.kernels.reference.mlp import mlp as reference_mlp
from hadron.kernels.reference.moe import moe as reference_moe
from hadron.kernels.stored import StoredWeight
from hadron.quantization.dtypes import Element
from hadron.quantization.scheme import Granularity, Packing, QuantizationScheme, parse_scheme
from tests.kernels.levels import THREADS, batches

pytestmark = pytest.mark.skipif(
    not native.levels(), reason="this build has no native kernels: install with a C++ compiler to run these"
)

SCHEMES = (
    "f32", "f16", "bf16", "fp8_e4m3_tensor", "fp8_e4m3_channel", "fp8_e4m3_block_128x128", "fp8_e4m3_block_64x64",
    "fp8_e4m3_block_32x96", "mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "nvfp4", "int8_tensor", "int8_channel",
    "int4_channel", "int4_channel_asym", "int4_group_32", "int4_group_40", "int4_group_48", "int4_group_128",
    "int4_group_32_asym", "int4_group_48_asym", "int4_group_128_asym", "int4_channel_fp8",
)  # fmt: skip
FEW = (1, 2, 3, 6, 7, 13, 16, 33)


def unaligned(tensor: torch.Tensor, by: int = 1) -> torch.Tensor:
    """The same values at an odd address: safetensors aligns headers, not tensors."""
    raw = torch.empty(tensor.numel() * tensor.element_size() + 64 + by, dtype=torch.uint8).numpy()
    start = -raw.ctypes.data % 64 + by
    view = raw[start : start + tensor.numel() * tensor.element_size()]
    view[:] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return torch.frombuffer(view.data, dtype=tensor.dtype).view(tensor.shape)


def random_weight(scheme: QuantizationScheme, rows: int, columns: int, seed: int = 0) -> StoredWeight:
    """Random codes of every value but NaN, scales of a few binades, in the layout kernels receive."""
    g = torch.Generator().manual_seed(seed)
    assert columns % 4 == 0 or scheme.bits != 6, "four codes share three bytes"

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, generator=g, dtype=torch.uint8)

    def floats(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=g) + 0.5

    packing, zeros, weight = Packing.ROW_MAJOR, None, None
    match scheme.element:
        case Element.F32:
            weight = torch.randn(rows, columns, generator=g)
        case Element.F16 | Element.BF16:
            dtype = torch.float16 if scheme.element is Element.F16 else torch.bfloat16
            weight = torch.randn(rows, columns, generator=g).to(dtype)
        case Element.E4M3:
            raw = codes(rows, columns)
            weight = torch.where((raw & 0x7F) == 0x7F, 0x7E, raw).to(torch.uint8).view(torch.float8_e4m3fn)
        case Element.INT8:
            weight = codes(rows, columns).view(torch.int8)
        case Element.E2M1:
            weight = codes(rows, -(-columns // 2))
        case Element.E2M3 | Element.E3M2:
            weight = codes(rows, -(-columns * 6 // 8))
        case Element.INT4:
            weight = codes(rows, -(-columns // 8) * 4).view(torch.int32)
            packing = Packing.INT4_ROWS
    groups = -(-columns // scheme.columns) if scheme.columns else 1
    scale = None
    match scheme.granularity:
        case Granularity.TENSOR:
            scale = floats(1)[0]
        case Granularity.CHANNEL:
            scale = floats(rows, 1)
        case Granularity.BLOCK:
            scale = floats(-(-rows // scheme.rows), groups)
        case Granularity.GROUP if scheme.scale == "e8m0":
            scale = torch.randint(121, 133, (rows, groups), generator=g, dtype=torch.uint8)
        case Granularity.GROUP if scheme.scale == "e4m3":
            scale = torch.randint(0, 0x7F, (rows, groups), generator=g, dtype=torch.uint8).view(torch.float8_e4m3fn)
        case Granularity.GROUP:
            scale = floats(rows, groups).bfloat16()
    if scheme.zero_point:
        zeros = unaligned(codes(-(-rows // 8), groups * 4).view(torch.int32))
    global_scale = torch.tensor(0.37) if scheme.global_scale or scheme.fp8_stage else None
    assert weight is not None
    if scale is not None and scale.dim():
        scale = unaligned(scale, scale.element_size())
    return StoredWeight(
        scheme, packing, (rows, columns), unaligned(weight), scale, global_scale, zeros
    )  # fmt: skip


def whole(scheme: QuantizationScheme, columns: int) -> int:
    """Columns that the format can store: codes of six bits come in fours."""
    return -(-columns // 4) * 4 if scheme.bits == 6 else columns


def rounded(scheme: QuantizationScheme, x: torch.Tensor) -> torch.Tensor:
    """What a native product makes of its activations."""
    return x if scheme.element in (Element.F32, Element.F16) else x.bfloat16().float()


def integers(name: str, level: str, x: torch.Tensor, values: torch.Tensor) -> torch.Tensor | float:
    """What a product may lose where activations become integers of sixteen bits, by the largest of 128 columns: at
    most 2^-15 of it, where rounding to bfloat16 loses up to 2^-9 of each."""
    narrow = name in ("mxfp4", "nvfp4", "mxfp6_e2m3", "mxfp6_e3m2") or name.startswith("int4")
    by_integers = name == "mxfp4" if level == "avx512_amx" else narrow and level in ("avx2", "avx512")
    if not by_integers:
        return 0.0
    most = torch.nn.functional.pad(x, (0, -x.shape[1] % 128)).unflatten(1, (-1, 128)).abs().amax(-1).double()
    weights = torch.nn.functional.pad(values, (0, -values.shape[1] % 128)).unflatten(1, (-1, 128)).abs().sum(-1)
    return 2.0**-15 * most @ weights.double().T


@pytest.fixture(params=native.levels())
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(native.ENVIRONMENT, request.param)
    name: str = request.param
    return name


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("shape", [(37, 200), (19, 128), (130, 391), (3, 33)])
def test_a_product_equals_its_definition(level: str, name: str, shape: tuple[int, int]) -> None:
    from hadron.kernels.cpu.linear import bind
    from hadron.kernels.cpu.linear import dequantize as native_dequantize

    scheme = parse_scheme(name)
    shape = (shape[0], whole(scheme, shape[1]))
    weight = random_weight(scheme, *shape)
    values = dequantize(weight)
    torch.testing.assert_close(native_dequantize(weight), values, rtol=2e-7, atol=0)
    x = torch.randn(9, shape[1], generator=torch.Generator().manual_seed(1))
    bias = unaligned(torch.randn(shape[0], generator=torch.Generator().manual_seed(2)))
    y = bind(weight, bias, 2)(x)
    expected = rounded(scheme, x).double() @ values.double().T + bias
    scale = rounded(scheme, x).double().abs() @ values.double().abs().T + 1
    lost = integers(name, level, x, values)
    assert bool(((y - expected).abs() <= 1e-6 * scale + lost).all())


@pytest.mark.parametrize("name", SCHEMES)
def test_a_row_has_the_same_bits_in_every_batch_and_on_any_number_of_threads(level: str, name: str) -> None:
    from hadron.kernels.cpu.linear import bind

    scheme = parse_scheme(name)
    weight = random_weight(scheme, 75, 264)
    bias = torch.randn(75, generator=torch.Generator().manual_seed(5))
    x = torch.randn(max(FEW), 264, generator=torch.Generator().manual_seed(3))
    alone = torch.cat([bind(weight, bias, 1)(row) for row in x.split(1)])
    for threads in (1, 2, 3, 4):
        product = bind(weight, bias, threads)
        for batch in FEW:
            for first in {0, (len(x) - batch) // 2, len(x) - batch}:
                rows = slice(first, first + batch)
                assert torch.equal(product(x[rows]), alone[rows]), (threads, batch, first)


@pytest.mark.parametrize("name", SCHEMES)
def test_large_batches_have_the_same_bits(level: str, name: str) -> None:
    from hadron.kernels.cpu.linear import bind

    weight = random_weight(parse_scheme(name), 21, 160)
    x = torch.randn(512, 160, generator=torch.Generator().manual_seed(4))
    product = bind(weight, None, 1)
    alone = torch.cat([product(row) for row in x.split(1)])
    for threads in THREADS:
        for rows in batches(512):
            assert torch.equal(bind(weight, None, threads)(x[rows]), alone[rows]), (threads, rows)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "mxfp8_e4m3", "fp8_e4m3_block_128x128", "bf16"])
def test_more_rows_and_tokens_than_a_tile_of_caches_holds_have_the_same_bits(level: str, name: str) -> None:
    from hadron.kernels.cpu.linear import bind

    weight = random_weight(parse_scheme(name), 1100, 288)
    if name == "mxfp4":  # scales that tiles fold into codes and scales that they keep apart, in one row
        assert weight.scale is not None
        weight.scale[5, 3], weight.scale[700, 8], weight.scale[1099, 0] = 20, 240, 0
    x = torch.randn(600, 288, generator=torch.Generator().manual_seed(4))
    product = bind(weight, None, 1)
    several = product(x)
    for t in (0, 17, 511, 512, 599):
        assert torch.equal(product(x[t : t + 1])[0], several[t]), t
    for few in (2, 5, 16):
        assert torch.equal(product(x[:few]), several[:few]), few


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "mxfp6_e2m3", "fp8_e4m3_block_128x128", "bf16", "int8_channel"])
def test_more_columns_than_a_tile_of_caches_holds_have_the_same_bits(level: str, name: str) -> None:
    from hadron.kernels.cpu.linear import bind

    weight = random_weight(parse_scheme(name), 530, 4500)
    x = torch.randn(130, 4500, generator=torch.Generator().manual_seed(4))
    several = bind(weight, None, 2)(x)
    product = bind(weight, None, 1)
    for t in (0, 15, 16, 127, 128, 129):
        assert torch.equal(product(x[t : t + 1])[0], several[t]), t
    assert torch.equal(product(x[:48]), several[:48])


def test_nan_subnormal_and_zero_codes_of_fp8_are_exact_for_one_token_and_for_many(level: str) -> None:
    from hadron.kernels.cpu.linear import bind

    codes = torch.arange(256, dtype=torch.uint8).repeat(3, 1)
    codes[1:, 0x7F], codes[1:, 0xFF], codes[2, :] = 0, 0, codes[2, :] & 0x87
    weight = random_weight(parse_scheme("fp8_e4m3_channel"), 3, 256)
    weight.weight.view(torch.uint8)[:] = codes
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(8))
    product = bind(weight, None, 1)
    several = product(x)
    assert torch.equal(product(x[:1])[0, 1:], several[0, 1:])
    assert torch.isnan(several).tolist() == [[True, False, False]] * 40 and bool(torch.isnan(product(x[:1])[0, 0]))
    expected = x.bfloat16().double() @ dequantize(weight)[1:].double().T
    assert float(((several[:, 1:] - expected).abs() / expected.abs().max()).max()) < 1e-6


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("name", ["mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3"])
def test_the_ends_of_e8m0_and_subnormal_scales_are_exact(level: str, name: str, tokens: int) -> None:
    from hadron.kernels.cpu.linear import bind

    weight = random_weight(parse_scheme(name), 4, 128)
    assert weight.scale is not None
    weight.scale[:] = torch.tensor([[0, 1, 126, 240], [127, 127, 127, 127], [0, 0, 0, 0], [255, 1, 1, 1]])
    x = torch.zeros(tokens, 128)
    x[:, 3], x[:, 40] = 1.0, 2.0
    y, values = bind(weight, None, 1)(x), dequantize(weight)
    for row in y:
        assert torch.equal(row[:3], values[:3, 3] + 2 * values[:3, 40]), "powers of two lose nothing"
        assert bool(row[:3].abs().max() > 0) and math.isnan(float(row[3])), "255 is NaN, and stays one"


def test_nan_codes_and_activations_stay_nan(level: str) -> None:
    from hadron.kernels.cpu.linear import bind

    weight = random_weight(parse_scheme("fp8_e4m3_channel"), 4, 160)
    weight.weight.view(torch.uint8)[1, 150] = 0x7F
    x = torch.ones(2, 160)
    x[1, 0] = math.nan
    y = bind(weight, None, 1)(x)
    assert torch.isnan(y).tolist() == [[False, True, False, False], [True] * 4]


@pytest.mark.parametrize("columns", [128, 330, 512])
@pytest.mark.parametrize("apart", [0, 3, 4, 12, 60])
def test_scales_of_mxfp4_that_lie_near_and_far_from_one_another(level: str, apart: int, columns: int) -> None:
    from hadron.kernels.cpu.linear import bind

    weight = random_weight(parse_scheme("mxfp4"), 37, columns)
    assert weight.scale is not None
    g = torch.Generator().manual_seed(apart)
    weight.scale[:] = torch.randint(100, 101 + apart, weight.scale.shape, generator=g, dtype=torch.uint8)
    values, x = dequantize(weight), torch.randn(40, columns, generator=g)
    y = bind(weight, None, 1)(x)
    rounded_x = x.bfloat16().double()
    scale = rounded_x.abs() @ values.double().abs().T
    lost = integers("mxfp4", level, x, values)
    assert bool(((y - rounded_x @ values.double().T).abs() <= 1e-6 * scale + lost).all())
    for few in (1, 3, 8, 9, 17):
        assert torch.equal(bind(weight, None, 2)(x[:few]), y[:few]), few


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_activations_that_are_not_finite_stay_so_in_every_row_of_mxfp4(level: str, value: float, tokens: int) -> None:
    from hadron.kernels.cpu.linear import bind

    x = torch.ones(tokens, 160)
    x[0, 150] = value
    weight = random_weight(parse_scheme("mxfp4"), 20, 160)
    weight.weight[:, 75] = 0x22
    y = bind(weight, None, 1)(x)
    assert not bool(torch.isfinite(y[0]).any()) and bool(torch.isfinite(y[1:]).all())


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12, 1e30])
def test_activations_of_any_size_times_mxfp4(level: str, size: float, tokens: int) -> None:
    from hadron.kernels.cpu.linear import bind

    weight = random_weight(parse_scheme("mxfp4"), 20, 160)
    values = dequantize(weight)
    x = torch.randn(tokens, 160, generator=torch.Generator().manual_seed(1)) * size
    expected = x.bfloat16().double() @ values.double().T
    lost = integers("mxfp4", level, x, values)
    scale = x.bfloat16().double().abs() @ values.double().abs().T
    assert bool(((bind(weight, None, 1)(x) - expected).abs() <= 1e-6 * scale + lost).all())


@pytest.mark.parametrize("tokens", [1, 4, 40])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_sums_of_the_largest_codes_and_activations_are_exact(level: str, name: str, tokens: int) -> None:
    """All of one sign, and all but one bit of bfloat16 set: what an integer of too few bits would not hold."""
    from hadron.kernels.cpu.linear import bind

    weight = random_weight(parse_scheme(name), 4, 256)
    assert weight.scale is not None
    for row, code in enumerate((0x77, 0xFF, 0x00, 0x7F)):  # 6, -6, 0, and -6 beside 6
        weight.weight.view(torch.uint8)[row] = code
    weight.scale.fill_(127 if name == "mxfp4" else 1.0)
    largest = 1.9921875 * 64
    for sign in (1.0, -1.0):
        scale = dequantize(weight)[0, 0].abs() * largest * 256 * sign
        y = bind(weight, None, 1)(torch.full((tokens, 256), largest * sign))
        assert torch.equal(y, torch.stack([scale, -scale, 0 * scale, 0 * scale]).repeat(tokens, 1))


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_products_in_one_call_have_the_bits_of_each_alone(level: str, tokens: int) -> None:
    from hadron.kernels.cpu.linear import Product, bind

    names = ("mxfp4", "bf16", "fp8_e4m3_block_128x128", "f32", "nvfp4", "mxfp4")
    rows = (70, 3, 129, 16, 33, 200)
    g = torch.Generator().manual_seed(7)
    wide, narrow = torch.randn(tokens, 264, generator=g), torch.randn(tokens, 96, generator=g)
    inputs = [wide, wide, wide, wide, narrow, narrow]
    weights = [random_weight(parse_scheme(n), r, x.shape[1]) for n, r, x in zip(names, rows, inputs, strict=True)]
    for threads in (1, 2, 3):
        products = [bind(w, torch.ones(r) if r == 33 else None, threads) for w, r in zip(weights, rows, strict=True)]
        together = Product.group(products)(inputs)
        for product, x, y in zip(products, inputs, together, strict=True):
            assert torch.equal(product(x), y), threads
        half = Product.group(products)([x.bfloat16() for x in inputs])
        assert {y.dtype for y in half} == {torch.bfloat16}


@pytest.mark.parametrize("cut", [(0, 100), (64, 192), (130, 261)])
def test_rows_of_a_weight_keep_their_block_of_scales(level: str, cut: tuple[int, int]) -> None:
    from hadron.kernels.cpu.linear import bind

    for name in ("fp8_e4m3_block_128x128", "int4_group_32_asym", "int4_channel_asym"):
        weight = random_weight(parse_scheme(name), 261, 96)
        x = torch.randn(3, 96, generator=torch.Generator().manual_seed(5))
        assert torch.equal(bind(weight.rows(*cut), None, 2)(x), bind(weight, None, 1)(x)[:, slice(*cut)]), name


class Layer:
    """A product as a layer holds it."""

    def __init__(self, weight: StoredWeight, threads: int) -> None:
        from hadron.kernels.cpu.linear import bind

        self.run = bind(weight, None, threads)
        self.values = dequantize(weight)


class Block:
    def __init__(
        self, names: tuple[str, str, str], hidden: int, wide: int, seed: int, limit: float | None, threads: int
    ) -> None:
        shapes = ((wide, hidden), (wide, hidden), (hidden, wide))
        weights = [
            random_weight(parse_scheme(n), *s, seed=seed + i)
            for i, (n, s) in enumerate(zip(names, shapes, strict=True))
        ]
        self.gate, self.up, self.down = (Layer(w, threads) for w in weights)
        self.limit = limit

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The definition, over the same native products."""
        return reference_mlp(x, self.gate.run, self.up.run, self.down.run, self.limit)

    def defined(self, x: torch.Tensor) -> torch.Tensor:
        """The definition, over products by the dequantized weights."""
        products = (
            partial(torch.nn.functional.linear, weight=layer.values) for layer in (self.gate, self.up, self.down)
        )
        return reference_mlp(x, *products, self.limit)


MIXED = [
    ("mxfp4", "mxfp4", "mxfp4"),
    ("mxfp4", "bf16", "fp8_e4m3_block_128x128"),
    ("nvfp4", "nvfp4", "mxfp6_e2m3"),
    ("int4_group_32_asym", "f32", "int8_channel"),
]


def near(found: torch.Tensor, expected: torch.Tensor, most: float = 2e-3) -> None:
    # The product of gate and up is rounded to bfloat16 again: the last bit of exp may move one of them.
    assert float((found - expected).abs().max() / expected.abs().max()) < most


@pytest.mark.parametrize("names", [*MIXED, *((name,) * 3 for name in SCHEMES if name != "mxfp4")])
@pytest.mark.parametrize("limit", [None, 2.0])
def test_an_mlp_is_its_three_products_and_its_definition(
    level: str, names: tuple[str, str, str], limit: float | None
) -> None:
    from hadron.kernels.cpu.mlp import bind

    block = Block(names, 72, 40, 7, limit, 2)
    mlp = bind(block.gate, block.up, block.down, limit)
    x = torch.randn(13, 72, generator=torch.Generator().manual_seed(6))
    x /= block.gate.run(x).std()  # or clamps would decide by the last bit of sums that are far larger than they
    y = mlp(x)
    near(y, block(x))
    near(y, block.defined(x), OPERATIONS["mlp"].tolerance)


@pytest.mark.parametrize("names", MIXED)
def test_an_mlp_has_the_same_bits_in_every_batch_and_on_any_number_of_threads(
    level: str, names: tuple[str, str, str]
) -> None:
    from hadron.kernels.cpu.mlp import bind

    x = torch.randn(512, 72, generator=torch.Generator().manual_seed(6)) * 0.3
    blocks = [Block(names, 72, 40, 7, 2.0, threads) for threads in THREADS]
    several = [bind(block.gate, block.up, block.down, 2.0) for block in blocks]
    alone = torch.cat([several[0](row) for row in x.split(1)])
    for mlp in several:
        for rows in batches(512):
            assert torch.equal(mlp(x[rows]), alone[rows]), rows


@pytest.mark.parametrize("shared", [True, False])
def test_experts_are_summed_in_one_order_whoever_shares_the_step(level: str, shared: bool) -> None:
    from hadron.kernels.cpu.moe import bind

    def bank(threads: int) -> tuple[list[Block], Block | None]:
        experts = [Block(MIXED[e % len(MIXED)], 72, 40, 10 * e, 2.0, threads) for e in range(6)]
        return experts, Block(("bf16", "bf16", "bf16"), 72, 40, 99, 2.0, threads) if shared else None

    g = torch.Generator().manual_seed(8)
    x = torch.randn(512, 72, generator=g) * 0.3
    ids = torch.stack([torch.randperm(6, generator=g)[:3].sort().values for _ in range(512)])
    weights = torch.rand(512, 3, generator=g)
    experts, extra = bank(1)
    x /= max(float(expert.gate.run(x).std()) for expert in experts)  # as above
    one = bind(experts, extra)
    alone = torch.cat([one(x[t : t + 1], ids[t : t + 1], weights[t : t + 1]) for t in range(512)])
    near(alone, reference_moe(x, ids, weights, experts, extra))
    values = None if extra is None else extra.defined
    defined = reference_moe(x, ids, weights, [expert.defined for expert in experts], values)
    near(alone, defined, OPERATIONS["moe"].tolerance)
    for threads in THREADS:
        moe = bind(*bank(threads))
        for rows in batches(512):
            assert torch.equal(moe(x[rows], ids[rows], weights[rows]), alone[rows]), (threads, rows)


def test_an_expert_that_is_not_there_is_refused() -> None:
    from hadron.kernels.cpu.moe import bind

    moe = bind([Block(MIXED[0], 72, 40, 0, None, 1)], None)
    with pytest.raises(IndexError, match="expert id is out of range"):
        moe(torch.zeros(1, 72), torch.tensor([[1]]), torch.ones(1, 1))


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(SCHEMES), rows=st.integers(1, 70), columns=st.integers(1, 400), tokens=st.integers(1, 70),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_any_shape(name: str, rows: int, columns: int, tokens: int, seed: int) -> None:
    from hadron.kernels.cpu.linear import bind

    scheme = parse_scheme(name)
    columns = whole(scheme, columns)
    weight = random_weight(scheme, rows, columns, seed)
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed))
    values = dequantize(weight).double()
    expected = rounded(scheme, x).double() @ values.T
    scale = rounded(scheme, x).double().abs() @ values.abs().T + 1e-3
    lost = integers(name, native.level_name(), x, values)
    assert bool(((bind(weight, None, 2)(x) - expected).abs() <= 1e-5 * scale + lost).all())


@settings(max_examples=40, deadline=None)
@given(
    names=st.tuples(*[st.sampled_from(SCHEMES)] * 3), hidden=st.integers(1, 40), wide=st.integers(1, 40),
    tokens=st.integers(1, 40), experts=st.integers(1, 6), seed=st.integers(0, 1000),
)  # fmt: skip
def test_experts_of_any_shape(
    names: tuple[str, str, str], hidden: int, wide: int, tokens: int, experts: int, seed: int
) -> None:
    """Each is the MLP of its three weights, and their sum is in ascending order."""
    from hadron.kernels.cpu.mlp import bind as bind_mlp
    from hadron.kernels.cpu.moe import bind

    g = torch.Generator().manual_seed(seed)
    blocks = [Block(names, 4 * hidden, 4 * wide, seed + 3 * e, 2.0, 2) for e in range(experts)]
    x = torch.randn(tokens, 4 * hidden, generator=g)
    taken = int(torch.randint(1, experts + 1, (1,), generator=g))
    ids = torch.stack([torch.randperm(experts, generator=g)[:taken].sort().values for _ in range(tokens)])
    weights = torch.rand(tokens, taken, generator=g)
    alone = torch.stack([bind_mlp(b.gate, b.up, b.down, b.limit)(x) for b in blocks])
    for block, found in zip(blocks, alone, strict=True):
        gate, up = (part.run(x).clamp(max=2.0) for part in (block.gate, block.up))
        inner = torch.nn.functional.silu(gate) * up.clamp(min=-2.0)
        scale = inner.abs() @ block.down.values.abs().T + 1e-6
        lost = integers(names[2], native.level_name(), inner, block.down.values)
        off = (found - inner @ block.down.values.T).abs()
        assert bool((off <= 2**-8 * scale + lost).all())  # inner is rounded
    parts = torch.stack([alone[ids[:, i], torch.arange(tokens)] * weights[:, i : i + 1] for i in range(taken)])
    found = bind(blocks, None)(x, ids, weights)
    assert float(((found - parts.sum(0)).abs() / (parts.abs().sum(0) + 1e-6)).max()) < 1e-6


def test_a_level_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.ENVIRONMENT, "sse9")
    with pytest.raises(UsageError) as caught:
        native.level()
    assert "instruction-set level" in str(caught.value) and "baseline" in caught.value.accepted
    assert caught.value.found == "'sse9'" and "HADRON_ISA" in caught.value.where


def test_a_build_without_kernels_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_native", None)
    with pytest.raises(UnsupportedError) as caught:
        native.level()
    assert "no native CPU kernels" in str(caught.value) and "HADRON_SKIP_NATIVE" in caught.value.hint
    assert native.levels() == ()


@pytest.mark.parametrize(
    "order", ["import torch, hadron.kernels.cpu._native", "import hadron.kernels.cpu._native, torch"]
)
def test_there_is_one_openmp_runtime_in_either_import_order(order: str) -> None:
    code = f"""
{order}
import re
maps = open("/proc/self/maps").read()
print(len(set(re.findall(r"\\S*lib[gi]omp\\S*", maps))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    assert done.stdout.split() == ["1"]


@pytest.mark.skipif(sys.platform != "linux", reason="names of libraries in ELF files: Linux")
def test_the_openmp_runtime_is_asked_for_by_its_usual_name() -> None:
    """Under another name, as bundled copies have, it would be loaded beside torch's."""
    names = re.findall(rb"lib[gi]omp[^\0]*", Path(native.extension().__file__).read_bytes())
    assert set(names) == {b"libgomp.so.1"}
