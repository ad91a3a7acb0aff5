"""The block pool against a model of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hadron.cache.blocks import BlockPool, page_hash
from hadron.errors import CapacityError


def test_allocation_is_all_or_none() -> None:
    pool = BlockPool(3, 4)
    held = pool.allocate(2)
    with pytest.raises(CapacityError) as error:
        pool.allocate(2)
    assert "2 pages asked for, 1 free" in str(error.value)
    assert pool.free_blocks == 1
    pool.free(held)
    assert sorted(pool.allocate(3)) == [0, 1, 2]


def test_a_shared_block_is_freed_with_its_last_holder() -> None:
    pool = BlockPool(2, 4)
    (block,) = pool.allocate(1)
    pool.share([block])
    pool.free([block])
    assert pool.free_blocks == 1
    pool.free([block])
    assert pool.free_blocks == 2
    with pytest.raises(ValueError, match="freed more often"):
        pool.free([block])


def test_numbers_outside_raise_and_never_wrap() -> None:
    pool = BlockPool(2, 4)
    for block in (-1, 2):
        for act in (pool.references, lambda b: pool.free([b]), lambda b: pool.share([b]), pool.forget):
            with pytest.raises(IndexError, match=f"block {block} is not one of 2"):
                act(block)


def test_a_freed_page_is_found_until_its_block_is_needed() -> None:
    pool = BlockPool(2, 2)
    content = page_hash(b"", [5, 6])
    a, b = pool.allocate(2)
    pool.register(a, content)
    pool.free([a, b])
    assert pool.find(content) == a
    assert pool.allocate(1) == [b]  # the one of unknown content goes first
    pool.share([a])
    assert pool.references(a) == 1
    pool.free([a])
    assert pool.allocate(1) == [a]
    assert pool.find(content) is None


def test_a_hash_stands_for_everything_before_it() -> None:
    first = page_hash(b"", [1, 2])
    assert page_hash(first, [3, 4]) != page_hash(b"", [3, 4])
    assert page_hash(first, [3, 4]) == page_hash(page_hash(b"", [1, 2]), [3, 4])
    assert page_hash(b"", [1, 2]) != page_hash(b"", [258])


def test_a_free_block_of_unknown_content_cannot_be_shared() -> None:
    with pytest.raises(ValueError, match="unknown content"):
        BlockPool(1, 2).share([0])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_block_has_two_owners_unless_shared(data: st.DataObject) -> None:
    pool = BlockPool(6, 2)
    held: list[list[int]] = []
    known = 0
    for _ in range(data.draw(st.integers(1, 30))):
        act = data.draw(st.sampled_from(["allocate", "free", "share", "register"]))
        if act == "allocate":
            count = data.draw(st.integers(0, 3))
            before = pool.free_blocks
            if count > before:
                with pytest.raises(CapacityError):
                    pool.allocate(count)
                assert pool.free_blocks == before
            else:
                held.append(pool.allocate(count))
        elif held and act == "free":
            pool.free(held.pop(data.draw(st.integers(0, len(held) - 1))))
        elif held and act == "share":
            held.append(list(data.draw(st.sampled_from(held))))
            pool.share(held[-1])
        elif held and held[-1]:
            known += 1
            pool.register(held[-1][0], known.to_bytes(4, "big"))
        counts = [sum(blocks.count(b) for blocks in held) for b in range(6)]
        assert [pool.references(b) for b in range(6)] == counts
        assert pool.free_blocks == counts.count(0)
