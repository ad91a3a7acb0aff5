"""Valid headers, and the agreement of the fast road with the exact one and with the safetensors library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize, safe_open

from conftest import checkpoint_names, checkpoints_root
from hadron.checkpoint.header import LENGTH_BYTES, _fast, parse_header, read_header
from hadron.checkpoint.header_faults import diagnose
from hadron.quantization.dtypes import STORAGE_BITS
from hostile.build import entry, good_shard, header, shard


def test_all_that_a_header_says(tmp_path: Path) -> None:
    raw = (
        b'{"__metadata__":{"format":"pt","note":"a } in a string"},'
        b'"x.weight":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},'
        b'"x.scale":{"dtype":"F32","shape":[],"data_offsets":[12,16]},'
        b'"empty":{"dtype":"I64","shape":[5,0],"data_offsets":[16,16]}}   '
    )
    path = tmp_path / "a.safetensors"
    path.write_bytes(shard(raw, bytes(16)))
    found = read_header(path, "a", shard=3)
    assert found.problems == []
    assert found.metadata == {"format": "pt", "note": "a } in a string"}
    assert found.data_start == 8 + len(raw)
    assert found.size == path.stat().st_size
    assert found.mtime_ns == path.stat().st_mtime_ns
    assert {name: (t.dtype, t.shape, t.data_offsets, t.nbytes, t.shard) for name, t in found.tensors.items()} == {
        "x.weight": ("BF16", (2, 3), (0, 12), 12, 3),
        "x.scale": ("F32", (), (12, 16), 4, 3),
        "empty": ("I64", (5, 0), (16, 16), 0, 3),
    }


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [
        ("F4", [2, 3], 3),
        ("F6_E2M3", [4], 3),
        ("F6_E3M2", [2, 4], 6),
        ("F8_E8M0", [3], 3),
        ("C64", [2], 16),
        ("BOOL", [3], 3),
    ],
)
def test_size_of_every_kind_of_dtype(dtype: str, shape: list[int], size: int) -> None:
    raw = header(a=entry(dtype, shape, 0, size))
    found = parse_header("a", raw, 8 + len(raw) + size)
    assert found.problems == []
    assert found.tensors["a"].nbytes == size


UNUSUAL = {
    "escaped name": b'{"\\u0061":%s}',
    "name in Greek": '{"β":%s}'.encode(),
    "name with a quote": b'{"a\\"dtype\\"":%s}',
    "tensor called dtype": b'{"dtype":%s}',
    "metadata last": b'{"a":%s,"__metadata__":{"format":"pt"}}',
    "empty metadata": b'{"__metadata__":{},"a":%s}',
    "unknown field": b'{"a":{"extra":[{"dtype":1}],"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    "field called shard": b'{"a":{"shard":"x","dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    "spaces everywhere": b'{ "a" : {"dtype" : "F32" , "shape" : [ 1 ] , "data_offsets" : [ 0 , 4 ] } } \n',
}


@pytest.mark.parametrize("text", UNUSUAL.values(), ids=UNUSUAL.keys())
def test_unusual_but_valid(text: bytes) -> None:
    raw = text.replace(b"%s", b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}')
    deserialize(shard(raw, bytes(4)))  # the library takes it
    found = parse_header("m", raw, 8 + len(raw) + 4, shard=1)
    assert found.problems == []
    assert [(t.shape, t.shard) for t in found.tensors.values()] == [((1,), 1)]


def test_entries_in_any_order() -> None:
    raw = header(b=entry("F32", [1], 4, 8), z=entry("F32", [0], 4, 4), a=entry("F32", [1], 0, 4))
    found = parse_header("m", raw, 8 + len(raw) + 8)
    assert found.problems == []
    assert list(found.tensors) == ["b", "z", "a"]


def test_header_without_tensors() -> None:
    found = parse_header("m", b"{}", 10)
    assert (found.problems, found.tensors) == ([], {})


def test_damaged_entries_do_not_move_their_neighbours() -> None:
    """A range counts in the layout although its dtype is unknown, so that one fault is one problem."""
    raw = header(a=entry("F32", [1], 0, 4), b=entry("F9", [1], 4, 8), c=entry("F32", [1], 8, 12))
    found = parse_header("m", raw, 8 + len(raw) + 12)
    assert [problem.code for problem in found.problems] == ["HC103"]
    assert list(found.tensors) == ["a", "c"]
    assert found.broken == {"b"}


@pytest.mark.parametrize("name", checkpoint_names())
def test_agrees_with_the_library_on_real_files(name: str) -> None:
    root = checkpoints_root()
    assert root is not None
    for path in sorted((root / name).glob("*.safetensors")):
        found = read_header(path, path.name)
        assert found.problems == []
        with safe_open(path, "np") as library:
            assert set(found.tensors) == set(library.keys())
            for tensor_name in library.keys():  # noqa: SIM118 - it is no mapping
                piece = library.get_slice(tensor_name)
                tensor = found.tensors[tensor_name]
                assert (tensor.dtype, list(tensor.shape)) == (piece.get_dtype(), piece.get_shape())


letters = st.characters(codec="utf-8", exclude_characters='"\\', exclude_categories=("C", "Z"))
names = st.text(letters, min_size=1, max_size=8)
shapes = st.lists(st.integers(0, 5), max_size=3)


@given(st.dictionaries(names, st.tuples(st.sampled_from(sorted(STORAGE_BITS)), shapes), max_size=5))
@settings(max_examples=100, deadline=None)
def test_both_roads_agree_on_valid_headers(tensors: dict[str, tuple[str, list[int]]]) -> None:
    entries, cursor = {}, 0
    for name, (dtype, shape) in tensors.items():
        bits = STORAGE_BITS[dtype]
        for dim in shape:
            bits *= dim
        if bits % 8 or name == "__metadata__":
            continue
        entries[name] = entry(dtype, shape, cursor, cursor + bits // 8)
        cursor += bits // 8
    raw = json.dumps(entries, ensure_ascii=False).encode()
    slow = diagnose("m", raw, LENGTH_BYTES + len(raw) + cursor, 7)
    assert slow.problems == []
    assert parse_header("m", raw, LENGTH_BYTES + len(raw) + cursor, 7).tensors == slow.tensors
    assert {name: list(t.shape) for name, t in slow.tensors.items()} == {n: e["shape"] for n, e in entries.items()}


VALID = header(__metadata__={}, a=entry("BF16", [2], 0, 4), b=entry("F32", [1], 4, 8), z=entry("U8", [0], 8, 8))
PIECES = [b'"dtype"', b'"shape"', b'"data_offsets"', b'"a"', b'"b"', b"0", b"4", b"8", b"-", b"[", b"]", b"{", b"}"]
PIECES += [b",", b":", b" ", b"\\", b'"F32"', b'"U8"', b'"__metadata__":{"x":"y"},']
PIECES += [b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},']


@given(
    st.lists(st.tuples(st.integers(0, len(VALID)), st.integers(0, 12), st.sampled_from(PIECES)), min_size=1, max_size=3)
)
@settings(max_examples=600, deadline=None)
def test_fast_road_takes_only_what_the_exact_one_takes(edits: list[tuple[int, int, bytes]]) -> None:
    raw = VALID
    for place, cut, piece in edits:
        raw = raw[:place] + piece + raw[place + cut :]
    fast = _fast(raw, 8, 0)
    if fast is not None:
        slow = diagnose("m", raw, LENGTH_BYTES + len(raw) + 8, 0)
        assert slow.problems == []
        assert fast == (slow.tensors, slow.metadata)


@given(st.integers(0, 200), st.integers(0, 255))
@settings(max_examples=200, deadline=None)
def test_whatever_the_library_refuses_is_a_problem(place: int, byte: int) -> None:
    content = bytearray(good_shard("a", "b"))
    content[place % len(content)] = byte
    try:
        deserialize(bytes(content))
    except SafetensorError:
        length = int.from_bytes(content[:8], "little")
        if length <= len(content) - 8:
            assert parse_header("m", bytes(content[8 : 8 + length]), len(content)).problems
