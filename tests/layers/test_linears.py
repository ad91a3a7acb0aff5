"""`Linears`: one call where the kernels can, the same results where they cannot."""

from __future__ import annotations

import pytest
import torch

from hadron.kernels.cpu import native
from hadron.kernels.select import KernelChoice, select
from hadron.kernels.stored import StoredWeight
from hadron.layers.linear import Linear, Linears
from hadron.quantization.dtypes import PLAIN
from hadron.quantization.scheme import Packing, parse_scheme

providers = pytest.mark.parametrize(
    "provider",
    [
        "reference",
        pytest.param("cpu", marks=pytest.mark.skipif(not native.levels(), reason="needs a build with native kernels")),
    ],
)


def linear(provider: str, rows: int, columns: int, quantize: bool = False) -> Linear:
    scheme = parse_scheme(PLAIN["BF16"])
    choice = select("linear", scheme, providers=(provider,))
    assert isinstance(choice, KernelChoice)
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).bfloat16()
    weight = StoredWeight(scheme, Packing.ROW_MAJOR, (rows, columns), values, None, None, None)
    return Linear(weight, choice, quantize=(lambda x: x.round()) if quantize else None)


@providers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_together_is_what_each_gives(provider: str, dtype: torch.dtype) -> None:
    x, other = torch.randn(3, 64).to(dtype), torch.randn(3, 32).to(dtype)
    first, second, third = linear(provider, 5, 64), linear(provider, 40, 64), linear(provider, 7, 32)
    for found, expected in zip(Linears([first, second])(x), (first(x), second(x)), strict=True):
        assert torch.equal(found, expected) and found.dtype == dtype
    found = Linears([first, third, second])(x, other, x)
    for one, expected in zip(found, (first(x), third(other), second(x)), strict=True):
        assert torch.equal(one, expected)


@providers
def test_products_that_quantize_their_input_run_apart(provider: str) -> None:
    x = torch.randn(3, 64)
    plain, rounding = linear(provider, 5, 64), linear(provider, 6, 64, quantize=True)
    for found, expected in zip(Linears([plain, rounding])(x), (plain(x), rounding(x)), strict=True):
        assert torch.equal(found, expected)
    assert not torch.equal(rounding(x), rounding.run(x))


@pytest.mark.skipif(not native.levels(), reason="needs a build with native kernels")
def test_native_products_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    extension = native._native

    class Spy:
        def __getattr__(self, name: str) -> object:
            if name in ("linear", "linears"):
                calls.append(name)
            return getattr(extension, name)

    monkeypatch.setattr(native, "_native", Spy())
    together = Linears([linear("cpu", 5, 64), linear("cpu", 6, 64)])
    calls.clear()
    together(torch.randn(2, 64))
    assert calls == []  # bound once, when built
    assert together._run is not None
