"""Time goes to the operation that spent it, once, and what remains is outside; a held clock says how much."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hadron.bench.profile import Profile
from hadron.kernels.cpu import native
from hadron.kernels.provider import Provider
from hadron.layers.linear import Linear, Linears


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_operation_within_another_counts_once() -> None:
    clock = Clock()
    profile = Profile(clock)

    def product(x: int) -> int:
        clock.now += 2.0
        return x + 1

    inner = profile.operation("linear", product)

    def block(x: int) -> int:
        clock.now += 1.0
        return inner(inner(x))

    outer = profile.operation("moe", block)
    for _ in range(2):
        with profile.step():
            clock.now += 3.0
            assert outer(1) == 3
    found = profile.breakdown(layers=2)
    assert found.ms == pytest.approx(8000)
    assert {(s.name, s.calls, round(s.ms), s.share) for s in found.operations} == {
        ("linear", 2.0, 4000, 0.5), ("moe", 1.0, 1000, 0.125),
    }  # fmt: skip
    assert (found.outside.ms, found.outside.share) == pytest.approx((3000, 0.375))


def test_nothing_counts_outside_of_steps() -> None:
    clock = Clock()
    profile = Profile(clock)
    call = profile.operation("norm", lambda: None)
    call()
    with profile.step():
        clock.now += 1.0
    found = profile.breakdown(layers=1)
    assert (found.operations, found.native, found.native_calls) == ([], [], 0)
    assert found.outside.share == 1.0


def test_what_a_function_binds_is_timed_as_its_operation() -> None:
    clock = Clock()
    profile = Profile(clock)

    def bind(step: float):
        def bound() -> torch.Tensor:
            clock.now += step
            return torch.ones(1)

        return bound

    bound = profile.operation("mlp", bind)(0.5)
    with profile.step():
        assert isinstance(bound(), torch.Tensor)
    (share,) = profile.breakdown(layers=1).operations
    assert (share.name, share.calls, share.ms) == ("mlp", 1.0, pytest.approx(500))


def test_methods_of_what_a_kernel_bound_are_timed_too() -> None:
    clock = Clock()

    class Attention:
        width = 7

        def sparse(self, seconds: float) -> float:
            clock.now += seconds
            return seconds

    Attention.__module__ = "hadron.kernels.cpu.mla"
    profile = Profile(clock)
    bound = profile.operation("mla", Attention)()
    assert bound.width == 7
    with profile.step():
        assert bound.sparse(0.25) == 0.25
        clock.now += 0.75
    found = profile.breakdown(layers=1)
    assert [(s.name, s.calls, s.share) for s in found.operations] == [("mla", 1.0, pytest.approx(0.25))]


def test_an_error_leaves_the_account_straight() -> None:
    clock = Clock()
    profile = Profile(clock)

    def fails() -> None:
        clock.now += 1.0
        raise ArithmeticError

    call = profile.operation("norm", fails)
    with profile.step(), pytest.raises(ArithmeticError):
        call()
    assert profile.breakdown(layers=1).outside.ms == pytest.approx(0)


def test_native_calls_are_counted_a_step_and_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()

    def linear() -> None:
        clock.now += 0.25

    class Mla:
        def __init__(self, heads: int) -> None:
            self.heads = heads

        def sparse_attend(self, tokens: int) -> int:
            clock.now += 0.5
            return tokens * self.heads

    monkeypatch.setattr(native, "_native", SimpleNamespace(linear=linear, Mla=Mla, levels=tuple))
    profile = Profile(clock)
    with profile.installed():
        call = native.extension().linear
        attention = native.extension().Mla(3)
        assert isinstance(attention, Mla)
        for _ in range(2):
            with profile.step():
                clock.now += 1.0
                assert attention.sparse_attend(2) == 6
                for _ in range(7):
                    call()
    found = profile.breakdown(layers=4)
    assert (found.native_calls, found.native_calls_a_layer) == (8, 2)
    assert [(s.name, s.calls, s.ms) for s in found.native] == [("linear", 7, 1750), ("sparse_attend", 1, 500)]
    assert found.native_share == pytest.approx(2.25 / 3.25)


@pytest.mark.skipif(not native.levels(), reason="this build has no native kernels: install with a C++ compiler")
def test_methods_of_native_objects_are_counted_too() -> None:
    """A subclass of a class of the extension is made like it, and taken where it is."""
    from hadron.kernels.cpu.linear import Product
    from tests.kernels.test_native import parse_scheme, random_weight

    profile = Profile()
    with profile.installed():
        product = Product(random_weight(parse_scheme("bf16"), 8, 16), None, 1)
        together = Product.group([product, product])
        weights = native.extension().WeightList()
        with profile.step():
            weights.add(product.native)
            assert torch.equal(*together([torch.ones(1, 16)] * 2))
    assert {s.name: s.calls for s in profile.breakdown(layers=1).native} == {"add": 1, "linears": 1}


def test_everything_is_put_back() -> None:
    before = (Provider.function, Linear.__call__, Linears.__call__, Linear.dequantized, native._native)
    with pytest.raises(KeyError), Profile().installed():
        assert Provider.function is not before[0]
        raise KeyError
    assert (Provider.function, Linear.__call__, Linears.__call__, Linear.dequantized, native._native) == before


def test_a_reset_forgets() -> None:
    clock = Clock()
    profile = Profile(clock)
    with profile.step():
        clock.now += 5.0
    profile.reset()
    with profile.step():
        clock.now += 1.0
    assert profile.breakdown(layers=1).ms == pytest.approx(1000)
