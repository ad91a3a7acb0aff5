"""The native router at every level: choices written out in the definition, scores in float32."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hadron.kernels.cpu import native
from hadron.kernels.cpu.linear import bind as bind_product
from hadron.kernels.cpu.router import bind
from hadron.kernels.reference.dequantize import dequantize
from hadron.kernels.reference.router import route
from hadron.kernels.stored import StoredWeight
from hadron.quantization.scheme import parse_scheme
from tests.kernels.levels import THREADS, batches, every_level, generator, near, needs_native, unaligned
from tests.kernels.test_native import random_weight

pytestmark = needs_native
SCHEMES = ("f32", "f16", "bf16", "fp8_e4m3_block_128x128", "mxfp4", "int8_channel", "int4_group_32_asym")


@dataclass(frozen=True)
class Sizes:
    top_k: int
    groups: int = 1
    topk_groups: int = 1
    normalize: bool = True
    scaling: float = 2.5


class Gate:
    """A product as a layer holds it."""

    def __init__(self, weight: StoredWeight) -> None:
        self.run = bind_product(weight, None, 1)


def plain(values: torch.Tensor) -> Gate:
    scheme = parse_scheme({torch.float32: "f32", torch.bfloat16: "bf16"}[values.dtype])
    packing = random_weight(scheme, 1, 4).packing
    return Gate(StoredWeight(scheme, packing, (values.shape[0], values.shape[1]), unaligned(values)))


@every_level
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("sizes", [Sizes(4), Sizes(6, 8, 3), Sizes(1, 2, 1, False, 1.0), Sizes(40)])
def test_a_choice_equals_its_definition(isa: str, name: str, sizes: Sizes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.ENVIRONMENT, isa)
    weight = random_weight(parse_scheme(name), 40, 200, seed=1)
    values = dequantize(weight)
    x = torch.randn(9, 200, generator=generator(2)) / values.double().square().sum(dim=1).mean().sqrt().float()
    bias = unaligned(torch.rand(40, generator=generator(3)) * 0.1)
    ids, weights = bind(Gate(weight), bias, sizes, threads=2)(x)
    expected, expected_weights = route(x, values, bias, sizes)
    assert torch.equal(ids, expected) and ids.dtype is torch.int64
    near("router", weights, expected_weights)


@every_level
def test_ties_go_to_the_lowest_expert(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.ENVIRONMENT, isa)
    gate = plain(torch.ones(24, 64))
    ids, weights = bind(gate, torch.zeros(24), Sizes(3, 4, 2))(torch.ones(2, 64) / 64)
    assert ids.tolist() == [[0, 1, 2]] * 2 and torch.allclose(weights, torch.full((2, 3), 2.5 / 3))
    bias = torch.zeros(24)
    bias[[7, 20, 21, 22]] = 1.0
    ids, _ = bind(gate, bias, Sizes(3))(torch.ones(1, 64) / 64)
    assert ids.tolist() == [[7, 20, 21]]


@every_level
def test_activations_are_not_rounded(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two experts that bfloat16 activations could not tell apart."""
    monkeypatch.setenv(native.ENVIRONMENT, isa)
    gate = torch.zeros(2, 64)
    gate[0, 0], gate[1, 1] = 1.0, 1.0
    x = torch.zeros(2, 64)
    x[0, :2], x[1, :2] = torch.tensor([1.0, 1.0 + 2.0**-12]), torch.tensor([1.0 + 2.0**-12, 1.0])
    ids, _ = bind(plain(gate.bfloat16()), torch.zeros(2), Sizes(1))(x)
    assert ids.tolist() == [[1], [0]]


@every_level
@pytest.mark.parametrize("name", ["bf16", "mxfp4"])
def test_a_token_has_the_same_bits_in_every_batch_and_on_any_number_of_threads(
    isa: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(native.ENVIRONMENT, isa)
    gate = Gate(random_weight(parse_scheme(name), 45, 1064, seed=4))
    x, bias = torch.randn(513, 1064, generator=generator(5)) * 0.01, torch.rand(45, generator=generator(6))
    one = bind(gate, bias, Sizes(5))
    alone = [torch.cat(parts) for parts in zip(*(one(row) for row in x.split(1)), strict=True)]
    for threads in THREADS:
        several = bind(gate, bias, Sizes(5), threads=threads)
        for rows in batches(513):
            for found, expected in zip(several(x[rows]), alone, strict=True):
                assert torch.equal(found, expected[rows])


@every_level
def test_nan_is_chosen_as_a_sort_would_and_stays_in_the_weights(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.ENVIRONMENT, isa)
    values = torch.randn(16, 64, generator=generator(7))
    values[11, 3] = math.nan
    x = torch.randn(2, 64, generator=generator(8))
    x[1, 0] = math.nan
    bias = torch.zeros(16)
    for sizes in (Sizes(3), Sizes(3, 4, 2)):
        ids, weights = bind(plain(values), bias, sizes)(x)
        expected, expected_weights = route(x, values, bias, sizes)
        assert torch.equal(ids, expected) and 11 in ids[0]
        assert torch.equal(weights.isnan(), expected_weights.isnan()) and weights.isnan().all()


def test_sizes_that_do_not_fit_are_refused() -> None:
    gate = plain(torch.ones(8, 16))
    for sizes in (Sizes(9), Sizes(2, 8, 2)):
        with pytest.raises(ValueError, match="sizes do not fit"):
            bind(gate, torch.zeros(8), sizes)(torch.ones(1, 16))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), groups=st.sampled_from([1, 2, 4]), normalize=st.booleans())
def test_any_choice_among_exact_scores(data: st.DataObject, groups: int, normalize: bool) -> None:
    """Scores of a few values, so that ties are common and rounding cannot break them."""
    experts = groups * data.draw(st.integers(2, 9))
    kept = data.draw(st.integers(1, groups))
    top_k = data.draw(st.integers(1, experts // groups * kept))
    levels = data.draw(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=experts, max_size=experts))
    bias = torch.tensor(data.draw(st.lists(st.sampled_from([0.0, 4.0]), min_size=experts, max_size=experts)))
    values = torch.tensor(levels).unsqueeze(1).repeat(1, 3) * torch.tensor([1.0, 0.0, 0.0])
    x, sizes = torch.tensor([[1.0, 5.0, -3.0]]), Sizes(top_k, groups, kept, normalize)
    ids, weights = bind(plain(values), bias, sizes)(x)
    expected, expected_weights = route(x, values, bias, sizes)
    assert torch.equal(ids, expected)
    near("router", weights, expected_weights)
