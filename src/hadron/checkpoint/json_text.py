"""Strict JSON for configuration files: no key twice, no NaN, no overflow, no byte order mark.

The language's own parser keeps the last of two equal keys and takes NaN; a configuration that relies
on either means different things to different readers, so both are refused by name.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

#: no configuration file is near this size; more is refused unread
MAX_CONFIG_BYTES = 64 * 1024 * 1024


class JsonFault(ValueError):  # noqa: N818 - a fault in a file, which callers turn into a problem or an error
    """Why a text is not usable JSON. found: what is wrong; accepted: what would do."""

    def __init__(self, found: str, accepted: str) -> None:
        self.found = found
        self.accepted = accepted
        super().__init__(f"found {found}; accepted {accepted}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise JsonFault(f"the key {key!r} twice in one object", "every key once")
            seen.add(key)
    return mapping


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise JsonFault(f"the number {text[:40]}, which overflows", "finite numbers")
    return value


def _constant(text: str) -> NoReturn:
    raise JsonFault(f"the literal {text}", "JSON numbers, which are finite")


def decode_text(raw: bytes) -> str:
    """UTF-8 text without a byte order mark; raises `JsonFault`."""
    if raw.startswith(b"\xef\xbb\xbf"):
        raise JsonFault("a byte order mark (bytes EF BB BF) at the start", "UTF-8 without one")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JsonFault(f"byte 0x{raw[error.start]:02X} at offset {error.start}, not UTF-8", "UTF-8 text") from None


def parse_json(raw: bytes) -> Any:
    """The value of a JSON text, strictly; raises `JsonFault` for anything else."""
    text = decode_text(raw)
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_float=_finite, parse_constant=_constant)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        what = f"{error.msg} at line {error.lineno}, column {error.colno}" if text.strip() else "an empty file"
        raise JsonFault(what, "one JSON value") from None
    except JsonFault:
        raise
    except RecursionError:
        raise JsonFault("nesting too deep to read", "nesting as in published configurations") from None
    except UnicodeEncodeError:
        raise JsonFault("half of a surrogate pair (\\ud800 to \\udfff) in a string", "valid Unicode") from None
    except ValueError:  # an integer of more digits than Python converts
        raise JsonFault("an integer of thousands of digits", "numbers of sane length") from None
    return value


def parse_json_object(raw: bytes) -> dict[str, Any]:
    """As `parse_json`, for a text whose top value is an object."""
    value = parse_json(raw)
    if not isinstance(value, dict):
        kind = {list: "an array", str: "a string", type(None): "null", bool: "a boolean"}.get(type(value), "a number")
        raise JsonFault(f"{kind} at the top", "a JSON object")
    return value
