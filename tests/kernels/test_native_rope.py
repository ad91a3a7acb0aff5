"""Native rotary embedding at every level, far positions included."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hadron.kernels.cpu import rope
from hadron.kernels.reference import rope as reference
from tests.kernels.levels import THREADS, batches, every_level, generator, handle, near, needs_native

pytestmark = needs_native


@every_level
@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(7, 64), (7, 5, 64), (7, 3, 6), (7, 2)])
def test_a_rotation_equals_its_definition(
    isa: str, interleave: bool, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = torch.randn(*shape, generator=generator(0)).to(dtype)
    positions = torch.tensor([0, 1, 63, 4_097, 131_072, 1_000_003, 1_048_575])
    for theta in (1e4, 8e6):
        found = rope.rotate(x, positions, theta, interleave, level=handle(isa))
        expected = reference.rotate(x, positions, theta, interleave)
        near("rope", found.float(), expected.float()) if dtype is torch.float32 else torch.testing.assert_close(
            found, expected, rtol=2**-7, atol=2**-7
        )


@every_level
def test_parts_in_one_call_are_those_of_each_alone(isa: str) -> None:
    parts = [
        (torch.randn(5, 4, 96, generator=generator(1)), 32, 64, 1e4, True),
        (torch.randn(5, 64, generator=generator(2)).bfloat16(), 0, 64, 1e4, False),
        (torch.randn(5, 3, generator=generator(4)), 1, 0, 1e4, True),
        (torch.randn(5, 3, 2, 80, generator=generator(3)).transpose(1, 2)[:, 0], 16, 32, 8e6, True),
    ]
    positions = torch.tensor([0, 1, 63, 4_097, 131_072])
    found = rope.rotate_parts(parts, positions, level=handle(isa))
    for (x, start, size, theta, interleave), y in zip(parts, found, strict=True):
        assert torch.equal(y, rope.rotate_part(x, start, size, positions, theta, interleave, level=handle(isa)))
    assert found[2] is parts[2][0] and rope.rotate_parts(parts[2:3], positions)[0] is parts[2][0]
    for y, defined in zip(found, reference.rotate_parts(parts, positions), strict=True):
        torch.testing.assert_close(y, defined, rtol=2**-7, atol=2**-7)


@every_level
@pytest.mark.parametrize(("start", "size"), [(0, 64), (128, 64), (10, 20), (0, 0), (0, 192)])
def test_a_part_is_rotated_and_the_rest_is_copied(isa: str, start: int, size: int) -> None:
    wide = torch.randn(5, 4, 2, 192, generator=generator(1))
    for x in (wide[:, :, 0], wide[:, 0, 0], wide[:, 1:3, 1]):
        positions = torch.tensor([3, 1, 4, 1, 5])
        found = rope.rotate_part(x, start, size, positions, 1e4, True, level=handle(isa))
        near("rope", found, reference.rotate_part(x, start, size, positions, 1e4, True))
        assert torch.equal(found[..., :start], x[..., :start])
        assert torch.equal(found[..., start + size :], x[..., start + size :])


@every_level
def test_a_token_has_the_same_bits_in_every_batch_and_on_any_number_of_threads(isa: str) -> None:
    x = torch.randn(513, 3, 192, generator=generator(2))
    positions = torch.randint(0, 200_000, (513,), generator=generator(3))
    for threads in THREADS:
        bound = {"threads": threads, "level": handle(isa)}
        alone = torch.cat([
            rope.rotate_part(x[t : t + 1], 128, 64, positions[t : t + 1], 1e4, False, **bound) for t in range(513)
        ])  # fmt: skip
        for rows in batches(513):
            assert torch.equal(rope.rotate_part(x[rows], 128, 64, positions[rows], 1e4, False, **bound), alone[rows])


@every_level
def test_nan_stays_in_its_pair(isa: str) -> None:
    x = torch.ones(1, 8)
    x[0, 3] = math.nan
    found = rope.rotate(x, torch.tensor([9]), 1e4, True, level=handle(isa))
    assert found.isnan().tolist() == [[False, False, True, True, False, False, False, False]]


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 5), heads=st.integers(1, 4), half=st.integers(1, 40), interleave=st.booleans(),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_any_shape(tokens: int, heads: int, half: int, interleave: bool, seed: int) -> None:
    g = generator(seed)
    x = torch.randn(tokens, heads, 2 * half, generator=g)
    positions = torch.randint(0, 10_000, (tokens,), generator=g)
    near("rope", rope.rotate(x, positions, 1e4, interleave), reference.rotate(x, positions, 1e4, interleave))
