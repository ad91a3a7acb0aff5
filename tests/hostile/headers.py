"""Malformed safetensors files: what is wrong, its problem code, and what the message must say."""

from __future__ import annotations

from typing import NamedTuple

from hostile.build import entry, header, shard


class BadFile(NamedTuple):
    """One malformed file. kept: names of the tensors that stay usable."""

    content: bytes
    code: str
    says: tuple[str, ...]
    tensors: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


def _entries(text: str, data: int = 8) -> bytes:
    return shard(text.encode(), b"\0" * data)


A = '"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
Z = '"z":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
B = '"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}'

BAD_FILES: dict[str, BadFile] = {
    "empty file": BadFile(b"", "HC101", ("model.safetensors", "a file of 0 bytes", "8 bytes of the header's length")),
    "seven bytes": BadFile(b"\x01" * 7, "HC101", ("a file of 7 bytes",)),
    "header longer than the file": BadFile(
        (1000).to_bytes(8, "little") + b"{}", "HC101", ("1000 bytes in a file of 10", "truncated")
    ),
    "header over 100 MB": BadFile(
        (100_000_001).to_bytes(8, "little") + b"{}", "HC101", ("100000001 bytes", "at most 100000000 bytes")
    ),
    "header length with the top bit set": BadFile(b"\xff" * 8 + b"{}", "HC101", (str(2**64 - 1),)),
    "git lfs pointer": BadFile(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n",
        "HC101",
        ("a Git LFS pointer", "git lfs pull"),
    ),
    "web page": BadFile(b"<!DOCTYPE html><html>Sign in</html>", "HC101", ("a web page",)),
    "gguf": BadFile(b"GGUF\x03\0\0\0" + b"\0" * 40, "HC101", ("a GGUF file",)),
    "zip": BadFile(b"PK\x03\x04" + b"\0" * 40, "HC101", ("a zip",)),
    "not utf-8": BadFile(shard(b'{"\xff":1}'), "HC101", ("byte 0xFF at offset 2, not UTF-8",)),
    "byte order mark": BadFile(shard(b"\xef\xbb\xbf{}"), "HC101", ("byte order mark",)),
    "not json": BadFile(shard(b"{nonsense}"), "HC101", ("at character 1", "one JSON object")),
    "cut json": BadFile(shard(b'{"a":{"dtype"'), "HC101", ("at character",)),
    "empty header": BadFile(shard(b""), "HC101", ("found nothing",)),
    "array at the top": BadFile(shard(b"[]"), "HC101", ("'[' as the first character", "a JSON object")),
    "space before the brace": BadFile(shard(b" {}"), "HC101", ("' ' as the first character",)),
    "text after the object": BadFile(shard(b"{} {}"), "HC101", ("Extra data",)),
    "nesting bomb": BadFile(shard(b'{"a":' + b"[" * 100_000), "HC101", ("nesting too deep",)),
    "nesting bomb of objects": BadFile(shard(b'{"a":' * 100_000), "HC101", ("nesting too deep",)),
    "literal NaN": BadFile(shard(b'{"a":NaN}'), "HC101", ("the literal NaN",)),
    "integer of five thousand digits": BadFile(
        shard(b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}', b"\0" * 4),
        "HC101",
        ("thousands of digits",),
    ),
    "name twice": BadFile(
        _entries("{" + A + "," + A.replace("[0,4]", "[4,8]") + "}"), "HC102", ("a twice", "every key once"), ("a",)
    ),
    "name twice with equal ranges": BadFile(
        _entries("{" + A + "," + A + "}", 4), "HC102", ("a twice",), ("a",), ("a",)
    ),
    "empty tensor twice": BadFile(
        _entries("{" + Z + "," + Z.replace("F32", "BF16").replace("[0]", "[0,3]") + "}", 0),
        "HC102",
        ("z twice",),
        ("z",),
        ("z",),
    ),
    "name twice, once with an escape": BadFile(
        _entries("{" + A + "," + A.replace('"a"', '"\\u0061"') + "}", 4), "HC102", ("a twice",), ("a",)
    ),
    "field twice": BadFile(
        _entries('{"a":{"dtype":"F32","dtype":"I32","shape":[1],"data_offsets":[0,4]}}', 4),
        "HC102",
        ("'dtype' twice",),
        ("a",),
    ),
    "field twice, once with an escape": BadFile(
        _entries('{"a":{"dtype":"F32","shape":[1],"shap\\u0065":[1],"data_offsets":[0,4]}}', 4),
        "HC102",
        ("'shape' twice",),
    ),
    "metadata twice": BadFile(
        _entries('{"__metadata__":{"a":"b"},"__metadata__":{"a":"c"},' + A + "}", 4),
        "HC102",
        ("__metadata__ twice",),
        (),
        ("a",),
    ),
    "metadata with a number": BadFile(
        _entries('{"__metadata__":{"format":1},' + A + "}", 4),
        "HC103",
        ("'format' with a value that is no string",),
        (),
        ("a",),
    ),
    "metadata that is a list": BadFile(
        _entries('{"__metadata__":["pt"],' + A + "}", 4), "HC103", ("something else than an object",), (), ("a",)
    ),
    "entry that is a list": BadFile(_entries('{"a":[1,2]}', 0), "HC103", ("something else than an object",), ("a",)),
    "entry without dtype": BadFile(
        _entries('{"a":{"shape":[1],"data_offsets":[0,4]},' + B + "}"), "HC103", ("no dtype",), ("a",), ("b",)
    ),
    "entry without shape and offsets": BadFile(
        _entries('{"a":{"dtype":"F32"}}', 0), "HC103", ("no shape and no data_offsets",), ("a",)
    ),
    "unknown dtype": BadFile(
        shard(header(a=entry("F8_E9M9", [4], 0, 4), b=entry("F32", [1], 4, 8)), b"\0" * 8),
        "HC103",
        ("dtype 'F8_E9M9'", "model.safetensors"),
        ("a",),
        ("b",),
    ),
    "dtype that is a number": BadFile(
        _entries('{"a":{"dtype":7,"shape":[1],"data_offsets":[0,4]}}', 4), "HC103", ("dtype 7",), ("a",)
    ),
    "negative dimension": BadFile(
        shard(header(a=entry("F32", [-1, -1], 0, 4)), b"\0" * 4), "HC103", ("shape [-1, -1]",), ("a",)
    ),
    "fractional dimension": BadFile(
        _entries('{"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}', 4), "HC103", ("shape [1.0]",), ("a",)
    ),
    "boolean dimension": BadFile(
        _entries('{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}', 4), "HC103", ("shape [True]",), ("a",)
    ),
    "dimensions that overflow": BadFile(
        shard(header(a=entry("F32", [2**32, 2**32], 0, 0))), "HC103", ("cannot be counted in 63 bits",), ("a",)
    ),
    "dimension beyond 64 bits": BadFile(
        shard(header(a=entry("F32", [2**70, 0], 0, 0))), "HC103", ("cannot be counted in 63 bits",), ("a",)
    ),
    "empty tensor whose other dimensions overflow": BadFile(
        shard(header(a=entry("F32", [2**40, 2**40, 0], 0, 0))), "HC103", ("cannot be counted in 63 bits",), ("a",)
    ),
    "seventy dimensions": BadFile(
        shard(header(a=entry("F32", [1] * 70, 0, 4)), b"\0" * 4), "HC103", ("a shape of 70 dimensions",), ("a",)
    ),
    "shape of too few elements": BadFile(
        shard(header(a=entry("BF16", [3], 0, 8)), b"\0" * 8), "HC103", ("8 bytes for BF16 [3], which needs 6",), ("a",)
    ),
    "shape of too many elements": BadFile(
        shard(header(a=entry("F32", [3], 0, 8)), b"\0" * 8), "HC103", ("8 bytes for F32 [3], which needs 12",), ("a",)
    ),
    "half a byte of F4": BadFile(
        shard(header(a=entry("F4", [3], 0, 1)), b"\0"),
        "HC103",
        ("3 elements of F4, which fill no whole number of bytes",),
        ("a",),
    ),
    "three quarters of a byte of F6": BadFile(
        shard(header(a=entry("F6_E2M3", [3], 0, 3)), b"\0\0\0"), "HC103", ("3 elements of F6_E2M3",), ("a",)
    ),
    "one offset": BadFile(
        _entries('{"a":{"dtype":"F32","shape":[1],"data_offsets":[4]}}', 4), "HC103", ("data_offsets [4]",), ("a",)
    ),
    "negative offset": BadFile(
        shard(header(a=entry("F32", [1], -4, 0)), b"\0" * 4), "HC103", ("data_offsets [-4, 0]",), ("a",)
    ),
    "offsets the wrong way round": BadFile(
        shard(header(a=entry("F32", [1], 4, 0)), b"\0" * 4), "HC103", ("end before they start",), ("a",)
    ),
    "empty name": BadFile(
        shard(b'{"":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"\0" * 4),
        "HC103",
        ("a name that is empty",),
        ("''",),
    ),
    "name with a terminal escape": BadFile(
        shard(b'{"a\\u001b[31m":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"\0" * 4),
        "HC103",
        ("does not print", "'a\\x1b[31m'"),
        ("'a\\x1b[31m'",),
    ),
    "name with half a surrogate pair": BadFile(
        shard(b'{"a\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"\0" * 4),
        "HC103",
        ("'a\\ud800'",),
        ("'a\\ud800'",),
    ),
    "overlap": BadFile(
        shard(header(a=entry("F32", [2], 0, 8), b=entry("F32", [1], 4, 8)), b"\0" * 8),
        "HC104",
        ("a at 0..8 and b at 4..8", "end to end"),
        ("a", "b"),
        ("a", "b"),
    ),
    "two tensors in one place": BadFile(
        shard(header(a=entry("F32", [1], 0, 4), b=entry("I32", [1], 0, 4)), b"\0" * 4),
        "HC104",
        ("overlap",),
        ("a", "b"),
    ),
    "gap": BadFile(
        shard(header(a=entry("F32", [1], 0, 4), b=entry("F32", [1], 8, 12)), b"\0" * 12),
        "HC104",
        ("4 unused bytes before b (at 8)",),
        ("b",),
        ("a", "b"),
    ),
    "data that does not start at 0": BadFile(
        shard(header(a=entry("F32", [1], 4, 8)), b"\0" * 8), "HC104", ("4 unused bytes before a (at 4)",), ("a",)
    ),
    "truncated inside a tensor": BadFile(
        shard(header(a=entry("F32", [1], 0, 4), b=entry("F32", [2], 4, 12), c=entry("F32", [1], 12, 16)), b"\0" * 9),
        "HC105",
        ("truncated: 2 of its 3 tensors are lost, from b, c on", "9 bytes of data, ending inside b", "needs 16"),
        ("b", "c"),
        ("a", "b", "c"),
    ),
    "no data at all": BadFile(
        shard(header(a=entry("F32", [1], 0, 4))), "HC105", ("0 bytes of data", "needs 4"), ("a",)
    ),
    "offset beyond the file": BadFile(
        shard(header(a=entry("U8", [2**40], 0, 2**40)), b"\0" * 4), "HC105", (f"needs {2**40}",), ("a",)
    ),
    "trailing bytes": BadFile(
        shard(header(a=entry("F32", [1], 0, 4)), b"\0" * 7),
        "HC105",
        ("longer than its header", "3 bytes after"),
        (),
        ("a",),
    ),
    "data without tensors": BadFile(shard(b"{}", b"\0" * 5), "HC105", ("5 bytes after the last tensor",)),
}
