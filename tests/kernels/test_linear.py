"""Products by stored weights: every golden of the full set, and the faults that scales have caused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hadron.engine.single import linear as checkpoint_linear
from hadron.errors import PlanError, RequestError, UsageError
from hadron.kernels.reference import linear as definition
from hadron.kernels.reference.quantize import bind as bind_quantize
from hadron.kernels.select import CATALOGS, KernelChoice, Refusal, providers, select
from hadron.quantization import scheme as s
from hadron.quantization.dtypes import Element
from hadron.quantization.scheme import ActivationScheme, Granularity
from tests.conftest import checkpoint_names, checkpoints_root
from tests.kernels import formats as f
from tests.kernels.held import block_fp8, close, dense, mxfp4, nvfp4, product
from tests.tiny.draft import Draft

WITH_GOLDENS = [n for n in checkpoint_names() if (checkpoints_root() / n / "goldens_linear.safetensors").exists()]  # type: ignore[operator]


@pytest.mark.parametrize("name", WITH_GOLDENS)
def test_goldens_linear(checkpoints: Path, name: str) -> None:
    goldens = load_file(checkpoints / name / "goldens_linear.safetensors")
    modules = [key.removesuffix(".output") for key in goldens if key.endswith(".output")]
    assert len(modules) >= 3
    for module in modules:
        x = goldens[module + ".input"]
        found = checkpoint_linear(checkpoints / name, module, x, kernels="reference")
        assert found.dtype == np.float32
        close(torch.from_numpy(found), goldens[module + ".output"].numpy())
        if (declared := goldens.get(module + ".output_quantized")) is not None:
            found = checkpoint_linear(
                checkpoints / name, module, x, kernels="reference", activation_quantization="declared"
            )
            close(torch.from_numpy(found), declared.numpy())
            assert not torch.equal(torch.from_numpy(found), goldens[module + ".output"])


@pytest.mark.parametrize("make", [dense, mxfp4, block_fp8, lambda rng, shape: nvfp4(rng, shape, 0.01)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_in_the_dtype_of_the_input(make, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(0)
    layer, values = make(rng, (48, 96))
    x = torch.from_numpy(rng.standard_normal((5, 96)).astype(np.float32)).to(dtype)
    found = layer(x)
    assert found.dtype is dtype and (layer.out_features, layer.in_features) == (48, 96)
    close(found, x.float().numpy().astype(np.float64) @ values.T, 1e-5 if dtype is torch.float32 else 4e-3)
    np.testing.assert_allclose(layer.dequantized().numpy(), values, rtol=3e-7)


def test_bias_is_added_once_in_float32() -> None:
    rng = np.random.default_rng(1)
    bias = torch.from_numpy(rng.standard_normal(8).astype(np.float32)).bfloat16()
    weight = torch.from_numpy(rng.standard_normal((8, 4)).astype(np.float32))
    layer, x = product(s.F32, (8, 4), weight=weight, bias=bias), torch.ones(3, 4)
    close(layer(x), np.ones((3, 4)) @ weight.numpy().T + bias.float().numpy())


def test_a_large_weight_is_expanded_in_row_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    layer, values = block_fp8(rng, (300, 64))
    x = torch.from_numpy(rng.standard_normal((2, 64)).astype(np.float32))
    whole = layer(x)
    monkeypatch.setattr(definition, "_EXPANDED", 64 * 37)  # 37 rows at a time: no block starts there
    close(layer(x), whole.double().numpy(), 1e-6)
    close(whole, x.numpy().astype(np.float64) @ values.T)


@pytest.mark.parametrize("exponent", [-9, 0, 4])
def test_br15_br16_an_fp8_part_with_its_scale_beside_a_bf16_part(exponent: int) -> None:
    """`indexer.wk` is FP8 with block scales, `indexer.weights_proj` BF16 without: each by its own rule."""
    rng = np.random.default_rng(3)
    codes, scale = f.fp8_codes(rng, (128, 256)), np.float32([[2.0**exponent, 3 * 2.0**exponent]])
    wk = product(s.fp8_block(128, 128), (128, 256), weight=f.fp8(codes), scale=torch.from_numpy(scale))
    weights_proj, plain = dense(rng, (32, 256))
    x = torch.from_numpy(rng.standard_normal((4, 256)).astype(np.float32))
    values = f.E4M3[codes] * f.spread(scale, 128, 128, (128, 256))
    close(wk(x), x.numpy().astype(np.float64) @ values.T)
    close(weights_proj(x), x.numpy().astype(np.float64) @ plain.T)


def test_br20_kv_b_splits_into_its_two_halves_by_rows() -> None:
    """A square weight [128, 128] of two heads, nope 32 and v 32, as MLA absorbs it."""
    rng = np.random.default_rng(4)
    codes, scale = f.fp8_codes(rng, (128, 128)), rng.uniform(0.1, 9, 128).astype(np.float32)
    for shape in ((128,), (128, 1)):
        layer = product(s.FP8_CHANNEL, (128, 128), weight=f.fp8(codes), scale=torch.from_numpy(scale).reshape(shape))
        heads = layer.dequantized().view(2, 64, 128)
        expected = (f.E4M3[codes] * scale[:, None]).reshape(2, 64, 128)
        np.testing.assert_allclose(heads[:, :32].numpy(), expected[:, :32], rtol=3e-7)
        np.testing.assert_allclose(heads[:, 32:].numpy(), expected[:, 32:], rtol=3e-7)


def test_br22_a_ptpc_layer_quantizes_its_input_by_token_not_by_block() -> None:
    rng = np.random.default_rng(5)
    codes, scale = f.fp8_codes(rng, (16, 256)) & 0xBF, rng.uniform(0.1, 1, 16).astype(np.float32)
    x = rng.standard_normal((2, 256)).astype(np.float32)
    x[0, 130] = 5000  # an outlier in the second block of 128
    token = ActivationScheme(Element.E4M3, Granularity.CHANNEL, scale="float", dynamic=True)
    layer = product(
        s.FP8_CHANNEL, (16, 256), weight=f.fp8(codes), scale=torch.from_numpy(scale),
        quantize=bind_quantize(token, None),
    )  # fmt: skip
    steps = np.abs(x).max(axis=1, keepdims=True) / np.float32(448)
    emulated = torch.from_numpy(x / steps).to(torch.float8_e4m3fn).float().numpy() * steps
    values = (f.E4M3[codes] * scale[:, None]).astype(np.float64)
    close(layer(torch.from_numpy(x)), emulated @ values.T)
    assert (emulated[0, :128] == 0).any(), "small values beside the outlier are lost, as the recipe says"


@pytest.mark.parametrize("operation", ["linear", "mlp", "moe", "lm_head"])
def test_a_provider_without_kernels_refuses_with_its_reason(operation: str) -> None:
    refusal = "triton: this build has no Triton kernels"
    assert select(operation, s.MXFP4, providers=("triton",)) == Refusal((refusal,))
    choice = select(operation, s.MXFP4, providers=("triton", "reference"))
    assert isinstance(choice, KernelChoice) and choice.name == f"reference.{operation}"
    assert choice.refused == (refusal,)


def test_a_scheme_that_a_kernel_cannot_read_is_refused_by_name() -> None:
    assert select("embedding", s.MXFP4) == Refusal(
        ("reference: hadron.kernels.reference.embedding does not read mxfp4",)
    )


def test_providers_in_the_platform_s_order_or_the_one_named() -> None:
    assert providers("auto", ("cpu", "reference")) == ("cpu", "reference")
    assert providers("triton", ("cpu", "reference")) == ("triton",)
    rest = CATALOGS["cpu"].completed_by
    assert providers("cpu", ("cpu", "reference")) == (("cpu",) if rest is None else ("cpu", rest))
    with pytest.raises(UsageError) as caught:
        providers("gpu", ())
    assert "--kernels" in str(caught.value) and ", ".join(("auto", *CATALOGS)) in str(caught.value)


def test_kernels_that_are_not_there_refuse_before_reading(checkpoints: Path) -> None:
    with pytest.raises(PlanError) as caught:
        checkpoint_linear(checkpoints / "glm52-quark-ptpc", "model.layers.0.mlp.down_proj", [[0.0]], kernels="triton")
    assert "this build has no Triton kernels" in str(caught.value)


def test_an_unknown_module_lists_names_like_it(checkpoints: Path) -> None:
    with pytest.raises(RequestError) as caught:
        checkpoint_linear(checkpoints / "glm52-quark-ptpc", "model.layers.0.mlp.downproj", np.zeros((1, 256)))
    assert "no matrix 'model.layers.0.mlp.downproj'" in str(caught.value)
    assert "did you mean model.layers.0.mlp.down_proj" in str(caught.value)


def test_a_stacked_bank_is_no_single_matrix(checkpoints: Path) -> None:
    name = "model.layers.3.mlp.experts.gate_up_proj"
    with pytest.raises(RequestError, match=r"holds 2 kinds of matrices, shape \[8, 128, 128\]"):
        checkpoint_linear(checkpoints / "glm52-quark-int4-inmemory", name, np.zeros((1, 128)))


@pytest.mark.parametrize("shape", [(256,), (1, 128), (1, 1, 256)])
def test_an_input_of_another_width_is_refused(checkpoints: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(RequestError) as caught:
        checkpoint_linear(checkpoints / "glm52-quark-ptpc", "model.layers.0.mlp.down_proj", np.zeros(shape))
    assert str(list(shape)) in str(caught.value) and "[tokens, 256]" in str(caught.value)


def test_declared_without_a_stored_scale_is_refused(checkpoints: Path) -> None:
    with pytest.raises(PlanError) as caught:
        checkpoint_linear(
            checkpoints / "glm52-quark-int8", "model.layers.0.mlp.down_proj", np.zeros((1, 256)),
            activation_quantization="declared",
        )  # fmt: skip
    assert "int8_tensor_static without a stored input_scale" in str(caught.value)


def test_linear_refuses_a_plan_with_errors(checkpoints: Path, tmp_path: Path) -> None:
    draft = Draft.of(checkpoints / "glm52-quark-ptpc")
    draft.drop("layers.0.mlp.down_proj.weight_scale")
    with pytest.raises(PlanError, match="HC304"):
        checkpoint_linear(draft.write(tmp_path / "broken"), "model.layers.0.mlp.up_proj", np.zeros((1, 128)))


def test_a_matrix_of_the_multi_token_prediction_layer(checkpoints: Path) -> None:
    """Its tensors are planned though the layer is not run; the product is that of what is stored."""
    folder = checkpoints / "glm52-fp8-block"
    name = "model.layers.5.mlp.experts.1.down_proj"
    stored = load_file(folder / "model.safetensors")
    weight, scale = stored[name + ".weight"].float().numpy(), stored[name + ".weight_scale_inv"].numpy()
    x = np.random.default_rng(6).standard_normal((2, weight.shape[1])).astype(np.float32)
    found = checkpoint_linear(folder, name, x, kernels="reference")
    close(torch.from_numpy(found), x.astype(np.float64) @ (weight * f.spread(scale, 128, 128, weight.shape)).T)
