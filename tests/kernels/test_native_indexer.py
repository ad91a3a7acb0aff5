"""The native indexer at every level: exact selection, pools, tails, and bit for bit against itself."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hadron.errors import NumericsError
from hadron.kernels.cpu import indexer, native
from hadron.kernels.ops import OPERATIONS
from hadron.kernels.reference import indexer as reference
from tests.kernels.levels import THREADS, batches

pytestmark = pytest.mark.skipif(
    not native.levels(), reason="this build has no native kernels: install with a C++ compiler to run these"
)

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=native.levels())
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(native.ENVIRONMENT, request.param)
    name: str = request.param
    return name


class Case:
    """A step of some requests over scattered pages. whole: small integers, so that every sum is exact."""

    def __init__(
        self, *, lengths: tuple[int, ...] = (50, 9), queries: tuple[int, ...] = (3, 9), heads: int = 5, size: int = 16,
        topk: int = 16, pool: int = 4, tail: bool = True, rows: int = 4, dtype: torch.dtype = torch.bfloat16,
        whole: bool = True, seed: int = 0,
    ) -> None:  # fmt: skip
        g = torch.Generator().manual_seed(seed)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.randint(-2, 3, shape, generator=g).float() if whole else torch.randn(*shape, generator=g)

        self.queries, self.lengths, self.topk, self.pool, self.tail = queries, lengths, topk, pool, tail
        tokens, width = sum(queries), -(-max(lengths) // (rows * pool)) + 1
        self.pages = numbers(width * len(lengths) + 1, rows, size).to(dtype)
        order = torch.randperm(len(self.pages), generator=g)[: width * len(lengths)]
        self.tables = order.reshape(len(lengths), width)
        for i, length in enumerate(lengths):
            self.tables[i, -(-(length // pool) // rows) :] = -1
        self.query = numbers(tokens, heads, size).to(dtype)
        self.weights = numbers(tokens, heads)
        self.positions = torch.cat([torch.arange(n - q, n) for n, q in zip(lengths, queries, strict=True)])

    def arguments(self) -> tuple[Any, ...]:
        return (
            self.query, self.weights, self.pages, self.tables, self.positions, self.queries, self.lengths, self.topk,
            self.pool, self.tail,
        )  # fmt: skip

    def chosen(self, threads: int = 2) -> torch.Tensor:
        return indexer.choose(*self.arguments(), threads=threads, level=native.level())

    def defined(self) -> torch.Tensor:
        """With integers, in exact arithmetic."""
        out = []
        for request, first in enumerate(self._firsts()):
            keys = self.pages[self.tables[request].clamp(min=0)].flatten(0, 1).double().nan_to_num()
            for t in range(first, first + self.queries[request]):
                dots = (self.query[t].double() @ keys.T).relu()
                scored = (self.weights[t].double() @ dots).tolist()
                end = int(self.positions[t]) + 1
                best = sorted(range(end // self.pool), key=lambda j: (-scored[j], j))[: self.topk // self.pool]
                row = [j * self.pool + i for j in sorted(best) for i in range(self.pool)]
                out.append(row + (list(range(end // self.pool * self.pool, end)) if self.tail else []))
        width = min(self.topk // self.pool, max(self.lengths) // self.pool) * self.pool
        width += self.pool - 1 if self.tail else 0
        return torch.tensor([row + [-1] * (width - len(row)) for row in out], dtype=torch.int64).view(len(out), width)

    def part(self, rows: slice, threads: int) -> list[list[int]]:
        """What is chosen where these tokens of one request are all of the step."""
        (request,) = (r for r, t in enumerate(self._firsts()) if t <= rows.start and rows.stop <= t + self.queries[r])
        length = int(self.positions[rows.stop - 1]) + 1
        chosen = indexer.choose(
            self.query[rows], self.weights[rows], self.pages, self.tables[request : request + 1], self.positions[rows],
            (rows.stop - rows.start,), (length,), self.topk, self.pool, self.tail, threads=threads, level=native.level(),
        )  # fmt: skip
        return [positions(row) for row in chosen]

    def _firsts(self) -> list[int]:
        return [sum(self.queries[:i]) for i in range(len(self.queries))]


def positions(row: torch.Tensor) -> list[int]:
    found: list[int] = row[row >= 0].tolist()
    assert row[: len(found)].tolist() == found == sorted(set(found)), "ascending, -1 beyond"
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("pool", "tail"), [(1, False), (4, True), (4, False)])
@pytest.mark.parametrize("heads", [1, 16, 32, 33, 64])
def test_selection_is_exact_where_sums_are(level: str, heads: int, pool: int, tail: bool, dtype: torch.dtype) -> None:
    """Small integers: mostly ties, which go to the lowest index."""
    for length in (1, 3, 4, 15, 16, 17, 63, 64, 65, 300, 2000):
        case = Case(lengths=(length, 7), queries=(min(length, 3), 7), heads=heads, pool=pool, tail=tail, dtype=dtype)
        assert torch.equal(case.chosen(), case.defined()), length


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=4), heads=st.integers(1, 40), size=st.integers(1, 40),
    pools=st.integers(1, 30), pool=st.integers(1, 5), tail=st.booleans(), rows=st.integers(1, 9),
    dtype=st.sampled_from(DTYPES), seed=st.integers(0, 1000),
)  # fmt: skip
def test_any_shape(
    lengths: list[int], heads: int, size: int, pools: int, pool: int, tail: bool, rows: int, dtype: torch.dtype,
    seed: int,
) -> None:  # fmt: skip
    case = Case(
        lengths=tuple(lengths), queries=tuple(min(3, n) for n in lengths), heads=heads, size=size, topk=pools * pool,
        pool=pool, tail=tail, rows=rows, dtype=dtype, seed=seed,
    )  # fmt: skip
    assert torch.equal(case.chosen(), case.defined())


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_are_as_close_as_promised(level: str, dtype: torch.dtype) -> None:
    """What is left out scores no more than what is chosen, but for rounding."""
    case = Case(lengths=(3000,), queries=(4,), heads=32, size=128, topk=256, dtype=dtype, whole=False)
    found = case.chosen()
    keys = case.pages[case.tables[0]].flatten(0, 1)[:750].float()
    scored = reference.scores(case.query.float(), case.weights, keys)
    for t in range(4):
        seen = (int(case.positions[t]) + 1) // 4
        chosen = {p // 4 for p in positions(found[t]) if p < seen * 4}
        assert len(chosen) == 64
        least = min(float(scored[t, j]) for j in chosen)
        most = max(float(scored[t, j]) for j in range(seen) if j not in chosen)
        assert most - least <= OPERATIONS["indexer"].tolerance * float(scored.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_in_every_step_and_on_any_number_of_threads(level: str, dtype: torch.dtype) -> None:
    case = Case(
        lengths=(9000, 70, 1200), queries=(2, 7, 3), heads=33, size=24, topk=200, dtype=dtype, whole=False, rows=16
    )  # fmt: skip
    together = case.chosen(1)
    for threads in THREADS:
        assert torch.equal(case.chosen(threads), together)
        for t in range(12):
            assert case.part(slice(t, t + 1), threads) == [positions(together[t])], (threads, t)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_in_steps_of_every_size(level: str, dtype: torch.dtype) -> None:
    case = Case(lengths=(700,), queries=(514,), heads=3, size=24, topk=64, dtype=dtype, whole=False)
    together = [positions(row) for row in case.chosen(1)]
    for threads in THREADS:
        for rows in batches(514):
            assert case.part(rows, threads) == together[rows], (threads, rows)


def test_a_long_context_is_taken_in_parts(level: str) -> None:
    """More keys than one part, more candidates than a list: exact, also for ties across parts."""
    case = Case(lengths=(70_001,), queries=(1,), heads=2, size=4, topk=300, pool=1, tail=False, rows=64)
    expected = case.defined()
    for threads in (1, 2, 4):
        assert torch.equal(case.chosen(threads), expected)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_scores_that_are_not_finite_are_refused(level: str, value: float) -> None:
    case = Case(lengths=(50, 9), queries=(3, 9), heads=32, whole=False)
    case.query, case.weights = case.query.abs() + 1, case.weights.abs() + 1
    page = case.tables[1, 0]
    case.pages[page, 1] = value
    with pytest.raises(NumericsError) as caught:
        case.chosen()
    with pytest.raises(NumericsError) as defined:
        reference.choose(*case.arguments())
    assert caught.value.where == defined.value.where == "query row 7, key 1"
    assert caught.value.found == str(value) and "--data" in caught.value.hint


def test_keys_that_are_not_visible_may_hold_anything(level: str) -> None:
    case = Case(lengths=(50,), queries=(4,))
    expected = case.defined()
    for request, length in enumerate(case.lengths):
        for row in range(length // 4, case.tables.shape[1] * 4):
            page = case.tables[request, row // 4]
            if page >= 0:
                case.pages[page, row % 4] = math.nan
    assert torch.equal(case.chosen(), expected)


def test_tables_and_positions_outside_are_refused() -> None:
    for block in (-1, 10**6):
        case = Case()
        case.tables[0, 1] = block
        with pytest.raises(IndexError, match=f"block {block} of a request lies outside 0"):
            case.chosen()
    case = Case()
    case.tables = case.tables[:, :2].contiguous()
    with pytest.raises(IndexError, match="key 11 lies outside a table of 2 pages"):
        case.chosen()
    case = Case()
    case.positions[0] = 50
    with pytest.raises(IndexError, match="position 50 lies outside its request"):
        case.chosen()


class Stored:
    """Pages and tails that a sequence of steps fills."""

    def __init__(self, store: Any, pool: int, size: int, dtype: torch.dtype, pooled: bool) -> None:
        g = torch.Generator().manual_seed(1)
        self.store, self.pool, self.pooled = store, pool, pooled
        self.pages = torch.full((15, 4, size), math.nan, dtype=dtype)
        self.tails = torch.zeros(3, 2, pool - 1, size) if pool > 1 else None
        self.table = torch.randn(pool, size, generator=g) if pooled else None
        self.blocks = torch.randperm(15, generator=g).reshape(3, 5)
        self.keys, self.gates = torch.randn(2, 3, 40, size, generator=g)
        self.seen = [0, 0, 0]

    def step(self, *counts: tuple[int, int]) -> None:
        """(request, new tokens) of a step."""
        rows = [(r, p) for r, n in counts for p in range(self.seen[r], self.seen[r] + n)]
        tokens = self.pages.shape[1] * self.pool
        slots = torch.tensor([int(self.blocks[r, p // tokens]) * tokens + p % tokens for r, p in rows])
        keys = torch.stack([self.keys[r, p] for r, p in rows])
        gates = torch.stack([self.gates[r, p] for r, p in rows]) if self.pooled else None
        for r, n in counts:
            self.seen[r] += n
        self.store(
            keys, gates, self.table, slots, [n for _, n in counts], [self.seen[r] for r, _ in counts], self.pages,
            self.tails, [r for r, _ in counts], self.pool,
        )  # fmt: skip


STEPS = (((0, 3), (1, 9)), ((0, 1), (2, 2)), ((2, 1), (1, 1), (0, 2)), ((2, 13),), ((0, 1), (1, 1), (2, 1)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("pool", "pooled"), [(4, True), (1, True), (1, False), (3, True)])
def test_keys_are_stored_as_defined_however_steps_are_cut(
    level: str, pool: int, pooled: bool, dtype: torch.dtype
) -> None:
    make = partial(Stored, pool=pool, size=19, dtype=dtype, pooled=pooled)
    ours = make(partial(indexer.store, level=native.level()))
    theirs = make(reference.store)
    for counts in STEPS:
        ours.step(*counts)
        theirs.step(*counts)
        torch.testing.assert_close(ours.pages, theirs.pages, equal_nan=True, rtol=8e-3, atol=1e-5)
        if ours.tails is not None:
            for r, seen in enumerate(ours.seen):
                assert torch.equal(ours.tails[r, :, : seen % pool], theirs.tails[r, :, : seen % pool])
    single = make(ours.store)
    for request, total in enumerate(ours.seen):
        for _ in range(total):
            single.step((request, 1))
    assert torch.equal(single.pages.nan_to_num(7.0), ours.pages.nan_to_num(7.0)), "bit for bit, token by token"


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=4),
    pool=st.integers(1, 5), size=st.integers(1, 70), dtype=st.sampled_from(DTYPES), pooled=st.booleans(),
)  # fmt: skip
def test_keys_of_any_shape_are_stored_as_defined(
    steps: list[list[int]], pool: int, size: int, dtype: torch.dtype, pooled: bool
) -> None:
    make = partial(Stored, pool=pool, size=size, dtype=dtype, pooled=pooled or pool > 1)
    ours, theirs = make(partial(indexer.store, level=native.level())), make(reference.store)
    for counts in steps:
        step = [(request, count) for request, count in enumerate(counts) if count]
        if step:
            ours.step(*step)
            theirs.step(*step)
    torch.testing.assert_close(ours.pages, theirs.pages, equal_nan=True, rtol=8e-3, atol=1e-5)


def test_slots_outside_the_cache_are_refused() -> None:
    for block in (-1, 15):
        stored = Stored(partial(indexer.store, level=native.level()), 4, 5, torch.float32, True)
        stored.blocks[0] = block
        with pytest.raises(IndexError, match=f"slot {block * 16}: the cache has 0 to 239"):
            stored.step((0, 4))
        assert stored.pages.isnan().all(), "nothing was written"
