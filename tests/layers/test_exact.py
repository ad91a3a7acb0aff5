"""A product that makes head weights is the exact one of its kernel, where that has one."""

from __future__ import annotations

import pytest
import torch

from hadron.kernels.select import KernelChoice
from hadron.layers.linear import Linear, Linears, exact
from tests.kernels.levels import needs_native
from tests.kernels.test_native import parse_scheme, random_weight


@pytest.mark.parametrize("provider", ["reference", pytest.param("cpu", marks=needs_native)])
def test_activations_are_not_rounded_on_any_provider_and_a_group_stays_one_call(provider: str) -> None:
    weight = random_weight(parse_scheme("bf16"), 4, 16)
    kernel = KernelChoice("linear", provider, f"hadron.kernels.{provider}.linear.bind")
    plain = Linear(weight, kernel)
    x = torch.full((2, 16), 1 + 2.0**-12)
    together = Linears([plain, exact(plain)])
    expected = x @ weight.weight.float().T
    torch.testing.assert_close(together(x)[1], expected, rtol=1e-6, atol=1e-6)
    if provider == "cpu":
        assert together._run is not None
        assert not torch.equal(together(x)[0], together(x)[1])
