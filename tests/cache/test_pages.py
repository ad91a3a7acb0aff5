"""Slots: distinct for every position of every sequence, and never outside the cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hadron.cache.blocks import BlockPool
from hadron.cache.pages import Pages, slot_mapping
from hadron.cache.spec import CacheSpec, LayerCache


@settings(max_examples=100, deadline=None)
@given(
    page_size=st.sampled_from([4, 16, 64]),
    pool=st.sampled_from([1, 2, 4]),
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    chunk=st.integers(1, 70),
)
def test_br54_the_slot_mapping_is_injective(page_size: int, pool: int, lengths: list[int], chunk: int) -> None:
    """Every position has a slot of its own, every pool a row of its own, in one unit for tables and slots."""
    blocks = sum(-(-length // page_size) for length in lengths)
    allocator = BlockPool(blocks, page_size)
    tables: list[list[int]] = [[] for _ in lengths]
    for page in range(max(-(-length // page_size) for length in lengths)):  # tables interleave
        for table, length in zip(tables, lengths, strict=True):
            if page * page_size < length:
                table += allocator.allocate(1)
    slots: list[list[int]] = []
    for table, length in zip(tables, lengths, strict=True):
        pieces = [
            slot_mapping(table, start, min(chunk, length - start), page_size, blocks)
            for start in range(0, length, chunk)
        ]
        slots.append([slot for piece in pieces for slot in piece])
        assert slots[-1] == [table[p // page_size] * page_size + p % page_size for p in range(length)]
    everything = [slot for sequence in slots for slot in sequence]
    assert len(set(everything)) == sum(lengths)
    assert min(everything) >= 0 and max(everything) < blocks * page_size
    rows = [slot // pool for sequence in slots for slot in sequence[pool - 1 :: pool]]
    assert len(set(rows)) == sum(length // pool for length in lengths)
    for sequence in slots:  # the tokens of a pool share its row
        assert all(len({s // pool for s in sequence[i : i + pool]}) == 1 for i in range(0, len(sequence), pool))


@pytest.mark.parametrize(
    ("table", "start", "count", "words"),
    [
        ([0, 1], 6, 3, "position 8 lies in page 2: the table has 2 pages"),
        ([0, 9], 4, 1, "block 9 of 4 blocks"),
        ([0, -1], 4, 1, "block -1 of 4 blocks"),
        ([], 0, 1, "0 pages"),
        ([0, 1], -1, 1, "position -1"),
    ],
)
def test_br54_ids_out_of_range_raise(table: list[int], start: int, count: int, words: str) -> None:
    with pytest.raises(IndexError, match=words):
        slot_mapping(table, start, count, 4, 4)


def tiny_pages() -> Pages:
    return Pages(CacheSpec((LayerCache(latent_width=3, index_width=2),), 2, "float32", 4, "float32"), 2)


@pytest.mark.parametrize("slot", [-1, 8])
def test_br54_writes_out_of_range_raise(slot: int) -> None:
    with pytest.raises(IndexError, match="the cache has 0 to 7"):
        tiny_pages().write_latents(0, torch.tensor([0, slot]), torch.zeros(2, 3))
    with pytest.raises(IndexError, match="the cache has 0 to 3"):
        tiny_pages().write_index_keys(0, torch.tensor([min(slot, 4)]), torch.zeros(1, 2))


def test_br55_writes_are_counted() -> None:
    pages = tiny_pages()
    assert pages.write_latents(0, torch.tensor([1, 5, 2]), torch.ones(3, 3)) == 3
    assert pages.write_index_keys(0, torch.tensor([], dtype=torch.int64), torch.ones(0, 2)) == 0
    with pytest.raises(ValueError, match="rows for"):
        pages.write_latents(0, torch.tensor([1]), torch.ones(2, 3))


def test_an_fp8_page_is_copied_with_its_scales() -> None:
    spec = CacheSpec((LayerCache(latent_width=5, rope_width=2),), 1, "bfloat16", 4, "fp8_e4m3")
    pages = Pages(spec, 2)
    rows = torch.randint(0, 256, (4, 3 + 4 + 2 * 2), dtype=torch.uint8)
    assert pages.write_latents(0, torch.arange(4), rows) == 4
    pages.copy_page(0, 1)
    assert torch.equal(pages.latent_rows(0)[4:], rows)
    with pytest.raises(ValueError, match="rows for"):
        pages.write_latents(0, torch.arange(4), torch.zeros(4, 5))


def test_a_page_is_copied_in_every_layer() -> None:
    pages = tiny_pages()
    pages.write_latents(0, torch.arange(8), torch.arange(24.0).view(8, 3))
    pages.write_index_keys(0, torch.arange(4), torch.arange(8.0).view(4, 2))
    pages.copy_page(0, 1)
    assert (
        pages.latent_rows(0)[4:].tolist() == pages.latent_rows(0)[:4].tolist() == torch.arange(12.0).view(4, 3).tolist()
    )
    assert pages.index_rows(0)[2:].tolist() == [[0, 1], [2, 3]]
    for pair in ((-1, 0), (0, 2)):
        with pytest.raises(IndexError):
            pages.copy_page(*pair)
