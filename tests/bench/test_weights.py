"""Random weights are sound, and copies lie where they should: apart, off a cache line, all different memory."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from hadron.bench.kernels import SCHEMES, choose
from hadron.bench.limits import Arena
from hadron.bench.weights import LINE, OFFSET, Space, random_weight, weight_bytes
from hadron.kernels.reference.dequantize import dequantize
from hadron.quantization.scheme import parse_scheme

MORE = (
    "f32",
    "f16",
    "fp8_e4m3_tensor",
    "mxfp6_e2m3",
    "mxfp8_e4m3",
    "int8_tensor",
    "int4_group_32_asym",
    "int4_channel",
)


@pytest.mark.parametrize("name", (*SCHEMES, *MORE))
def test_values_are_finite_and_a_copy_has_the_same(name: str) -> None:
    weight = random_weight(parse_scheme(name), 192, 256)
    values = dequantize(weight)
    assert values.shape == (192, 256)
    assert bool(torch.isfinite(values).all())
    assert float(values.abs().max()) > 0
    copy = Space(Arena(1 << 21)).copy(weight)
    assert torch.equal(dequantize(copy), values)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mxfp4", 192 * 256 // 2 + 192 * 8),
        ("nvfp4", 192 * 256 // 2 + 192 * 16 + 4),
        ("fp8_e4m3_block_128x128", 192 * 256 + 2 * 2 * 4),
        ("fp8_e4m3_channel", 192 * 256 + 192 * 4),
        ("bf16", 192 * 256 * 2),
    ],
)
def test_bytes_are_those_of_codes_and_scales(name: str, expected: int) -> None:
    assert weight_bytes(random_weight(parse_scheme(name), 192, 256)) == expected


def test_copies_fill_the_arena_and_do_not_overlap() -> None:
    arena = Arena(1 << 20)
    weight = random_weight(parse_scheme("mxfp4"), 64, 256)
    space = Space(arena)
    copies = list(space.copies(weight))
    need = 64 * 128 + 64 * 8
    assert len(copies) == space.room(weight) == ((1 << 20) - OFFSET) // need
    spans = sorted(
        (t.data_ptr(), t.data_ptr() + t.numel()) for c in copies for t in (c.weight, c.scale) if t is not None
    )
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    base = arena.tensor.data_ptr()
    assert {(start - base) % LINE for start, _ in spans} == {OFFSET}


def test_a_full_arena_starts_over() -> None:
    space = Space(Arena(1 << 14))
    weight = random_weight(parse_scheme("bf16"), 32, 64)
    first, second = space.copy(weight), space.copy(weight)
    for _ in range(10):
        third = space.copy(weight)
    assert first.weight.data_ptr() != second.weight.data_ptr()
    assert third.weight.data_ptr() >= first.weight.data_ptr()


def test_one_token_takes_other_experts_every_time() -> None:
    taken = [choose(1, 20, 8, turn).flatten().tolist() for turn in range(5)]
    assert taken[0] == list(range(8))
    assert taken[2] == [0, 1, 2, 3, 16, 17, 18, 19]
    assert sorted(e for ids in taken for e in ids) == sorted([*range(20)] * 2)


def test_several_tokens_take_different_experts_in_ascending_order() -> None:
    ids = choose(64, 16, 4, 0)
    assert ids.shape == (64, 4)
    assert bool((ids[:, 1:] > ids[:, :-1]).all())
    assert len(torch.unique(ids)) == 16
