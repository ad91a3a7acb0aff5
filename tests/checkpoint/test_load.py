"""Mapping shards: values, places and dtypes as stored, and every way in which a file may have changed."""

from __future__ import annotations

import errno
import json
import mmap
import os
import resource
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hadron.checkpoint import load
from hadron.checkpoint.facts import Facts, read_facts
from hadron.checkpoint.load import MappedCheckpoint, Progress
from hadron.errors import ChangedError, CheckpointError, UsageError
from tests.conftest import checkpoint_names
from tests.tiny.draft import Draft, write_safetensors


def facts_of(folder: Path, **tensors: tuple[str, tuple[int, ...], bytes]) -> Facts:
    """Write a checkpoint of those tensors, in that order, and read its facts."""
    draft = Draft({"architectures": ["X"]}, {n: (d, s) for n, (d, s, _) in tensors.items()})
    draft.values = {name: data for name, (_, _, data) in tensors.items()}
    return read_facts(draft.write(folder))


def mapping_of(address: int) -> tuple[str, str]:
    """(permissions, path) of the mapping that holds an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return line.split()[1], line.split(maxsplit=5)[5]
    raise AssertionError(f"{address:#x} is not mapped")


@pytest.mark.parametrize("name", checkpoint_names())
def test_every_tensor_of_a_real_checkpoint_is_a_view_with_its_values(checkpoints: Path, name: str) -> None:
    expected = load_file(checkpoints / name / "model.safetensors")
    mapped = MappedCheckpoint(read_facts(checkpoints / name), expected)
    for tensor_name, values in expected.items():
        found = mapped.take(tensor_name)
        assert found.dtype is values.dtype and found.shape == values.shape
        assert torch.equal(found.reshape(-1).view(torch.uint8), values.reshape(-1).view(torch.uint8)), tensor_name
    assert mapped.left == []
    assert mapped.nbytes == sum(t.numel() * t.element_size() for t in expected.values())


def test_views_lie_in_the_file_and_cannot_be_written(tmp_path: Path) -> None:
    values = np.arange(64, dtype=np.float32)
    facts = facts_of(tmp_path / "m", a=("F32", (8, 8), values.tobytes()), b=("F32", (64,), values.tobytes()))
    mapped = MappedCheckpoint(facts, ["a", "b"])
    places = [mapping_of(mapped.take(name).data_ptr()) for name in ("a", "b")]
    assert places == [("r--s", str(tmp_path / "m" / "model.safetensors"))] * 2, "mapped once, read-only"


def test_offsets_that_no_dtype_is_aligned_to(tmp_path: Path) -> None:
    floats, halves, words = np.float32([1.5, -2.25, 1e-30]), np.float32([0.5, -3]), np.int32([7, -8])
    facts = facts_of(
        tmp_path / "m",
        odd=("U8", (1,), b"\x07"),
        f32=("F32", (3,), floats.tobytes()),
        odd2=("U8", (2,), b"\x01\x02"),
        bf16=("BF16", (2,), (halves.view(np.uint32) >> 16).astype(np.uint16).tobytes()),
        i32=("I32", (2, 1), words.tobytes()),
        scale=("F8_E8M0", (3,), b"\x00\x7f\xff"),
    )
    mapped = MappedCheckpoint(facts, facts.tensors)
    f32 = mapped.take("f32")
    assert f32.data_ptr() % 4 == 1 and torch.equal(f32, torch.from_numpy(floats))
    bf16 = mapped.take("bf16")
    assert bf16.data_ptr() % 2 == 1 and torch.equal(bf16.float(), torch.from_numpy(halves))
    assert torch.equal(mapped.take("i32") * 2, torch.tensor([[14], [-16]], dtype=torch.int32))
    scale = mapped.take("scale")
    assert scale.dtype is torch.uint8 and scale.tolist() == [0, 127, 255]
    matrix = torch.arange(6, dtype=torch.float32).view(2, 3)
    assert torch.equal(matrix @ f32, matrix @ torch.from_numpy(floats)), "products read from odd addresses"


def test_br17_a_scale_in_another_shard_than_its_weight(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    weight, scale = bytes(range(16)), np.float32([3.0]).tobytes()
    write_safetensors(folder / "a.safetensors", {"l.weight_scale_inv": ("F32", (1, 1))}, {"l.weight_scale_inv": scale})
    write_safetensors(folder / "b.safetensors", {"l.weight": ("F8_E4M3", (4, 4))}, {"l.weight": weight})
    index = {"weight_map": {"l.weight_scale_inv": "a.safetensors", "l.weight": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    mapped = MappedCheckpoint(read_facts(folder), ["l.weight", "l.weight_scale_inv"])
    assert mapped.take("l.weight_scale_inv").tolist() == [[3.0]]
    assert mapped.take("l.weight").view(torch.uint8).flatten().tolist() == list(range(16))


def test_a_tensor_is_given_out_once_and_leftovers_are_named(tmp_path: Path) -> None:
    facts = facts_of(tmp_path / "m", a=("U8", (1,), b"a"), b=("U8", (0, 4), b""), c=("U8", (1,), b"c"))
    mapped = MappedCheckpoint(facts, ["a", "b"])
    assert mapped.take("b").shape == (0, 4) and mapped.left == ["a"]
    for name in ("b", "c"):
        with pytest.raises(AssertionError, match=f"{name} was taken before, or belongs to nothing"):
            mapped.take(name)


def test_a_dtype_that_cannot_be_loaded(tmp_path: Path) -> None:
    facts = facts_of(tmp_path / "m", a=("I32", (1,), bytes(4)))
    facts.tensors["a"] = msgspec.structs.replace(facts.tensors["a"], dtype="F64")
    with pytest.raises(CheckpointError, match=r"where:    a\n  found:    F64"):
        MappedCheckpoint(facts, ["a"]).take("a")


class TestChangedFiles:
    @pytest.fixture
    def facts(self, tmp_path: Path) -> Facts:
        return facts_of(tmp_path / "m", a=("F32", (1000,), bytes(4000)))

    @pytest.fixture
    def shard(self, tmp_path: Path) -> Path:
        return tmp_path / "m" / "model.safetensors"

    def refused(self, facts: Facts, shard: Path, found: str) -> None:
        with pytest.raises(ChangedError) as caught:
            MappedCheckpoint(facts, ["a"])
        text = str(caught.value)
        assert "is not the file that was planned" in text and str(shard) in text and found in text
        assert "wait until nothing writes to the checkpoint" in text

    def test_truncated(self, facts: Facts, shard: Path) -> None:
        size = shard.stat().st_size
        os.truncate(shard, size - 1)
        self.refused(facts, shard, f"{size - 1:,} bytes: it was cut short")

    def test_longer(self, facts: Facts, shard: Path) -> None:
        with shard.open("ab") as file:
            file.write(b"more")
        self.refused(facts, shard, f"{shard.stat().st_size:,} bytes")

    def test_rewritten_at_the_same_size(self, facts: Facts, shard: Path) -> None:
        os.utime(shard, ns=(0, facts.shards[0].mtime_ns + 1))
        self.refused(facts, shard, "modified since")

    def test_gone(self, facts: Facts, shard: Path) -> None:
        shard.unlink()
        self.refused(facts, shard, "it cannot be opened: No such file or directory")

    def test_only_the_header_was_fetched(self, facts: Facts) -> None:
        facts.shards = tuple(msgspec.structs.replace(shard, path=None) for shard in facts.shards)
        with pytest.raises(CheckpointError, match="only its header was fetched"):
            MappedCheckpoint(facts, ["a"])


def test_progress_counts_the_bytes_of_shards_then_of_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_STEP", 1 << 16)
    facts = facts_of(tmp_path / "m", a=("U8", (300_000,), bytes(300_000)))
    seen: list[Progress] = []
    mapped = MappedCheckpoint(facts, ["a"], seen.append)
    size = facts.shards[0].size
    assert seen == [Progress("map", size, size)]
    seen.clear()
    mapped.prefault()
    assert len(seen) == 5 and seen[-1].done == seen[-1].total >= 300_000
    assert [p.done for p in seen] == sorted(p.done for p in seen) and {p.phase for p in seen} == {"prefault"}


def resident_pages(address: int, length: int) -> int:
    """Pages of a mapping in this process's page table, from /proc/self/smaps."""
    rss, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and first.replace("-", "").isalnum() and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin < address + length and end > address
        elif inside and line.startswith("Rss:"):
            rss += int(line.split()[1])
    return rss * 1024 // mmap.PAGESIZE


def test_prefault_makes_the_pages_of_the_tensors_resident(tmp_path: Path) -> None:
    size = 4 << 20
    facts = facts_of(tmp_path / "m", a=("U8", (size,), bytes(size)), b=("U8", (8 * size,), b"\x01" * 8 * size))
    mapped = MappedCheckpoint(facts, ["a"])
    address = mapped.take("a").data_ptr()
    assert resident_pages(address, size) < size // mmap.PAGESIZE
    mapped.prefault()
    assert resident_pages(address, size) >= size // mmap.PAGESIZE


def test_lock_covers_the_pages_of_every_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_NEARBY", 100)
    locked: list[tuple[int, int]] = []
    monkeypatch.setattr(load, "_mlock", lambda address, length: locked.append((address, length)) or 0)
    gap = 50_000
    facts = facts_of(
        tmp_path / "m", a=("U8", (10,), bytes(10)), x=("U8", (gap,), bytes(gap)), b=("U8", (9000,), bytes(9000))
    )
    seen: list[Progress] = []
    mapped = MappedCheckpoint(facts, ["b", "a"], seen.append)
    mapped.lock()
    assert len(locked) == 2 and all(address % mmap.PAGESIZE == 0 for address, _ in locked)
    for name, length in (("a", 10), ("b", 9000)):
        address = mapped.take(name).data_ptr()
        assert any(begin <= address and address + length <= begin + size for begin, size in locked)
    assert sum(size for _, size in locked) < gap, "what lies between is not locked"
    assert seen[-1].phase == "lock" and seen[-1].done == seen[-1].total


def test_lock_refused_by_the_system_says_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_mlock", lambda address, length: errno.ENOMEM)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
    mapped = MappedCheckpoint(facts_of(tmp_path / "m", a=("U8", (10,), bytes(10))), ["a"])
    with pytest.raises(UsageError) as caught:
        mapped.lock()
    text = str(caught.value)
    assert "--mlock" in text and "(RLIMIT_MEMLOCK) is 65,536 bytes" in text and "ulimit -l" in text


def test_mlock_itself() -> None:
    """The call, on one page of our own; a wild address is an error number, not a crash."""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    address = np.frombuffer(page, dtype=np.uint8).ctypes.data
    assert load._mlock(address, mmap.PAGESIZE) in (0, errno.EPERM, errno.ENOMEM, errno.EAGAIN)
    assert load._mlock(0, mmap.PAGESIZE) != 0
