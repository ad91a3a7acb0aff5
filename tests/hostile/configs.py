"""Malformed config.json: what is wrong, and what the error must say."""

from __future__ import annotations

from typing import NamedTuple


class BadConfig(NamedTuple):
    """One malformed configuration."""

    content: bytes
    says: tuple[str, ...]


BAD_CONFIGS: dict[str, BadConfig] = {
    "empty": BadConfig(b"", ("an empty file", "one JSON value")),
    "blank": BadConfig(b" \n", ("an empty file",)),
    "cut short": BadConfig(b'{"hidden_size": 4', ("line 1, column",)),
    "trailing comma": BadConfig(b'{"a": 1,}', ("line 1, column",)),
    "python literals": BadConfig(b"{'a': None}", ("line 1, column 2",)),
    "comment": BadConfig(b'{\n// no\n"a": 1}', ("line 2, column 1",)),
    "two values": BadConfig(b"{} {}", ("Extra data",)),
    "array": BadConfig(b"[]", ("an array at the top", "a JSON object")),
    "null": BadConfig(b"null", ("null at the top",)),
    "string": BadConfig(b'"{}"', ("a string at the top",)),
    "number": BadConfig(b"7", ("a number at the top",)),
    "boolean": BadConfig(b"true", ("a boolean at the top",)),
    "key twice": BadConfig(b'{"hidden_size": 4, "hidden_size": 8}', ("the key 'hidden_size' twice", "every key once")),
    "key twice, deep inside": BadConfig(b'{"a": {"x": [{"n_group": 1, "n_group": 1}]}}', ("'n_group' twice",)),
    "key twice, once with an escape": BadConfig(b'{"ab": 1, "a\\u0062": 2}', ("'ab' twice",)),
    "NaN": BadConfig(b'{"rms_norm_eps": NaN}', ("the literal NaN", "finite")),
    "Infinity": BadConfig(b'{"swiglu_limit": Infinity}', ("the literal Infinity",)),
    "minus Infinity": BadConfig(b'{"a": -Infinity}', ("the literal -Infinity",)),
    "number that overflows": BadConfig(b'{"rope_theta": 1e999}', ("1e999, which overflows",)),
    "integer of five thousand digits": BadConfig(b'{"a": ' + b"1" * 5000 + b"}", ("thousands of digits",)),
    "nesting bomb": BadConfig(b'{"a":' + b"[" * 200_000, ("nesting too deep",)),
    "nesting bomb of objects": BadConfig(b'{"a":' * 200_000, ("nesting too deep",)),
    "byte order mark": BadConfig(b"\xef\xbb\xbf{}", ("byte order mark (bytes EF BB BF)", "UTF-8 without one")),
    "utf-16": BadConfig('{"a": 1}'.encode("utf-16"), ("byte 0xFF at offset 0, not UTF-8",)),
    "latin-1": BadConfig('{"é": 1}'.encode("latin-1"), ("byte 0xE9 at offset 2",)),
    "half a surrogate pair": BadConfig(b'{"a": "\\ud83d"}', ("half of a surrogate pair",)),
    "control character in a string": BadConfig(b'{"a": "\x01"}', ("line 1, column",)),
    "NUL bytes": BadConfig(b"\0" * 64, ("line 1, column 1",)),
    "web page": BadConfig(b"<!DOCTYPE html>", ("line 1, column 1",)),
    "git lfs pointer": BadConfig(b"version https://git-lfs.github.com/spec/v1\n", ("line 1, column 1",)),
}
