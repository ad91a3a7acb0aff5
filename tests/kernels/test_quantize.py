"""Emulated activation quantization against its formulas in numpy, and bit for bit against real quantizers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hadron.kernels.reference.quantize import quantize, round_to
from hadron.preflight.build import make_plan
from hadron.quantization.dtypes import Element
from hadron.quantization.scheme import ActivationScheme, Granularity
from tests.conftest import checkpoint_names, checkpoints_root
from tests.kernels import formats as f

POSITIVE = {
    Element.E2M1: f.E2M1[:8], Element.E2M3: f.E2M3[:32], Element.E3M2: f.E3M2[:32], Element.E4M3: f.E4M3[:0x7F],
}  # fmt: skip
MX = {Element.E2M1: (1, 2), Element.E2M3: (3, 2), Element.E3M2: (2, 4), Element.E4M3: (3, 8)}
QUANTIZED = [n for n in checkpoint_names() if (checkpoints_root() / n / "goldens_linear.safetensors").exists()]  # type: ignore[operator]


def nearest(values: f.Array, element: Element) -> f.Array:
    """By looking at every code: the nearest, on a tie the even one. Exact, for float64 holds all midpoints."""
    table = POSITIVE[element].astype(np.float64)
    distance = np.abs(np.abs(values.astype(np.float64))[..., None] - table)
    best = distance.min(axis=-1, keepdims=True)
    candidates = distance == best
    even = candidates & (np.arange(len(table)) % 2 == 0)
    code = np.where(even.any(axis=-1), even.argmax(axis=-1), candidates.argmax(axis=-1))
    return (np.sign(values) * table[code]).astype(np.float32)


def sample(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Values of many sizes, with an outlier and a row of zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, columns)) * 2.0 ** rng.integers(-6, 6, (rows, 1))
    x[0, 3] = 300
    x[-1] = 0
    return torch.from_numpy(x.astype(np.float32)).bfloat16()


@pytest.mark.parametrize("element", list(POSITIVE))
def test_rounding_to_nearest_with_ties_to_the_even_code(element: Element) -> None:
    table = POSITIVE[element]
    midpoints = (table[1:].astype(np.float64) + table[:-1]) / 2
    values = np.concatenate([table, midpoints, midpoints * (1 + 2e-7), midpoints * (1 - 2e-7), [table[-1] * 3]])
    values = np.concatenate([values, -values]).astype(np.float32)
    found = round_to(torch.from_numpy(values), element).numpy()
    np.testing.assert_array_equal(found, nearest(values, element))
    assert np.isnan(round_to(torch.tensor([float("nan")]), element).numpy()).all()


def test_the_ties_of_e2m1_as_documented() -> None:
    ties = {0.25: 0, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5.0: 4, 7.0: 6}
    found = round_to(torch.tensor(list(ties)), Element.E2M1)
    assert found.tolist() == list(ties.values())


def test_fp8_token_scales_each_row_by_its_own_largest() -> None:
    x = sample(6, 80)
    found = quantize(x, ActivationScheme(Element.E4M3, Granularity.CHANNEL, scale="float", dynamic=True))
    wide = x.float().numpy()
    scale = np.abs(wide).max(axis=1, keepdims=True) / np.float32(448)
    scale[-1] = 1
    np.testing.assert_array_equal(found.numpy(), nearest(wide / scale, Element.E4M3) * scale)
    assert (found[-1] == 0).all()


@pytest.mark.parametrize("columns", [128, 160, 300, 40])
def test_fp8_groups_with_a_short_last_one(columns: int) -> None:
    x = sample(4, columns)
    found = quantize(x, ActivationScheme(Element.E4M3, Granularity.GROUP, 128, "float", dynamic=True)).numpy()
    wide = x.float().numpy()
    for start in range(0, columns, 128):
        part = wide[:, start : start + 128]
        scale = np.maximum(np.abs(part).max(axis=1, keepdims=True), 1e-30) / np.float32(448)
        np.testing.assert_array_equal(found[:, start : start + 128], nearest(part / scale, Element.E4M3) * scale)


def test_fp8_static_saturates_at_the_stored_scale() -> None:
    scheme = ActivationScheme(Element.E4M3, Granularity.TENSOR, scale="float")
    scale = torch.tensor(0.01).bfloat16().float()
    found = quantize(torch.tensor([[1000.0, -1000.0, 1.0, 0.0]]), scheme, scale)
    assert found.tolist()[0][:2] == [float(448 * scale), float(-448 * scale)] and found[0, 3] == 0
    assert found[0, 2] == float(nearest(np.float32([1]) / scale.numpy(), Element.E4M3)[0] * scale.numpy())


def test_fp8_tensor_dynamic_shares_one_scale() -> None:
    x = sample(4, 32)
    found = quantize(x, ActivationScheme(Element.E4M3, Granularity.TENSOR, scale="float", dynamic=True))
    scale = x.float().abs().max().numpy() / np.float32(448)
    np.testing.assert_array_equal(found.numpy(), nearest(x.float().numpy() / scale, Element.E4M3) * scale)


def test_int8_static_and_dynamic() -> None:
    x = torch.tensor([[0.5, 1.5, -2.5, 300.0, -300.0]])
    static = quantize(x, ActivationScheme(Element.INT8, Granularity.TENSOR, scale="float"), torch.tensor(1.0))
    assert static.tolist() == [[0.0, 2.0, -2.0, 127.0, -128.0]], "ties to even, saturating"
    token = quantize(x, ActivationScheme(Element.INT8, Granularity.CHANNEL, scale="float", dynamic=True))
    scale = np.float32(300) / np.float32(127)
    np.testing.assert_array_equal(token.numpy(), np.round(x.numpy() / scale) * scale)


def mx_exponent(amax: float, mode: str, mantissa: int, largest: int) -> int:
    """From the definition, in exact arithmetic: round up where the mantissa is at least 2 - 2^-(m+1)."""
    if amax == 0:
        return -127
    fraction, exponent = np.frexp(np.float64(amax))
    fraction, exponent = fraction * 2, int(exponent) - 1
    up = {"even": fraction >= 2 - 2.0 ** -(mantissa + 1), "floor": False, "ceil": fraction > 1}[mode]
    return max(-127, min(127, exponent + int(up) - largest))


@pytest.mark.parametrize("mode", ["even", "floor", "ceil"])
@pytest.mark.parametrize("element", list(MX))
@pytest.mark.parametrize("columns", [64, 80])
def test_mx_modes(element: Element, mode: str, columns: int) -> None:
    x = sample(6, columns, seed=1)
    found = quantize(x, ActivationScheme(element, Granularity.GROUP, 32, "e8m0", True, mode)).numpy()
    wide = x.float().numpy()
    for row in range(wide.shape[0]):
        for start in range(0, columns, 32):
            part = wide[row, start : start + 32]
            scale = np.float32(2.0 ** mx_exponent(float(np.abs(part).max()), mode, *MX[element]))
            np.testing.assert_array_equal(found[row, start : start + 32], nearest(part / scale, element) * scale)


@pytest.mark.parametrize(
    ("element", "edge"), [(Element.E2M1, 1.75), (Element.E2M3, 1.9375), (Element.E3M2, 1.875), (Element.E4M3, 1.9375)]
)
def test_mx_even_rounds_a_scale_up_from_its_documented_mantissa(element: Element, edge: float) -> None:
    scheme = ActivationScheme(element, Granularity.GROUP, 32, "e8m0", True)
    below = np.nextafter(np.float32(edge), np.float32(0))
    largest = POSITIVE[element][-1]
    kept = quantize(torch.tensor([[float(below)] + [0.0] * 31]), scheme)
    raised = quantize(torch.tensor([[edge] + [0.0] * 31]), scheme)
    assert kept[0, 0] == largest * 2.0 ** -MX[element][1], "clipped to the largest code"
    assert raised[0, 0] == 2.0


def test_1_74_becomes_1_5_as_documented() -> None:
    x = torch.zeros(1, 32)
    x[0, 0] = 1.74
    assert quantize(x, ActivationScheme(Element.E2M1, Granularity.GROUP, 32, "e8m0", True))[0, 0] == 1.5


@pytest.mark.parametrize("reciprocal", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_nvfp4_scales_are_rounded_to_e4m3(reciprocal: bool, dynamic: bool) -> None:
    x = sample(5, 48, seed=2)
    wide = x.float().numpy()
    g = np.float32(0.03) if not dynamic else np.abs(wide).max() / np.float32(2688)
    stored = np.float32(1) / np.float32(0.03) if not dynamic else np.float32(2688) / np.abs(wide).max()
    scheme = ActivationScheme(Element.E2M1, Granularity.GROUP, 16, "e4m3", dynamic, reciprocal=reciprocal)
    given = None if dynamic else torch.tensor(stored if reciprocal else g)
    found = quantize(x, scheme, given).numpy()
    for start in range(0, 48, 16):
        part = wide[:, start : start + 16]
        amax = np.abs(part).max(axis=1, keepdims=True)
        if reciprocal:
            scale = nearest(np.minimum(stored * (amax / np.float32(6)), 448), Element.E4M3) / stored
        else:
            scale = nearest(np.minimum(amax / (np.float32(6) * g), 448), Element.E4M3) * g
        with np.errstate(invalid="ignore"):
            expected = np.where(scale == 0, 0, nearest(np.nan_to_num(part / scale), Element.E2M1) * scale)
        np.testing.assert_array_equal(found[:, start : start + 16], expected)


@pytest.mark.parametrize("reciprocal", [False, True])
def test_nvfp4_zeros_and_tiny_groups(reciprocal: bool) -> None:
    dynamic = ActivationScheme(Element.E2M1, Granularity.GROUP, 16, "e4m3", True, reciprocal=reciprocal)
    assert (quantize(torch.zeros(2, 32), dynamic) == 0).all()
    static = ActivationScheme(Element.E2M1, Granularity.GROUP, 16, "e4m3", reciprocal=reciprocal)
    one = torch.tensor(1.0)
    assert (quantize(torch.full((1, 16), 6 / 1100), static, one) == 0).all(), "the scale rounds to zero"
    assert (quantize(torch.full((1, 16), 1e5), static, one) == 2688).all(), "the scale saturates"


def test_nothing_that_is_not_a_number_is_hidden() -> None:
    x = torch.tensor([[float("nan"), 1.0] + [0.5] * 30])
    for scheme in (
        ActivationScheme(Element.E4M3, Granularity.CHANNEL, scale="float", dynamic=True),
        ActivationScheme(Element.E2M1, Granularity.GROUP, 32, "e8m0", True),
        ActivationScheme(Element.E2M1, Granularity.GROUP, 16, "e4m3", True),
    ):
        assert quantize(x, scheme)[0, : scheme.columns or 32].isnan().all(), "and all that shares its scale"


def test_no_activation_scheme_leaves_the_input_alone() -> None:
    x = sample(3, 32)
    assert torch.equal(quantize(x, ActivationScheme()), x.float())


@pytest.mark.parametrize("name", QUANTIZED)
def test_inputs_are_quantized_as_the_real_quantizers_did_bit_for_bit(checkpoints: Path, name: str) -> None:
    goldens = load_file(checkpoints / name / "goldens_linear.safetensors")
    stored = load_file(checkpoints / name / "model.safetensors")
    plan = make_plan(checkpoints / name)
    compared = 0
    for key, expected in goldens.items():
        if not key.endswith(".input_quantized"):
            continue
        module = plan.module(key.removesuffix(".input_quantized"))
        scale = stored.get(module.tensors.get("input_scale", ""))
        found = quantize(
            goldens[module.name + ".input"], module.activation, None if scale is None else scale.reshape(()).float()
        )
        assert torch.equal(found, expected), module.name
        compared += 1
    declared = {m.activation.name for m in plan.modules if m.scheme.quantized} - {"none"}
    assert compared >= 3 or not declared or name == "glm52-quark-int8"


@pytest.mark.parametrize("mode", ["even", "floor", "ceil"])
def test_a_largest_value_that_is_a_power_of_two_gets_the_same_scale_in_every_mode(mode: str) -> None:
    x = torch.tensor([[2.0, 0.3] + [0.0] * 30])
    found = quantize(x, ActivationScheme(Element.E2M1, Granularity.GROUP, 32, "e8m0", True, mode))
    assert found[0, :2].tolist() == [2.0, 0.25], "steps of a quarter: the scale is 1/2"
