"""Native attention over pages at every level: against the definition, and bit for bit against itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hadron.kernels.cpu import native
from hadron.kernels.ops import OPERATIONS
from hadron.kernels.reference import mla as reference
from hadron.kernels.reference.dequantize import dequantize
from hadron.quantization.scheme import parse_scheme
from tests.kernels.levels import THREADS, batches
from tests.kernels.test_native import SCHEMES, random_weight, whole

pytestmark = pytest.mark.skipif(
    not native.levels(), reason="this build has no native kernels: install with a C++ compiler to run these"
)

TOLERANCE = OPERATIONS["mla"].tolerance
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=native.levels())
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(native.ENVIRONMENT, request.param)
    name: str = request.param
    return name


@dataclass(frozen=True)
class Halves:
    key: torch.Tensor
    value: torch.Tensor
    scale: float


class Case:
    """Random latents in scattered pages, and tokens that select some of them."""

    def __init__(
        self, scheme: str = "bf16", *, heads: int = 3, nope: int = 6, rope: int = 4, v: int = 5, rank: int = 20,
        counts: tuple[int, ...] = (9, 0, 30, 1), page: int = 4, dtype: torch.dtype = torch.bfloat16, seed: int = 0,
    ) -> None:  # fmt: skip
        g = torch.Generator().manual_seed(seed)
        self.heads, self.nope, self.rope, self.v = heads, nope, rope, v
        rank = whole(parse_scheme(scheme), rank)
        self.weight = random_weight(parse_scheme(scheme), heads * (nope + v), rank, seed)
        values = dequantize(self.weight).reshape(heads, nope + v, rank)
        # Scores of a few units, whatever the scheme's weights are.
        self.halves = Halves(values[:, :nope], values[:, nope:], 1.0 / (float(values.std()) * math.sqrt(nope * rank)))
        pages = -(-max(*counts, 1) * 2 // page)
        self.pages = torch.randn(pages + 2, page, rank + rope, generator=g).to(dtype)
        self.tables = torch.stack([torch.randperm(pages + 2, generator=g)[:pages] for _ in range(2)])
        self.owners = torch.arange(len(counts)) % 2
        self.selection = torch.full((len(counts), max(counts) + 3), -1)
        for t, count in enumerate(counts):
            self.selection[t, :count] = torch.randperm(pages * page, generator=g)[:count].sort().values
        self.query = torch.randn(len(counts), heads, nope + rope, generator=g).to(dtype)

    def sparse(self, rows: slice = slice(None), threads: int = 2, width: int | None = None) -> torch.Tensor:
        from hadron.kernels.cpu.mla import bind

        attention = bind(self.weight, self.heads, self.nope, self.rope, self.v, self.halves.scale, threads)
        selection = self.selection[rows, :width]
        return attention.sparse(self.query[rows], selection, self.pages, self.tables, self.owners[rows])

    def defined(self) -> torch.Tensor:
        pages, size, width = self.pages.shape
        slots = reference.selected_slots(self.selection, self.tables[self.owners], size, pages)
        query = reference.absorb(self.query, self.halves.key)
        mixed = reference.sparse_attend(query, self.pages.view(-1, width), slots, self.halves)
        return reference.expand(mixed, self.halves.value)


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((found.float() - expected).abs().max()) <= TOLERANCE * float(expected.abs().max())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_equals_the_definition(level: str, scheme: str) -> None:
    case = Case(scheme, heads=5, nope=24, v=16, rank=200)
    found = case.sparse()
    assert found.dtype == torch.bfloat16 and found.shape == (4, 5, 16)
    near(found, case.defined())
    assert not found[1].any(), "a query that selects nothing attends to nothing"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rope", [0, 3, 64])
@pytest.mark.parametrize("heads", [1, 32, 40])
def test_heads_and_rotary_parts_equal_the_definition(level: str, heads: int, rope: int, dtype: torch.dtype) -> None:
    case = Case(heads=heads, rope=rope, rank=64, counts=(40, 130, 255, 256, 257), dtype=dtype, page=64)
    found = case.sparse()
    near(found, case.defined())
    if dtype == torch.float32:
        unrounded = Case("f32", heads=heads, rope=rope, rank=64, counts=(40, 130, 255, 256, 257), dtype=dtype, page=64)
        torch.testing.assert_close(unrounded.sparse(), unrounded.defined(), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_in_every_batch_and_on_any_number_of_threads(level: str, dtype: torch.dtype) -> None:
    counts = (700, 3, 256, 0, 129, 513, 16, 257, 600, 1, 128, 40)
    case = Case("mxfp4", heads=34, nope=10, v=7, rank=136, counts=counts, dtype=dtype, page=16)
    alone = torch.cat([case.sparse(slice(t, t + 1), 1) for t in range(len(counts))])
    for threads in THREADS:
        for size in (1, 2, 3, 7, 12):
            for first in {0, (12 - size) // 2, 12 - size}:
                rows = slice(first, first + size)
                assert torch.equal(case.sparse(rows, threads), alone[rows]), (threads, size, first)
    assert torch.equal(case.sparse(slice(1, 2), 2, 3), alone[1:2]), "padding of the list says nothing"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_in_batches_of_every_size(level: str, dtype: torch.dtype) -> None:
    case = Case("mxfp4", heads=2, rank=32, counts=tuple(7 * t % 41 for t in range(514)), dtype=dtype)
    alone = torch.cat([case.sparse(slice(t, t + 1), 1) for t in range(514)])
    for threads in THREADS:
        for rows in batches(514):
            assert torch.equal(case.sparse(rows, threads), alone[rows]), (threads, rows)


def test_more_tokens_than_share_an_expansion(level: str) -> None:
    case = Case("nvfp4", heads=2, rank=32, counts=tuple(range(70)))
    alone = torch.cat([case.sparse(slice(t, t + 1)) for t in range(70)])
    assert torch.equal(case.sparse(), alone)
    near(alone, case.defined())


@settings(max_examples=60, deadline=None)
@given(
    scheme=st.sampled_from(["bf16", "mxfp4", "fp8_e4m3_block_32x96", "f32"]), heads=st.integers(1, 35),
    nope=st.integers(1, 20), rope=st.integers(0, 9), v=st.integers(1, 20), rank=st.integers(1, 150),
    page=st.integers(1, 9), counts=st.lists(st.integers(0, 300), min_size=1, max_size=6),
    dtype=st.sampled_from(DTYPES), seed=st.integers(0, 1000),
)  # fmt: skip
def test_any_shape(
    scheme: str, heads: int, nope: int, rope: int, v: int, rank: int, page: int, counts: list[int],
    dtype: torch.dtype, seed: int,
) -> None:  # fmt: skip
    case = Case(
        scheme, heads=heads, nope=nope, rope=rope, v=v, rank=rank, page=page, counts=tuple(counts), dtype=dtype,
        seed=seed,
    )  # fmt: skip
    found, expected = case.sparse(), case.defined()
    # Against what is summed, not against a sum in which terms may cancel.
    absolute = (case.halves.value.abs().sum(-1) * float(case.pages.float().abs().max())).unsqueeze(0) + 1e-6
    assert float(((found.float() - expected).abs() / absolute).max()) < TOLERANCE


def test_a_hole_in_a_list_is_no_rank() -> None:
    case = Case(counts=(5, 5))
    case.selection[1] = case.selection[0]
    case.owners[:] = 0
    case.query[1] = case.query[0]
    case.selection[1, 2:6] = case.selection[0, 1:5]
    case.selection[1, 1] = -1
    assert torch.equal(*case.sparse())


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_with_who_selects_it(level: str, dtype: torch.dtype) -> None:
    case = Case(counts=(9, 9, 9), dtype=dtype)
    half = len(case.pages) // 2
    case.selection[:, :9] = torch.arange(9)
    case.owners = torch.tensor([0, 1, 0])
    case.tables[0], case.tables[1] = torch.arange(case.tables.shape[1]) % half, half
    case.pages[half, 2] = math.nan
    case.pages[3:half] = math.nan  # behind every list
    found = case.sparse()
    assert torch.isnan(found[1]).all() and not torch.isnan(found[[0, 2]]).any()


def test_positions_and_blocks_outside_are_refused() -> None:
    case = Case()
    case.selection[2, 29] = case.tables.shape[1] * 4
    with pytest.raises(IndexError, match=f"position {case.tables.shape[1] * 4} lies outside a table of 15 pages"):
        case.sparse()
    for block in (-1, len(case.pages), 2**40):
        case = Case()
        case.tables[0] = block
        with pytest.raises(IndexError, match=r"a selected position lies in a block outside 0 \.\. 16"):
            case.sparse()
    case = Case()
    case.owners[0] = 2
    with pytest.raises(IndexError, match="outside a table"):
        case.sparse()


def test_sizes_that_do_not_fit_the_weight_are_refused() -> None:
    from hadron.kernels.cpu.mla import bind

    with pytest.raises(ValueError, match="kv_b_proj does not have these sizes"):
        bind(Case().weight, 3, 6, 4, 6, 1.0, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("length", "queries"), [(1, 1), (37, 37), (150, 3), (300, 70)])
def test_dense_prefill_equals_its_definition_and_the_sparse_form(
    level: str, length: int, queries: int, dtype: torch.dtype
) -> None:
    from hadron.kernels.cpu.mla import bind

    case = Case("mxfp8_e4m3", heads=3, rank=70, counts=(length,), dtype=dtype)
    attention = bind(case.weight, case.heads, case.nope, case.rope, case.v, case.halves.scale, 2)
    query = torch.randn(queries, 3, 10, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = attention.dense(query, case.pages, case.tables[0], length)
    context = case.pages[case.tables[0]].flatten(0, 1)[:length]
    expected = reference.dense_attend(query, context, length - queries, case.halves)
    near(found, expected)
    everything = torch.arange(length).expand(queries, length)
    ends = torch.arange(length - queries, length).unsqueeze(1)
    selection = torch.where(everything <= ends, everything, -1)
    near(attention.sparse(query, selection, case.pages, case.tables, torch.zeros(queries, dtype=torch.int64)), expected)


@settings(max_examples=60, deadline=None)
@given(
    scheme=st.sampled_from(["bf16", "mxfp4", "fp8_e4m3_block_32x96", "f32"]), heads=st.integers(1, 6),
    nope=st.integers(1, 20), rope=st.integers(0, 9), v=st.integers(1, 20), rank=st.integers(1, 150),
    page=st.integers(1, 9), length=st.integers(1, 300), queries=st.integers(1, 80), dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_dense_prefill_of_any_shape(
    scheme: str, heads: int, nope: int, rope: int, v: int, rank: int, page: int, length: int, queries: int,
    dtype: torch.dtype, seed: int,
) -> None:  # fmt: skip
    from hadron.kernels.cpu.mla import bind

    queries = min(queries, length)
    case = Case(
        scheme, heads=heads, nope=nope, rope=rope, v=v, rank=rank, page=page, counts=(length,), dtype=dtype, seed=seed
    )
    attention = bind(case.weight, heads, nope, rope, v, case.halves.scale, 2)
    query = torch.randn(queries, heads, nope + rope, generator=torch.Generator().manual_seed(seed)).to(dtype)
    context = case.pages[case.tables[1]].flatten(0, 1)[:length]
    expected = reference.dense_attend(query, context, length - queries, case.halves)
    found = attention.dense(query, case.pages, case.tables[1], length)
    absolute = (case.halves.value.abs().sum(-1) * float(case.pages.float().abs().max())).unsqueeze(0) + 1e-6
    assert float(((found.float() - expected).abs() / absolute).max()) < TOLERANCE


def test_a_dense_context_outside_its_table_is_refused() -> None:
    from hadron.kernels.cpu.mla import bind

    case = Case()
    attention = bind(case.weight, case.heads, case.nope, case.rope, case.v, case.halves.scale, 1)
    with pytest.raises(IndexError, match="position 60 lies outside a table of 15 pages"):
        attention.dense(case.query, case.pages, case.tables[0], 61)
    case.tables[0, 3] = -1
    with pytest.raises(IndexError, match="lies in a block outside 0"):
        attention.dense(case.query, case.pages, case.tables[0], 40)
