"""Native rows of a table: exact, at any address."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hadron.kernels.cpu import embedding
from hadron.kernels.reference import embedding as reference
from tests.kernels.levels import THREADS, batches, every_level, generator, handle, needs_native, unaligned

pytestmark = needs_native


@every_level
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [1, 63, 4096])
def test_rows_are_exact(isa: str, stored: torch.dtype, hidden: int) -> None:
    table = unaligned(torch.randn(19, hidden, generator=generator(0)).to(stored))
    ids = torch.randint(0, 19, (512,), generator=generator(1))
    expected = reference.rows(table, ids)
    for threads in THREADS:
        for rows in batches(512):
            assert torch.equal(embedding.rows(table, ids[rows], threads=threads, level=handle(isa)), expected[rows])


@every_level
def test_nan_infinity_and_subnormals_come_through(isa: str) -> None:
    bits = torch.tensor([[0x7FC0, 0x7F80, 0xFF80, 0x0001, 0x8000, 0x3F80]], dtype=torch.int32).to(torch.int16)
    found = embedding.rows(bits.view(torch.bfloat16), torch.tensor([0]), level=handle(isa))
    expected = bits.view(torch.bfloat16).float()
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_an_id_that_is_no_row_is_refused() -> None:
    table = torch.zeros(4, 8)
    for bad in (-1, 4):
        with pytest.raises(IndexError, match="token id is out of range"):
            embedding.rows(table, torch.tensor([0, bad]))


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 40), hidden=st.integers(1, 200), tokens=st.integers(1, 50), seed=st.integers(0, 1000))
def test_any_shape(rows: int, hidden: int, tokens: int, seed: int) -> None:
    g = generator(seed)
    table = unaligned(torch.randn(rows, hidden, generator=g).bfloat16())
    ids = torch.randint(0, rows, (tokens,), generator=g)
    assert torch.equal(embedding.rows(table, ids, threads=2), reference.rows(table, ids))
