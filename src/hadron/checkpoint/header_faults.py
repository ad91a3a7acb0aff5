"""Says exactly what is wrong with a safetensors header that `header` would not take at once.

Reads with the language's JSON parser, pair by pair, so that nothing is lost: keys given twice, fields
of the wrong type, ranges that overlap. One problem a kind and file, naming every tensor concerned.
Entries whose dtype and shape are sound stay usable although the file is refused, so that one damaged
shard does not drown the report in missing tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from hadron.checkpoint.header import LENGTH_BYTES, MAX_DIMS, Header, Tensor, unreadable
from hadron.checkpoint.json_text import JsonFault, decode_text
from hadron.problems import Problem, problem
from hadron.quantization.dtypes import STORAGE_BITS

_AGAIN = "download the file again, or write it with a current safetensors library"
_FIELDS = ("dtype", "shape", "data_offsets")


class Pairs(list[tuple[str, Any]]):
    """A JSON object as its pairs, in order and with repetitions."""


def printable(name: str) -> str:
    """The name as it is, or as an escaped literal where a terminal or an encoding would stumble over it."""
    return name if name and name.isprintable() else ascii(name)


def listing(names: list[str], limit: int = 3) -> str:
    """The first few names, quoted where they do not print, and how many more."""
    shown = ", ".join(map(printable, names[:limit]))
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")


def diagnose(name: str, raw: bytes, size: int, shard: int) -> Header:
    """The usable part of a header, with every problem in it. Arguments as for `parse_header`."""
    try:
        text = decode_text(raw)
        if not text.startswith("{"):
            raise JsonFault(f"{text[:1]!r} as the first character" if text else "nothing", "a JSON object")
        pairs = json.loads(text, object_pairs_hook=Pairs, parse_constant=_constant)
    except JsonFault as fault:
        return unreadable(name, fault.found, fault.accepted, _AGAIN)
    except json.JSONDecodeError as error:
        return unreadable(name, f"{error.msg} at character {error.pos}", "one JSON object", _AGAIN)
    except RecursionError:
        return unreadable(name, "nesting too deep to read", "entries of three fields", _AGAIN)
    except ValueError:
        return unreadable(name, "an integer of thousands of digits", "sizes below 2^64", _AGAIN)
    header = Header(data_start=LENGTH_BYTES + len(raw), size=size)
    header.problems += _repeated(name, pairs)
    entries = dict(pairs)
    if "__metadata__" in entries:
        _metadata(name, entries.pop("__metadata__"), header)
    broken: dict[str, list[str]] = {}
    ranges: dict[str, tuple[int, int]] = {}
    for tensor_name, entry in entries.items():
        why = _entry(tensor_name, entry, shard, header.tensors, ranges)
        if why is not None:
            broken.setdefault(why, []).append(tensor_name)
    for why, names in broken.items():
        header.problems.append(
            problem(
                "HC103",
                f"{len(names)} entr{'y' if len(names) == 1 else 'ies'} in the header of {name} "
                f"cannot be used ({listing(names)})",
                found=why,
                accepted="a dtype of the format, a shape and the byte range that they need",
                hint=_AGAIN,
                tensors=tuple(map(printable, names)),
            )
        )
    header.broken = frozenset(n for names in broken.values() for n in names)
    header.problems += _layout(name, ranges, size - header.data_start)
    return header


def _constant(text: str) -> float:
    raise JsonFault(f"the literal {text}", "JSON numbers, which are finite")


def _repeated(name: str, pairs: Pairs) -> list[Problem]:
    """HC102: names given twice, or fields given twice within an entry."""
    names: list[str] = []
    if len(dict(pairs)) != len(pairs):
        counts: dict[str, int] = {}
        for key, _ in pairs:
            counts[key] = counts.get(key, 0) + 1
        names = [key for key, count in counts.items() if count > 1]
    found = [f"{listing(names)} twice"] if names else []
    for key, entry in pairs:
        if isinstance(entry, Pairs) and len(dict(entry)) != len(entry):
            fields = [field for field, _ in entry]
            twice = next(field for field in fields if fields.count(field) > 1)
            found.append(f"{twice!r} twice in the entry of {listing([key])}")
            names.append(key)
    if not found:
        return []
    return [
        problem(
            "HC102",
            f"the header of {name} holds a key twice",
            found="; ".join(found[:3]),
            accepted="every key once",
            hint="readers disagree about which one counts; write the file again",
            tensors=tuple(map(printable, dict.fromkeys(names))),
        )
    ]


def _metadata(name: str, value: Any, header: Header) -> None:
    if isinstance(value, Pairs) and all(isinstance(text, str) for _, text in value):
        header.metadata = dict(value)
        return
    wrong = next((key for key, text in value if not isinstance(text, str)), "") if isinstance(value, Pairs) else ""
    header.problems.append(
        problem(
            "HC103",
            f"__metadata__ in the header of {name} is malformed",
            found=f"{wrong!r} with a value that is no string" if wrong else "something else than an object",
            accepted="an object of strings",
            hint=_AGAIN,
            tensors=("__metadata__",),
        )
    )


def _size(value: Any) -> bool:
    return type(value) is int and value >= 0


def _entry(
    name: str, entry: Any, shard: int, tensors: dict[str, Tensor], ranges: dict[str, tuple[int, int]]
) -> str | None:
    """Put one entry where it belongs, or say what is wrong with it.

    A range that can be read counts in the layout even where dtype or shape are bad.
    """
    if not isinstance(entry, Pairs):
        return "something else than an object"
    fields = dict(entry)
    missing = [key for key in _FIELDS if key not in fields]
    if missing:
        return f"no {' and no '.join(missing)}"
    dtype, shape, offsets = (fields[key] for key in _FIELDS)
    if type(offsets) is not list or len(offsets) != 2 or not all(map(_size, offsets)):
        return f"data_offsets {_short(offsets)}"
    if offsets[0] > offsets[1]:
        return f"data_offsets {_short(offsets)}, which end before they start"
    ranges[name] = (offsets[0], offsets[1])
    if not name or not name.isprintable():
        return "a name that is empty or does not print"
    if type(dtype) is not str or dtype not in STORAGE_BITS:
        return f"dtype {_short(dtype)}"
    if type(shape) is not list or not all(map(_size, shape)):
        return f"shape {_short(shape)}"
    if len(shape) > MAX_DIMS:
        return f"a shape of {len(shape)} dimensions"
    if math.prod(dim for dim in shape if dim) >= 2**63:
        return f"shape {_short(shape)}, whose elements cannot be counted in 63 bits"
    elements = math.prod(shape)
    needed, rest = divmod(elements * STORAGE_BITS[dtype], 8)
    if rest:
        return f"{elements} elements of {dtype}, which fill no whole number of bytes"
    if needed != offsets[1] - offsets[0]:
        return f"{offsets[1] - offsets[0]} bytes for {dtype} {_short(shape)}, which needs {needed}"
    tensors[name] = Tensor(dtype, tuple(shape), (offsets[0], offsets[1]), shard)
    return None


def _short(value: Any) -> str:
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # digits beyond Python's limit; nesting
        return "beyond all bounds"
    return text if len(text) <= 60 else text[:57] + "..."


def _layout(name: str, ranges: dict[str, tuple[int, int]], data_bytes: int) -> list[Problem]:
    """HC104 and HC105: entries must lie end to end from 0 to the end of the file."""
    order = sorted(ranges.items(), key=lambda item: item[1])
    overlaps: list[tuple[str, str]] = []
    gaps: list[str] = []
    cursor, previous = 0, ""
    for tensor, (start, end) in order:
        if start < cursor:
            overlaps.append((previous, tensor))
        elif start > cursor:
            gaps.append(tensor)
        if end >= cursor:
            cursor, previous = end, tensor
    problems: list[Problem] = []

    def add(code: str, message: str, found: str, names: list[str], hint: str = _AGAIN) -> None:
        problems.append(
            problem(
                code, message, found=found, accepted=_ACCEPTED[code], hint=hint, tensors=tuple(dict.fromkeys(names))
            )
        )

    if overlaps:
        first = overlaps[0]
        a, b = ranges[first[0]], ranges[first[1]]
        found = f"{listing([first[0]])} at {a[0]}..{a[1]} and {listing([first[1]])} at {b[0]}..{b[1]}"
        more = f", {len(overlaps)} such pairs" if len(overlaps) > 1 else ""
        add("HC104", f"tensors in {name} overlap", found + more, [n for pair in overlaps for n in pair])
    if gaps:
        _gaps(name, ranges, gaps, add)
    if cursor > data_bytes:
        lost = [tensor for tensor, (_, end) in order if end > data_bytes]
        cut = [tensor for tensor in lost if ranges[tensor][0] < data_bytes]
        message = f"{name} is truncated: {len(lost)} of its {len(order)} tensors are lost, from {listing(lost)} on"
        found = f"{data_bytes} bytes of data" + (f", ending inside {listing(cut[:1])}" if cut else "")
        add("HC105", message, f"{found}, where the header needs {cursor}", lost, "download the file again (it resumes)")
    elif cursor < data_bytes:
        found = f"{data_bytes - cursor} bytes after the last tensor"
        add(
            "HC105", f"{name} is longer than its header says", found, [], "the header or the file is damaged; " + _AGAIN
        )
    return problems


_ACCEPTED = {
    "HC104": "tensors that lie end to end from offset 0",
    "HC105": "a file that ends with its last tensor",
}


def _gaps(
    name: str, ranges: dict[str, tuple[int, int]], gaps: list[str], add: Callable[[str, str, str, list[str]], None]
) -> None:
    start = ranges[gaps[0]][0]
    more = f", and {len(gaps) - 1} more" if len(gaps) > 1 else ""
    before = max((end for begin, end in ranges.values() if begin < start), default=0)
    found = f"{start - before} unused bytes before {listing(gaps[:1])} (at {start}){more}"
    add("HC104", f"tensors in {name} leave gaps", found, gaps)
