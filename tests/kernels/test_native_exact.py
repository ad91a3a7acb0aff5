"""Exact products, of the indexer's head weights, at every level: float32 from activations that are not rounded, alone and in a group."""

from __future__ import annotations

import pytest
import torch

from hadron.kernels.cpu import native
from hadron.kernels.cpu.linear import Product
from hadron.kernels.reference.dequantize import dequantize
from hadron.quantization.scheme import parse_scheme
from tests.kernels.levels import every_level, generator, needs_native
from tests.kernels.test_native import random_weight

pytestmark = needs_native


@every_level
@pytest.mark.parametrize("name", ["bf16", "f32", "mxfp4", "nvfp4", "fp8_e4m3_block_128x128", "int4_group_32_asym"])
def test_activations_are_not_rounded_whatever_the_storage(isa: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.ENVIRONMENT, isa)
    weight = random_weight(parse_scheme(name), 32, 392, seed=1)
    x = torch.randn(40, 392, generator=generator(2))
    product = Product(weight, None, 2).exact()
    found, values = product(x), dequantize(weight).double()
    scale = x.double().abs() @ values.abs().T
    assert float(((found - x.double() @ values.T).abs() / scale).max()) < 1e-6
    key = Product(random_weight(parse_scheme("bf16"), 16, 392), None, 2)
    together = Product.group([key, product])
    for rows in (1, 2, 7, 33):
        of_key, of_heads = together([x[:rows]] * 2)
        assert torch.equal(of_heads, found[:rows]) and torch.equal(of_key, key(x[:rows]))
        assert torch.equal(product(x[7 : 7 + rows]), found[7 : 7 + rows])
