"""Native hyper-connections at every level: against the definition, and bit for bit against themselves."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hadron.kernels.cpu import hyper_connection as native
from hadron.kernels.reference import hyper_connection as reference
from hadron.layers.dimensions import HyperConnectionDimensions
from tests.kernels.levels import THREADS, batches, every_level, generator, handle, near, needs_native, unaligned

pytestmark = needs_native


def site(m: int, hidden: int, stored: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fn, base, scale at odd addresses."""
    g, rows = generator(seed), (2 + m) * m
    fn = torch.randn(rows, m * hidden, generator=g) * (m * hidden) ** -0.5
    base, scale = torch.randn(rows, generator=g), torch.rand(3, generator=g) + 0.5
    return unaligned(fn.to(stored)), unaligned(base.to(stored)), unaligned(scale, 3)


def norm(hidden: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, float, torch.dtype]:
    """Weight at an odd address, eps and dtype of the norm of a block's input."""
    return unaligned(torch.rand(hidden, generator=generator(9)).bfloat16()), 1e-5, dtype


def dims(m: int, hidden: int) -> HyperConnectionDimensions:
    return HyperConnectionDimensions(hidden, m, 20, 1e-6, 1e-6)


@every_level
@pytest.mark.parametrize(("m", "hidden"), [(4, 256), (4, 37), (2, 64), (3, 50), (1, 8)])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_site_equals_its_definition(isa: str, m: int, hidden: int, stored: torch.dtype) -> None:
    level, d, parameters = handle(isa), dims(m, hidden), site(m, hidden, stored, m)
    streams = torch.randn(7, m, hidden, generator=generator(1)) * 3
    pairs = [(native.mixes(streams, *parameters, d, level=level), reference.mixes(streams, *parameters, d))]
    for wanted in (torch.float32, torch.bfloat16, torch.float16):
        given = (streams, *parameters, d, *norm(hidden, wanted))
        pairs.append((native.enter(*given, level=level), reference.enter(*given)))
        assert pairs[-1][0][0].dtype == wanted
    for all_found, all_expected in pairs:
        for found, expected in zip(all_found, all_expected, strict=True):
            near("hyper_connection", found, expected)
    pre, post, comb = reference.mixes(streams, *parameters, d)
    near("hyper_connection", native.collapse(streams, pre, level=level), reference.collapse(streams, pre))
    near("hyper_connection", native.mean(streams, level=level), reference.mean(streams))
    for dtype in (torch.float32, torch.bfloat16):
        output = torch.randn(7, hidden, generator=generator(2)).to(dtype)
        near("hyper_connection", native.spread(output, post, comb, streams, level=level),
             reference.spread(output, post, comb, streams))  # fmt: skip


@every_level
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_in_every_batch_and_on_any_number_of_threads(isa: str, stored: torch.dtype) -> None:
    m, hidden = 4, 270
    d, parameters = dims(m, hidden), site(m, hidden, stored, 3)
    streams = torch.randn(513, m, hidden, generator=generator(4))
    output = torch.randn(513, hidden, generator=generator(5))

    def run(rows: slice, threads: int) -> list[torch.Tensor]:
        bound = {"threads": threads, "level": handle(isa)}
        part = streams[rows]
        inner, post, comb = native.enter(part, *parameters, d, *norm(hidden), **bound)
        return [inner, post, comb, native.spread(output[rows], post, comb, part, **bound)]

    alone = [torch.cat(parts) for parts in zip(*(run(slice(t, t + 1), 1) for t in range(513)), strict=True)]
    for threads in THREADS:
        for rows in batches(513):
            for found, expected in zip(run(rows, threads), alone, strict=True):
                assert torch.equal(found, expected[rows]), (threads, rows)


@every_level
def test_nan_reaches_the_blocks_input_and_every_stream(isa: str) -> None:
    d, parameters = dims(4, 40), site(4, 40, torch.float32, 6)
    streams = torch.ones(2, 4, 40)
    streams[1, 2, 5] = math.nan
    inner, post, comb = native.enter(streams, *parameters, d, *norm(40), level=handle(isa))
    assert not inner[0].isnan().any() and inner[1].isnan().all()
    assert post[1].isnan().all() and comb[1].isnan().all()
    following = native.spread(torch.ones(2, 40), post, comb, streams, level=handle(isa))
    assert not following[0].isnan().any() and following[1].isnan().all()


@settings(max_examples=30, deadline=None)
@given(m=st.integers(1, 6), hidden=st.integers(1, 90), tokens=st.integers(1, 6), seed=st.integers(0, 1000))
def test_any_shape(m: int, hidden: int, tokens: int, seed: int) -> None:
    d, parameters = dims(m, hidden), site(m, hidden, torch.float32, seed)
    streams = torch.randn(tokens, m, hidden, generator=generator(seed))
    found = native.enter(streams, *parameters, d, *norm(hidden), threads=3)
    for part, expected in zip(found, reference.enter(streams, *parameters, d, *norm(hidden)), strict=True):
        near("hyper_connection", part, expected)
