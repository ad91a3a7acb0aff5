"""Slots: distinct for every position of every sequence, and never outside the cache."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hadron.batch import RequestStep, make_batch
from hadron.cache.blocks import BlockPool
from hadron.cache.manager import SequenceCache
from hadron.cache.pages import Pages
from hadron.cache.spec import CacheSpec, LayerCache
from hadron.cache.states import States

SPEC = CacheSpec((LayerCache(latent_width=3, index_width=2),), 2, "float32", 4, "float32")


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
    pages, states = tiny_pages(blocks, page_size), States(SPEC, len(lengths))
    caches = [SequenceCache(array("q"), slot, 0) for slot in range(len(lengths))]
    for page in range(max(-(-length // page_size) for length in lengths)):  # tables interleave
        for cache, length in zip(caches, lengths, strict=True):
            if page * page_size < length:
                cache.block_table.extend(allocator.allocate(1))
    slots: list[list[int]] = [[] for _ in lengths]
    for start in range(0, max(lengths), chunk):
        moving = [i for i, length in enumerate(lengths) if length > start]
        steps = [RequestStep(caches[i], [0] * min(chunk, lengths[i] - start), start=start) for i in moving]
        batch = make_batch(steps, pages, states)
        assert batch.positions.tolist() == [start + t for step in steps for t in range(len(step.token_ids))]
        for owner, slot in zip(batch.request_of_token.tolist(), batch.slots.tolist(), strict=True):
            slots[moving[owner]].append(slot)
    for cache, length, own in zip(caches, lengths, slots, strict=True):
        assert own == [cache.block_table[p // page_size] * page_size + p % page_size for p in range(length)]
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
        ([0, 1], 6, 3, "positions 6 to 8 lie outside a table of 2 pages of 4 tokens"),
        ([0, 9], 4, 1, "a table holds block 9: the cache has 4 blocks"),
        ([0, -1], 4, 1, "block -1: the cache has 4 blocks"),
        ([], 0, 1, "0 pages"),
        ([0, 1], -1, 1, "positions -1 to -1"),
    ],
)
def test_br54_ids_out_of_range_raise(table: list[int], start: int, count: int, words: str) -> None:
    step = RequestStep(SequenceCache(array("q", table), 0, 0), [7] * count, start=start)
    with pytest.raises(IndexError, match=words):
        make_batch([step], tiny_pages(4, 4), States(SPEC, 1))


def tiny_pages(blocks: int = 2, page_size: int = 4) -> Pages:
    return Pages(replace(SPEC, page_size=page_size), blocks)


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
