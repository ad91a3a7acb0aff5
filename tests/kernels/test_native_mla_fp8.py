"""Native attention over FP8 rows at every level: against the definition, and bit for bit against itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hadron.kernels.cpu import native
from hadron.kernels.reference import mla as reference
from hadron.kernels.reference.mla import encode_rows, row_values
from hadron.kernels.stored import StoredWeight
from hadron.quantization.scheme import F32, Packing
from tests.kernels.test_native_mla import DTYPES, TOLERANCE, Case, level, near

__all__ = ["level"]  # a fixture

pytestmark = pytest.mark.skipif(
    not native.levels(), reason="this build has no native kernels: install with a C++ compiler to run these"
)


class Fp8Case(Case):
    """The same with the pages' rows encoded; the definition reads those too."""

    def __init__(self, scheme: str = "bf16", **sizes: Any) -> None:
        super().__init__(scheme, **sizes)
        pages, size, width = self.pages.shape
        self.rank = width - self.rope
        rows = encode_rows(self.pages.view(-1, width), self.rank)
        self.pages = rows.view(pages, size, -1)


#: levels that widen FP8 rows to bfloat16
ROUNDS = ("avx512_bf16", "avx512_amx")


@pytest.mark.parametrize("rope", [0, 3, 64])
@pytest.mark.parametrize("rank", [1, 20, 33, 512])
def test_rows_are_written_bit_for_bit_as_defined(level: str, rank: int, rope: int) -> None:
    from hadron.kernels.cpu.mla import encode_rows as native_rows

    g = torch.Generator().manual_seed(rank + rope)
    rows = torch.randn(200, rank + rope, generator=g) * torch.exp2(torch.randint(-140, 120, (200, 1), generator=g))
    rows[::7] *= torch.randn(1, rank + rope, generator=g).exp() ** 4  # small ones beside large ones
    rows[3], rows[4, ::2], rows[5] = 0.0, -0.0, 448.0
    rows[6, : rank // 2] = torch.linspace(-17, 17, rank // 2) / 1024  # ties, and codes below the normal ones
    rows[6, rank // 2] = 448.0
    assert torch.equal(native_rows(rows, rank), encode_rows(rows, rank))
    assert torch.equal(native_rows(rows, rank, threads=3), encode_rows(rows, rank))
    rows[0, 0], rows[1, 0], rows[2, rank - 1] = float("nan"), float("inf"), float("-inf")
    assert torch.isnan(row_values(native_rows(rows, rank)[:3], rank)[:, :rank]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rope", [0, 3, 64])
@pytest.mark.parametrize("heads", [1, 40])
def test_fp8_rows_equal_the_definition(level: str, heads: int, rope: int, dtype: torch.dtype) -> None:
    counts = (40, 130, 0, 255, 256, 257)
    case = Fp8Case(heads=heads, rope=rope, rank=64, counts=counts, dtype=dtype, page=64)
    found = case.sparse()
    assert found.dtype == dtype
    near(found, case.defined())
    assert not found[2].any(), "a query that selects nothing attends to nothing"
    if dtype == torch.float32 and level not in ROUNDS:  # nothing is rounded
        case = Fp8Case("f32", heads=heads, rope=rope, rank=64, counts=counts, dtype=dtype, page=64)
        torch.testing.assert_close(case.sparse(), case.defined(), atol=2e-5, rtol=1e-4)


def test_every_code_is_widened_exactly(level: str) -> None:
    """One row alone has the weight 1, and `kv_b_proj` gives its latent back: code times scale, rounded once."""
    from hadron.kernels.cpu.mla import bind

    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F] + [0], dtype=torch.uint8)  # 255: no whole vector
    for scale in (1.0, 0.0137, 3.3e-5, 1e30):
        rows = torch.cat([codes, torch.tensor([scale]).view(torch.uint8)]).view(1, 1, -1)
        rank = len(codes)
        weight = StoredWeight(
            F32, Packing.ROW_MAJOR, (1 + rank, rank), torch.cat([torch.zeros(1, rank), torch.eye(rank)])
        )
        attention = bind(weight, 1, 1, 0, rank, 1.0, 1)
        zero = torch.zeros(1, 1, dtype=torch.int64)
        found = attention.sparse(torch.ones(1, 1, 1), zero, rows, zero, zero[0])[0, 0]
        expected = row_values(rows[0], rank)[0]
        assert torch.equal(found, expected.bfloat16().float() if level in ROUNDS else expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_in_every_batch_and_on_any_number_of_threads(level: str, dtype: torch.dtype) -> None:
    counts = (700, 3, 256, 0, 129, 513, 16, 257, 600, 1)
    case = Fp8Case("mxfp4", heads=34, nope=10, v=7, rank=136, counts=counts, dtype=dtype, page=16)
    alone = torch.cat([case.sparse(slice(t, t + 1), 1) for t in range(len(counts))])
    for threads in (1, 2, 3, 4):
        for size in (1, 2, 3, 10):
            for first in {0, (10 - size) // 2, 10 - size}:
                rows = slice(first, first + size)
                assert torch.equal(case.sparse(rows, threads), alone[rows]), (threads, size, first)


@settings(max_examples=60, deadline=None)
@given(
    heads=st.integers(1, 35), nope=st.integers(1, 20), rope=st.integers(0, 9), v=st.integers(1, 20),
    rank=st.integers(2, 150), page=st.integers(1, 9), counts=st.lists(st.integers(0, 300), min_size=1, max_size=6),
    dtype=st.sampled_from(DTYPES), seed=st.integers(0, 1000),
)  # fmt: skip
def test_any_shape(
    heads: int, nope: int, rope: int, v: int, rank: int, page: int, counts: list[int], dtype: torch.dtype, seed: int
) -> None:
    case = Fp8Case(
        heads=heads, nope=nope, rope=rope, v=v, rank=rank, page=page, counts=tuple(counts), dtype=dtype, seed=seed
    )
    found, expected = case.sparse(), case.defined()
    largest = float(row_values(case.pages, case.rank).abs().max())
    absolute = (case.halves.value.abs().sum(-1) * largest).unsqueeze(0) + 1e-6
    assert float(((found.float() - expected).abs() / absolute).max()) < TOLERANCE


def test_nan_stays_with_who_selects_it(level: str) -> None:
    """In a scale and in a code; bytes of ones are what was never written."""
    case = Fp8Case(counts=(9, 9, 9, 9))
    case.selection[:, :9] = torch.arange(9)
    case.owners = torch.tensor([0, 1, 2, 0])
    third = len(case.pages) // 3
    case.tables = torch.stack([torch.arange(3) + i * third for i in range(3)])
    case.pages[third, 2, case.rank : case.rank + 4] = 0xFF
    case.pages[2 * third, 3, 5] = 0x7F
    case.pages[3:third] = 0xFF  # behind every list
    found = case.sparse()
    assert torch.isnan(found[1]).all() and torch.isnan(found[2]).all() and not torch.isnan(found[[0, 3]]).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("length", "queries"), [(1, 1), (37, 37), (300, 70)])
def test_dense_prefill_equals_its_definition_and_the_sparse_form(
    level: str, length: int, queries: int, dtype: torch.dtype
) -> None:
    from hadron.kernels.cpu.mla import bind

    case = Fp8Case(heads=3, rank=70, counts=(length,), dtype=dtype)
    # Scores of about one: rounding expanded keys to bfloat16 moves the weights of larger ones by more than 1e-2.
    case.halves = dataclasses.replace(case.halves, scale=case.halves.scale / 4)
    attention = bind(case.weight, case.heads, case.nope, case.rope, case.v, case.halves.scale, 2)
    query = torch.randn(queries, 3, 10, generator=torch.Generator().manual_seed(1)).to(dtype)
    context = case.pages[case.tables[0]].flatten(0, 1)[:length]
    expected = reference.dense_attend(query, context, length - queries, case.halves)
    near(attention.dense(query, case.pages, case.tables[0], length), expected)
    everything = torch.arange(length).expand(queries, length)
    ends = torch.arange(length - queries, length).unsqueeze(1)
    selection = torch.where(everything <= ends, everything, -1)
    near(attention.sparse(query, selection, case.pages, case.tables, torch.zeros(queries, dtype=torch.int64)), expected)


def test_blocks_outside_are_refused() -> None:
    case = Fp8Case()
    case.tables[0] = len(case.pages)
    with pytest.raises(IndexError, match=r"a selected position lies in a block outside 0 \.\. 16"):
        case.sparse()
