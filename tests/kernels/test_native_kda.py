"""The native KDA block at every level: against the definition, and bit for bit however a sequence is split."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hadron.kernels.cpu import kda as native
from hadron.kernels.reference import kda as reference
from hadron.layers.dimensions import KdaDimensions
from tests.kernels.levels import BATCHES, THREADS, every_level, generator, handle, near, needs_native, unaligned

pytestmark = needs_native
SLOTS = 4


class Case:
    """A layer's parameters, the inputs of a step, and states to start from."""

    def __init__(
        self, heads: int, size: int, kernel: int, bound: float | None, tokens: int, seed: int,
        dtype: torch.dtype = torch.float32, stored: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        g, width = generator(seed), heads * size
        self.dims = KdaDimensions(64, heads, size, kernel, bound, 1e-5)
        self.convolutions = [unaligned(torch.randn(width, kernel, generator=g).to(stored)) for _ in range(3)]
        self.a_log = unaligned(torch.rand(heads, generator=g) * 2 - 1)
        self.dt_bias = unaligned(torch.randn(width, generator=g))
        self.norm = unaligned(torch.randn(size, generator=g).to(stored))
        shapes = [width] * 4 + [heads, width]
        self.inputs = [torch.randn(tokens, n, generator=g).to(dtype) for n in shapes]
        self.matrices = torch.randn(SLOTS, heads, size, size, generator=g)
        self.windows = torch.randn(SLOTS, 3 * width, kernel - 1, generator=g).to(dtype)

    def bind(self, module: Any, **bound: Any) -> Callable[..., torch.Tensor]:
        block: Callable[..., torch.Tensor] = module.bind(
            self.convolutions, self.a_log, self.dt_bias, self.norm, self.dims, **bound
        )
        return block

    def run(
        self, block: Callable[..., torch.Tensor], slots: Sequence[int], lengths: Sequence[int], cuts: Sequence[int]
    ) -> list[torch.Tensor]:
        """Outputs and states; each request's tokens in steps of `cuts`, repeated as often as needed."""
        matrices, windows = self.matrices.clone(), self.windows.clone()
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        done, outputs = [0] * len(lengths), [[] for _ in lengths]  # type: list[int], list[list[torch.Tensor]]
        step = 0
        while any(d < n for d, n in zip(done, lengths, strict=True)):
            some = [min(cuts[step % len(cuts)], n - d) for d, n in zip(done, lengths, strict=True)]
            live = [i for i, count in enumerate(some) if count]
            rows = torch.cat([torch.arange(starts[i] + done[i], starts[i] + done[i] + some[i]) for i in live])
            parts = [x[rows] for x in self.inputs]
            out = block(*parts, matrices, windows, [slots[i] for i in live], [some[i] for i in live])
            for i, piece in zip(live, out.split([some[i] for i in live]), strict=True):
                outputs[i].append(piece)
                done[i] += some[i]
            step += 1
        return [torch.cat([piece for pieces in outputs for piece in pieces]), matrices, windows]


@every_level
@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize(
    ("heads", "size", "kernel"), [(3, 128, 4), (2, 64, 4), (3, 20, 4), (2, 33, 2), (1, 7, 5), (5, 80, 3)]
)
def test_the_block_equals_its_definition(isa: str, bound: float | None, heads: int, size: int, kernel: int) -> None:
    case = Case(heads, size, kernel, bound, 50, seed=1, stored=torch.bfloat16)
    arguments = ((2, 0), (38, 12), (50,))
    found = case.run(case.bind(native, threads=2, level=handle(isa)), *arguments)
    expected = case.run(case.bind(reference), *arguments)
    for part, definition in zip(found, expected, strict=True):
        near("kda", part, definition)
    untouched = [1, 3]
    assert torch.equal(found[1][untouched], case.matrices[untouched])
    assert torch.equal(found[2], expected[2]), "a window holds inputs, not results"


@every_level
def test_bfloat16_activations(isa: str) -> None:
    case = Case(2, 64, 4, -5.0, 20, seed=2, dtype=torch.bfloat16)
    found = case.run(case.bind(native, level=handle(isa)), (1,), (20,), (20,))
    expected = case.run(case.bind(reference), (1,), (20,), (20,))
    near("kda", found[0], expected[0])
    near("kda", found[1], expected[1])
    assert torch.equal(found[2], expected[2])


@every_level
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "size"), [(3, 128), (2, 52)])
def test_bits_do_not_depend_on_splits_batches_or_threads(isa: str, heads: int, size: int, dtype: torch.dtype) -> None:
    case = Case(heads, size, 4, -5.0, 561, seed=3, dtype=dtype)
    slots, lengths = (3, 0, 2), (512, 12, 37)
    block = case.bind(native, level=handle(isa))
    expected = case.run(block, slots, lengths, (1,))
    for threads in THREADS:
        several = case.bind(native, threads=threads, level=handle(isa))
        for cuts in (*((batch,) for batch in BATCHES), (1, 2), (7, 1, 5), (31, 33), (64,), (4, 1)):
            for found, part in zip(case.run(several, slots, lengths, cuts), expected, strict=True):
                assert torch.equal(found, part), (threads, cuts)
    # Alone, and last where it was first.
    alone = Case(heads, size, 4, -5.0, 561, seed=3, dtype=dtype)
    alone.inputs = [x[512:524] for x in case.inputs]
    out, matrices, windows = alone.run(block, (0,), (12,), (12,))
    assert torch.equal(out, expected[0][512:524])
    assert torch.equal(matrices[0], expected[1][0]) and torch.equal(windows[0], expected[2][0])


@every_level
@pytest.mark.parametrize("part", range(6))
def test_nan_stays_visible(isa: str, part: int) -> None:
    case = Case(2, 32, 4, None, 3, seed=4)
    case.inputs[part][1, 0] = math.nan
    out = case.run(case.bind(native, level=handle(isa)), (0,), (3,), (3,))[0]
    assert not out[0].isnan().any(), "what comes before does not see it"
    assert not out[:, 32:].isnan().any(), "nor does another head"
    assert out[1, :32].isnan().any()


def test_extreme_gates_give_the_limits_of_their_definition() -> None:
    for bound in (-5.0, None):
        case = Case(1, 16, 4, bound, 8, seed=5)
        case.inputs[3][:4], case.inputs[3][4:] = 200.0, -200.0
        case.inputs[4][::2], case.inputs[5][1::2] = -300.0, 300.0
        found = case.run(case.bind(native), (0,), (8,), (8,))
        for part, expected in zip(found, case.run(case.bind(reference), (0,), (8,), (8,)), strict=True):
            near("kda", part, expected)


@settings(max_examples=30, deadline=None)
@given(
    heads=st.integers(1, 4), size=st.integers(1, 140), kernel=st.integers(2, 5), tokens=st.integers(1, 70),
    cut=st.integers(1, 70), bounded=st.booleans(), seed=st.integers(0, 1000),
)  # fmt: skip
def test_any_shape_and_any_split(
    heads: int, size: int, kernel: int, tokens: int, cut: int, bounded: bool, seed: int
) -> None:
    case = Case(heads, size, kernel, -5.0 if bounded else None, tokens, seed)
    block = case.bind(native, threads=2)
    whole, split = case.run(block, (1,), (tokens,), (tokens,)), case.run(block, (1,), (tokens,), (cut,))
    for a, b, definition in zip(whole, split, case.run(case.bind(reference), (1,), (tokens,), (tokens,)), strict=True):
        assert torch.equal(a, b)
        near("kda", a, definition)
