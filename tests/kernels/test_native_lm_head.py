"""What is asked of logits, native at every level against its definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hadron.kernels.cpu import lm_head as native
from hadron.kernels.cpu.native import ENVIRONMENT
from hadron.kernels.reference import lm_head as reference
from tests.kernels.levels import THREADS, batches, every_level, generator, handle, near, needs_native, unaligned

pytestmark = needs_native


def rows(count: int, size: int, *, seed: int = 0) -> torch.Tensor:
    """Logits of few values, so that ties are common, within and across blocks."""
    return (torch.randn(count, size, generator=generator(seed)) * 8).round() / 4


@every_level
@pytest.mark.parametrize("size", [1, 7, 16, 33, 4096, 4097, 4100, 20_011])
@pytest.mark.parametrize("count", [0, 1, 5, 4096, 5000, 30_000])
def test_the_best_equal_their_definition(isa: str, size: int, count: int) -> None:
    for logits in (rows(3, size), rows(3, size).sort().values.contiguous(), torch.zeros(2, size)):
        found = native.best(logits, count, temperature=0.7, threads=2, level=handle(isa))
        expected = reference.best(logits, count, temperature=0.7)
        for a, b in zip(found, expected, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
        ids, values, sums, faults = found
        assert torch.equal(ids, expected[0]) and torch.equal(values, expected[1])
        assert torch.allclose(sums, expected[2], rtol=0, atol=3e-7)
        assert not faults.any()


@every_level
@pytest.mark.parametrize("size", [1, 33, 1023, 1025, 9000])
@pytest.mark.parametrize("count", [1, 16, 40])
def test_rows_by_their_numbers_without_their_sums(isa: str, size: int, count: int) -> None:
    logits = torch.randn(7, size, generator=generator(3))
    numbers = [6, 0, 0, 3]
    ids, values, sums, faults = native.best(logits, count, rows=numbers, threads=2, level=handle(isa))
    expected = reference.best(logits, count, rows=numbers)
    assert torch.equal(ids, expected[0]) and torch.equal(values, expected[1]) and torch.equal(faults, expected[3])
    assert sums.shape == expected[2].shape == (0,) and sums.dtype is expected[2].dtype
    whole = native.best(logits, count, level=handle(isa))
    assert torch.equal(whole[0][numbers], ids) and torch.equal(whole[1][numbers], values)
    assert native.best(logits, count, rows=[], level=handle(isa))[0].shape == (0, min(count, size))


@every_level
def test_the_lowest_numbers_are_found_too(isa: str) -> None:
    """What may not come has the lowest finite logit, which stands also for lanes behind a row's end."""
    lowest = torch.finfo(torch.float32).min
    logits = torch.full((2, 1030), lowest)
    logits[1, 1029] = 0.0
    ids, values, _, faults = native.best(logits, 3, level=handle(isa))
    assert ids.tolist() == [[0, 1, 2], [1029, 0, 1]] and values[0].tolist() == [lowest] * 3
    assert faults.tolist() == [0, 0]


@every_level
@pytest.mark.parametrize("size", [6, 33, 4097, 9000])
@pytest.mark.parametrize("temperature", [None, 0.7])
def test_logits_that_stand_aside_count_as_the_lowest_and_come_back(
    isa: str, size: int, temperature: float | None
) -> None:
    logits = rows(5, size)
    logits[2, size - 1], logits[3, 0] = math.nan, math.inf  # where nobody may see them, they are faults all the same
    before, numbers = logits.clone(), [4, 0, 0, 2, 3]
    without = sorted({0, size // 2, size - 1, int(logits[0].argmax())})
    found = native.best(logits, 3, rows=numbers, temperature=temperature, without=without, threads=2, level=handle(isa))
    ids, values, sums, faults = reference.best(logits, 3, rows=numbers, temperature=temperature, without=without)
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32))
    assert torch.equal(found[3], faults) and faults.tolist() == [0, 0, 0, 1, 1]
    sound = faults == 0
    assert torch.equal(found[0][sound], ids[sound]) and torch.equal(found[1][sound], values[sound])
    assert torch.allclose(found[2][: sound.sum()], sums[: sound.sum()], rtol=0, atol=3e-7)
    if size >= 3 + len(without):
        assert not set(ids[sound].flatten().tolist()) & set(without)


def test_an_id_that_is_not_there_cannot_stand_aside() -> None:
    for wrong in (-1, 8):
        with pytest.raises(IndexError, match="a token id is out of range"):
            native.best(rows(2, 8), 1, without=[wrong])


def test_a_row_that_is_not_there_is_refused() -> None:
    for wrong in (-1, 2):
        with pytest.raises(IndexError, match="a row of logits is out of range"):
            native.best(rows(2, 8), 1, rows=[0, wrong])


@pytest.mark.parametrize("size", [1, 40, 9000])
def test_ranks_equal_their_definition(size: int) -> None:
    logits = rows(4, size)
    ids = torch.randint(0, size, (4, 6), generator=generator(1))
    found = native.ranks(logits, ids, threads=3)
    assert torch.equal(found, reference.ranks(logits, ids)) and found.dtype is torch.int64
    order = reference.best(logits, size)[0]
    for row in range(4):
        assert [int(order[row, rank - 1]) for rank in found[row]] == ids[row].tolist()


@every_level
def test_bits_depend_on_the_row_alone(isa: str) -> None:
    logits = torch.randn(512, 4_101, generator=generator(2)) * 5
    alone = [
        torch.cat(parts)
        for parts in zip(
            *(native.best(row, 9, temperature=0.8, level=handle(isa)) for row in logits.split(1)), strict=True
        )
    ]
    for threads in THREADS:
        for rows in batches(512):
            found = native.best(logits[rows], 9, temperature=0.8, threads=threads, level=handle(isa))
            for a, b in zip(found, alone, strict=True):
                assert torch.equal(a, b[rows])


@every_level
@pytest.mark.parametrize("size", [5, 4099])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_counted(isa: str, value: float, size: int) -> None:
    logits = rows(3, size)
    logits[1, [0, size - 1]] = value
    logits[2, 3] = -value
    *_, faults = native.best(logits, 2, level=handle(isa))
    assert faults.tolist() == reference.best(logits, 2)[3].tolist() == [0, 2, 1]


@every_level
@pytest.mark.parametrize("temperature", [1e-300, 1e-9, 0.01, 1.0, 3.0, 1000.0])
def test_logits_far_apart_lose_nothing_of_the_sum(isa: str, temperature: float) -> None:
    """Of a float32 nothing near 3e38 is lost, and nothing that is far below the largest counts."""
    logits = torch.tensor([[3e38, -3e38, 3e38, 0.0], [-3e38, -3e38, -3e38, -3e38], [1e4, 1e4 - 20, 0.0, -1e4]])
    _, _, sums, faults = native.best(logits, 1, temperature=temperature, level=handle(isa))
    terms = [[math.exp((x - max(row)) / temperature) for x in row] for row in logits.double().tolist()]
    assert sums.tolist() == pytest.approx([math.log(math.fsum(row)) for row in terms], abs=3e-7)
    assert torch.equal(reference.best(logits, 1, temperature=temperature)[2] - sums < 3e-7, torch.ones(3, dtype=bool))
    assert not faults.any()


def test_a_temperature_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="a temperature is above 0"):
        native.best(rows(1, 8), 1, temperature=-1.0)


def test_ids_outside_the_vocabulary_are_refused() -> None:
    for wrong in (-1, 8):
        with pytest.raises(IndexError, match="a token id is out of range"):
            native.ranks(rows(1, 8), torch.tensor([[0, wrong]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@every_level
def test_logits_of_a_shared_table_equal_their_definition(
    isa: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, isa)
    table = unaligned(torch.randn(9001, 72, generator=generator(4)).to(dtype))
    hidden = torch.randn(128, 72, generator=generator(5))
    one = native.bind(table)
    alone = torch.cat([one(row) for row in hidden.split(1)])
    near("lm_head", alone, reference.bind(table)(hidden))
    for threads in THREADS:
        several = native.bind(table, threads=threads)
        for rows in batches(128):
            assert torch.equal(several(hidden[rows]), alone[rows])


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 9), size=st.integers(1, 3000), best=st.integers(0, 60), seed=st.integers(0, 1000),
    threads=st.integers(1, 4),
)  # fmt: skip
def test_any_shape(count: int, size: int, best: int, seed: int, threads: int) -> None:
    logits = rows(count, size, seed=seed)
    found = native.best(logits, best, temperature=0.7, threads=threads)
    expected = reference.best(logits, best, temperature=0.7)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert torch.allclose(found[2], expected[2], rtol=0, atol=3e-7) and not found[3].any()
    asked = torch.randint(0, size, (count, 3), generator=generator(seed))
    assert torch.equal(native.ranks(logits, asked, threads=threads), reference.ranks(logits, asked))


@pytest.mark.parametrize("among_all", [False, True])
@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 9), st.integers(1, 70))
def test_draws_equal_their_definition(among_all: bool, seed: int, rows: int, count: int) -> None:
    g = generator(seed)
    logits = (4 * torch.randn(rows, count + 200 * among_all, generator=g)).sort(descending=True).values

    def any_of(*choices: float) -> torch.Tensor:
        return torch.tensor(choices, dtype=torch.float64)[torch.randint(len(choices), (rows,), generator=g)]

    temperature = any_of(0.3, 1.0, 2.0, 1e-9)
    number = torch.rand(rows, generator=g, dtype=torch.float64)
    chances = torch.stack([temperature, any_of(1.0, 0.95, 0.3), any_of(0.0, 0.0, 0.05, 1.0), number], dim=1)
    ids = torch.stack([torch.randperm(1000, generator=g)[:count] for _ in range(rows)])
    totals = ((logits.double() - logits[:, :1]) / temperature[:, None]).logsumexp(-1) if among_all else None
    found = native.draw(ids, logits[:, :count], chances, totals)
    assert torch.equal(found, reference.draw(ids, logits[:, :count], chances, totals))
    assert found.dtype is torch.int64 and ((found == -1) | (found[:, None] == ids).any(1)).all()
    alone = [native.draw(ids[i : i + 1], logits[i : i + 1, :count], chances[i : i + 1].clone(),
                         None if totals is None else totals[i : i + 1].clone()) for i in range(rows)]  # fmt: skip
    assert torch.equal(torch.cat(alone), found)


def test_draws_refuse_what_would_read_elsewhere() -> None:
    one = torch.ones(1, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="among one at least"):
        native.draw(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(1, 0), one)
    with pytest.raises(ValueError, match="temperature"):
        native.draw(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1), one * 0)
