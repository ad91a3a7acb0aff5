"""Native rows of a table: exact, at any address."""

from __future__ import annotations

import pytest
import torch

from hadron.kernels.cpu import embedding
from hadron.kernels.reference import embedding as reference
from tests.kernels.levels import every_level, generator, handle, needs_native, unaligned

pytestmark = needs_native


@every_level
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [1, 63, 4096])
def test_rows_are_exact(isa: str, stored: torch.dtype, hidden: int) -> None:
    table = unaligned(torch.randn(19, hidden, generator=generator(0)).to(stored))
    ids = torch.tensor([0, 18, 3, 3, 17] * 9)
    for threads in (1, 2, 4):
        found = embedding.rows(table, ids, threads=threads, level=handle(isa))
        assert torch.equal(found, reference.rows(table, ids))


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
