"""What is asked of logits, native at every level against its definition."""

from __future__ import annotations

import math
from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hadron.kernels.cpu import lm_head as native
from hadron.kernels.cpu.native import ENVIRONMENT
from hadron.kernels.reference import lm_head as reference
from hadron.kernels.rules import RowRules
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
@pytest.mark.parametrize("count", [1, 3, 64, 700])
def test_rows_most_of_which_may_not_come(isa: str, count: int) -> None:
    """As a grammar leaves them: a few logits, here and there, and the lowest number everywhere else."""
    lowest = torch.finfo(torch.float32).min
    logits = torch.full((4, 9000), lowest)
    for row, some in enumerate([[8999], [0, 16, 5000], range(1020, 1030), range(2, 9000, 13)]):
        logits[row, list(some)] = rows(1, len(some), seed=row)[0]
    found = native.best(logits, count, temperature=0.7, threads=2, level=handle(isa))
    expected = reference.best(logits, count, temperature=0.7)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@every_level
def test_the_lowest_numbers_are_found_too(isa: str) -> None:
    """What may not come has the lowest finite logit, which stands also for lanes behind a row's end."""
    lowest = torch.finfo(torch.float32).min
    logits = torch.full((2, 1030), lowest)
    logits[1, 1029] = 0.0
    ids, values, _, faults = native.best(logits, 3, level=handle(isa))
    assert ids.tolist() == [[0, 1, 2], [1029, 0, 1]] and values[0].tolist() == [lowest] * 3
    assert faults.tolist() == [0, 0]


@st.composite
def row_rules(draw: st.DrawFn, size: int) -> RowRules:
    """Any rules of a row, with each of their parts there or not."""
    ids = st.lists(st.integers(0, size - 1), max_size=6, unique=True)
    seen, biased = draw(ids), draw(ids)
    words = draw(st.none() | st.lists(st.sampled_from([0, -1, 1, -(2**31), 0x2A]), min_size=-(-size // 32), max_size=3))
    return RowRules(
        seen=array("q", seen), counts=array("f", [draw(st.integers(0, 3)) for _ in seen]),
        repetition=draw(st.sampled_from([1.0, 0.01, 1.3])), frequency=draw(st.sampled_from([0.0, 0.7, -2.0])),
        presence=draw(st.sampled_from([0.0, 1.1])),
        biased=array("q", biased), bias=array("f", [draw(st.floats(-9, 9, width=32)) for _ in biased]),
        banned=array("q", draw(ids)), allowed=None if words is None else torch.tensor(words, dtype=torch.int32),
        only=draw(st.none() | st.integers(0, size - 1)),
    )  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from([1, 5, 31, 32, 33, 64, 95]))
def test_rules_of_rows_equal_their_definition(data: st.DataObject, size: int) -> None:
    logits = rows(5, size, seed=size)
    logits[2, size // 2], logits[3, 0], logits[1, -1] = math.nan, math.inf, -math.inf
    logits[4, -1], logits[0, 0] = 3e38, -3e38  # which a rule makes infinite, and a ban then leaves so
    expected, numbers = logits.clone(), [4, 0, 2, 3, 1][: data.draw(st.integers(0, 5))]
    rules = [data.draw(row_rules(size)) for _ in numbers]
    if data.draw(st.booleans()):
        rules = rules[:1] * len(numbers)
    native.rule(logits, numbers, rules)
    reference.rule(expected, numbers, rules)
    assert torch.equal(logits.view(torch.int32), expected.view(torch.int32))


def test_a_long_row_is_ruled_alike_by_any_number_of_threads() -> None:
    words = torch.randint(-(2**31), 2**31, (4841,), dtype=torch.int64, generator=generator(2)).to(torch.int32)
    every = [RowRules(allowed=words), RowRules(only=154_879), RowRules(allowed=words, banned=array("q", [7, 154_879]))]
    found = []
    for threads in (1, 3):
        found.append(rows(3, 154_880))
        native.rule(found[-1], range(3), every, threads=threads)
    expected = rows(3, 154_880)
    reference.rule(expected, range(3), every)
    assert torch.equal(found[0], expected) and torch.equal(found[1], expected)


@pytest.mark.parametrize("wrong", [-1, 8])
def test_rules_of_an_id_that_is_not_there_are_refused(wrong: int) -> None:
    ids, one = array("q", [wrong]), array("f", [1.0])
    for rules in (RowRules(seen=ids, counts=one), RowRules(biased=ids, bias=one), RowRules(banned=ids)):
        with pytest.raises(IndexError, match="a token id is out of range"):
            native.rule(rows(2, 8), [0], [rules])
    with pytest.raises((IndexError, AssertionError)):
        native.rule(rows(2, 8), [0], [RowRules(only=wrong)])


def test_rules_whose_parts_do_not_fit_are_refused() -> None:
    ids, short = array("q", [1, 2]), array("f", [1.0])
    words = torch.zeros(1, dtype=torch.int32)
    for size, rules in (
        (8, RowRules(seen=ids, counts=short)), (8, RowRules(biased=ids, bias=short)), (33, RowRules(allowed=words)),
    ):  # fmt: skip
        with pytest.raises(AssertionError):
            native.rule(rows(2, size), [0], [rules])


def test_rules_of_a_row_that_is_not_there_are_refused() -> None:
    for wrong in (-1, 2):
        with pytest.raises(IndexError, match="a row of logits is out of range"):
            native.rule(rows(2, 8), [wrong], [RowRules()])


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
    order = torch.stack([torch.randperm(logits.shape[1], generator=g) for _ in range(rows)])
    logits = torch.zeros_like(logits).scatter_(1, order, logits)
    likeliest, numbers = reference.best(logits, count)[:2], range(rows)
    totals = None
    if among_all:
        totals = ((logits.double() - logits.amax(1, keepdim=True)) / temperature[:, None]).logsumexp(-1)
    found = native.draw(logits, numbers, likeliest, chances, totals, threads=2)
    assert found.dtype is torch.int64 and torch.equal(
        found, reference.draw(logits, numbers, likeliest, chances, totals)
    )
    everything = reference.best(logits, logits.shape[1])[:2]
    assert torch.equal(found, reference.draw(logits, numbers, everything, chances)), "however few it begins with"
    for i in range(rows):
        own = (likeliest[0][i : i + 1], likeliest[1][i : i + 1])
        total = None if totals is None else totals[i : i + 1].clone()
        assert native.draw(logits, [i], own, chances[i : i + 1].clone(), total).item() == found[i]


def test_draws_refuse_what_would_read_elsewhere() -> None:
    one = torch.ones(1, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="among one at least"):
        native.draw(rows(1, 8), [0], (torch.zeros(1, 0, dtype=torch.int64), torch.zeros(1, 0)), one)
    with pytest.raises(ValueError, match="temperature"):
        native.draw(rows(1, 8), [0], (torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1)), one * 0)
    with pytest.raises(IndexError, match="a row of logits is out of range"):
        native.draw(rows(1, 8), [1], (torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1)), one)
    with pytest.raises(ValueError, match="of so many"):
        native.draw(rows(1, 2), [0], (torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3)), one)
    likeliest, four = (torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1)), torch.ones(4, 4, dtype=torch.float64)
    for numbers, chances, sums in (
        (range(4), one, None),
        (range(4), four, None),
        ([0], four, None),
        ([0], one, one[0]),
    ):
        with pytest.raises(AssertionError):
            native.draw(rows(4, 8), numbers, likeliest, chances, sums)


@every_level
def test_a_draw_goes_on_behind_the_likeliest_with_any_number_of_threads(isa: str) -> None:
    """Flat rows of a large vocabulary: hardly any token is among the 64 likeliest."""
    logits = torch.randn(3, 154_880, generator=generator(6)) / 100
    ids, values, log_sum, _ = native.best(logits, 64, temperature=1.0, level=handle(isa))
    numbers = torch.tensor([0.001, 0.4, 0.93], dtype=torch.float64)
    chances = torch.stack([torch.ones(3).double(), torch.tensor([1.0, 0.95, 1.0]), torch.zeros(3), numbers], dim=1)
    found = [
        native.draw(logits, range(3), (ids, values), chances, log_sum, threads=threads, level=handle(isa)).tolist()
        for threads in (1, 3)
    ]
    assert found[0] == found[1]
    assert found[0] == reference.draw(logits, range(3), reference.best(logits, 154_880)[:2], chances).tolist()
