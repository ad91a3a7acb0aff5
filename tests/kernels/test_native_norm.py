"""Native norms at every level: against the definition, and bit for bit against themselves."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hadron.kernels.cpu import norm
from hadron.kernels.reference import norm as reference
from tests.kernels.levels import THREADS, batches, every_level, generator, handle, near, needs_native, unaligned

pytestmark = needs_native
DTYPES = (torch.float32, torch.bfloat16)


@every_level
@pytest.mark.parametrize("size", [1, 15, 16, 64, 203, 4096])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_equal_their_definition(isa: str, size: int, stored: torch.dtype, dtype: torch.dtype) -> None:
    level, g = handle(isa), generator(size)
    x, gate = (torch.randn(5, 3, size, generator=g).to(dtype) for _ in range(2))
    weight, bias = (unaligned(torch.randn(size, generator=g).to(stored)) for _ in range(2))
    for out in DTYPES:
        near("norm", norm.rms_norm(x, weight, 1e-5, out, level=level), reference.rms_norm(x, weight, 1e-5, out))
        near("norm", norm.rms_norm(x, None, 1e-5, out, level=level), reference.rms_norm(x, None, 1e-5, out))
        near("norm", norm.gated_rms_norm(x, gate, weight, 1e-5, out, level=level),
             reference.gated_rms_norm(x, gate, weight, 1e-5, out))  # fmt: skip
        several = [
            (x, weight, None, 1e-5, out),
            (gate[:, 0], None, None, 1e-2, torch.float32),
            (gate, weight, bias, 1e-1, out),
        ]
        together, defined = norm.norms(several, level=level), reference.norms(several)
        for one, found, expected in zip(several, together, defined, strict=True):
            assert torch.equal(found, norm.norms([one], level=level)[0]) and found.dtype == one[-1]
            near("norm", found, expected)
        near("norm", norm.layer_norm(x, weight, bias, 1e-1, out, level=level),
             reference.layer_norm(x, weight, bias, 1e-1, out))  # fmt: skip


@every_level
def test_a_row_has_the_same_bits_in_every_batch_and_on_any_number_of_threads(isa: str) -> None:
    level, g = handle(isa), generator(1)
    size = 1027
    x, gate = torch.randn(513, size, generator=g), torch.randn(513, size, generator=g)
    weight, bias = torch.randn(size, generator=g), torch.randn(size, generator=g)
    for threads in THREADS:
        bound = {"threads": threads, "level": level}
        rms = partial(norm.rms_norm, weight=weight, eps=1e-6, dtype=torch.float32, **bound)
        layer = partial(norm.layer_norm, weight=weight, bias=bias, eps=1e-6, dtype=torch.float32, **bound)
        alone = [torch.cat([f(row) for row in x.split(1)]) for f in (rms, layer)]
        gated = partial(norm.gated_rms_norm, weight=weight, eps=1e-6, dtype=torch.float32, **bound)
        gates = torch.cat([gated(x[i : i + 1], gate[i : i + 1]) for i in range(len(x))])
        for rows in batches(513):
            assert torch.equal(rms(x[rows]), alone[0][rows])
            assert torch.equal(layer(x[rows]), alone[1][rows])
            assert torch.equal(gated(x[rows], gate[rows]), gates[rows])


def test_rows_that_lie_apart_are_read_where_they_are() -> None:
    joint, weight = torch.randn(6, 40, generator=generator(2)), torch.ones(24)
    for part in (joint[:, :24], joint[:, 16:], joint.t()[:24].t(), joint[::2, :24]):
        assert torch.equal(
            norm.rms_norm(part, weight, 1e-6, torch.float32),
            norm.rms_norm(part.contiguous(), weight, 1e-6, torch.float32),
        )


@every_level
def test_nan_and_infinity_stay_visible(isa: str) -> None:
    level, weight = handle(isa), torch.ones(40)
    x = torch.ones(3, 40)
    x[1, 7], x[2, 39] = math.nan, math.inf
    gate = torch.zeros(3, 40)
    gate[0, 3] = math.nan
    assert norm.rms_norm(x, weight, 1e-6, torch.float32, level=level).isnan().any(dim=1).tolist() == [False, True, True]
    found = norm.gated_rms_norm(x, gate, weight, 1e-6, torch.bfloat16, level=level)
    assert found[0].isnan().nonzero().tolist() == [[3]] and bool(found[1].isnan().all())
    assert norm.layer_norm(x, weight, weight, 1e-6, torch.float32, level=level)[1:].isnan().all()


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 9), size=st.integers(1, 300), seed=st.integers(0, 1000), threads=st.integers(1, 4))
def test_any_shape(rows: int, size: int, seed: int, threads: int) -> None:
    g = generator(seed)
    x, weight = torch.randn(rows, size, generator=g) * 10, torch.randn(size, generator=g)
    found = norm.rms_norm(x, weight, 1e-5, torch.float32, threads=threads)
    near("norm", found, reference.rms_norm(x, weight, 1e-5, torch.float32))
    found = norm.layer_norm(x, weight, weight, 1e-1, torch.float32, threads=threads)
    near("norm", found, reference.layer_norm(x, weight, weight, 1e-1, torch.float32))
