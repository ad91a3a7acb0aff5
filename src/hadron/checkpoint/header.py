"""Reads and validates safetensors headers before any data: nothing here raises for what a file holds.

A valid header takes the fast road: one typed decode, one pass of exact arithmetic (entries lie end to
end, sizes fit dtypes and shapes, the keys were counted). Whatever is off in any way goes to
`header_faults`, which reads it again slowly and says what is wrong with which tensors.
"""

from __future__ import annotations

import math
import os
import stat
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import DecodeError, Meta, Struct
from msgspec.json import Decoder

from hadron.checkpoint.json_text import JsonFault, parse_json_object
from hadron.problems import Problem, problem
from hadron.quantization.dtypes import STORAGE_BITS

if TYPE_CHECKING:
    Dtype = str
else:  # a literal type decodes every dtype to one shared string, and refuses the rest
    Dtype = Literal[tuple(STORAGE_BITS)]

Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]

#: more dimensions than any tensor library takes
MAX_DIMS = 64
#: the longest header that any reader of the format accepts
MAX_HEADER_BYTES = 100_000_000
#: the length of the header, little-endian, comes first
LENGTH_BYTES = 8


class Tensor(Struct, gc=False):
    """One entry of a safetensors header.

    data_offsets are relative to the shard's data section, as in the header. shard indexes
    `Facts.shards`.
    """

    dtype: Dtype
    shape: Annotated[tuple[Size, ...], Meta(max_length=MAX_DIMS)]
    data_offsets: tuple[Size, Size]
    shard: int = -1

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.data_offsets[1] - self.data_offsets[0]


@dataclass
class Header:
    """What one shard's header says.

    tensors: the well-formed entries. broken: names of the others. data_start: where data begins in
    the file; 0 when the header could not be read. size: the file's length in bytes.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    broken: frozenset[str] = frozenset()
    metadata: dict[str, str] = field(default_factory=dict)
    data_start: int = 0
    size: int = 0
    mtime_ns: int = 0
    problems: list[Problem] = field(default_factory=list)


_DECODER = Decoder(dict[str, Tensor])
_METADATA_KEY = b'{"__metadata__":'


def open_file(path: Path) -> FileIO:
    """Open for reading, unbuffered; a pipe in the place of a file does not block."""
    return FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))


def read_header(path: Path, name: str, shard: int = -1) -> Header:
    """The header of a local file; problems call the file `name`."""
    try:
        with open_file(path) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return unreadable(name, "something that is not a regular file", "a safetensors file")
            size, mtime_ns = status.st_size, status.st_mtime_ns
            start = file.read(LENGTH_BYTES)
            refused = check_length(name, start, size)
            if refused is not None:
                return refused
            length = int.from_bytes(start, "little")
            raw = file.read(length)
    except OSError as error:
        return unreadable(name, error.strerror or str(error), "a readable file")
    if len(raw) != length:
        return unreadable(name, f"{len(raw)} bytes where the header has {length}", "a file nobody is writing to")
    header = parse_header(name, raw, size, shard)
    header.mtime_ns = mtime_ns
    return header


def unreadable(name: str, found: str, accepted: str, hint: str = "download or copy the file again") -> Header:
    """A header of which nothing can be used."""
    return Header(
        problems=[problem("HC101", f"the header of {name} cannot be read", found=found, accepted=accepted, hint=hint)]
    )


def check_length(name: str, start: bytes, size: int) -> Header | None:
    """Refuse by the first eight bytes of a file of `size` bytes; None when the length they state is possible."""
    if size < LENGTH_BYTES or len(start) < LENGTH_BYTES:
        return unreadable(name, f"a file of {size} bytes", "at least the 8 bytes of the header's length")
    text = {b"version ": "a Git LFS pointer", b"<!DOCTYP": "a web page", b"GGUF": "a GGUF file", b"PK\x03\x04": "a zip"}
    for magic, kind in text.items():
        if start.startswith(magic):
            hint = "fetch the file itself (`git lfs pull`, or `hf download`)"
            return unreadable(name, f"{kind} in its place", "a safetensors file", hint)
    length = int.from_bytes(start, "little")
    if length > MAX_HEADER_BYTES:
        return unreadable(
            name,
            f"a header length of {length} bytes",
            f"at most {MAX_HEADER_BYTES} bytes",
            "the file is no safetensors file, or damaged; download it again",
        )
    if length > size - LENGTH_BYTES:
        return unreadable(
            name,
            f"a header length of {length} bytes in a file of {size}",
            "a header inside its file",
            "the file is truncated; download it again",
        )
    return None


def parse_header(name: str, raw: bytes, size: int, shard: int = -1) -> Header:
    """The header `raw` (the JSON alone) of the shard `name`, a file of `size` bytes."""
    start = LENGTH_BYTES + len(raw)
    fast = _fast(raw, size - start, shard)
    if fast is not None:
        tensors, metadata = fast
        return Header(tensors, metadata=metadata, data_start=start, size=size)
    from hadron.checkpoint.header_faults import diagnose  # rarely needed, and it needs our types

    return diagnose(name, raw, size, shard)


def _fast(raw: bytes, data_bytes: int, shard: int) -> tuple[dict[str, Tensor], dict[str, str]] | None:
    """Tensors and metadata of a header without any fault; None as soon as anything is unusual.

    Without escapes, text equal to `"dtype"` with its quotes is a key or a whole string; so when it
    occurs exactly once an entry, and likewise the other two, no name and no field was there twice.
    """
    if raw[:1] != b"{" or b"\\" in raw or not raw.isascii() or b"\x7f" in raw:
        return None
    metadata, rest = _split_metadata(raw)
    try:
        tensors = _DECODER.decode(rest)
    except (DecodeError, RecursionError):
        return None
    count = len(tensors)
    if any(rest.count(key) != count for key in (b'"dtype"', b'"shape"', b'"data_offsets"')):
        return None
    bits = STORAGE_BITS
    cursor = 0
    for tensor in tensors.values():
        start, end = tensor.data_offsets
        total = bits[tensor.dtype]
        for dim in tensor.shape:
            total *= dim
        if start != cursor or total != (end - start) * 8:
            return None
        if not total and math.prod(dim for dim in tensor.shape if dim) >= 2**63:
            return None
        cursor = end
        tensor.shard = shard
    if cursor != data_bytes or "" in tensors:
        return None
    return tensors, metadata


def _split_metadata(raw: bytes) -> tuple[dict[str, str], bytes]:
    """`__metadata__` where it comes first, as every writer puts it, and the header without it.

    A prefix that is a complete JSON object is the value that any parser reads there, so the cut is exact.
    """
    if not raw.startswith(_METADATA_KEY):
        return {}, raw
    end = raw.find(b"}", len(_METADATA_KEY)) + 1
    try:
        metadata: dict[str, Any] = parse_json_object(raw[len(_METADATA_KEY) : end])
    except JsonFault:
        return {}, raw
    if not all(type(value) is str for value in metadata.values()):
        return {}, raw
    rest = raw[end:].lstrip()
    if rest.startswith(b","):
        rest = rest[1:]
        if rest.lstrip().startswith(b"}"):  # a trailing comma
            return {}, raw
    return metadata, b"{" + rest
