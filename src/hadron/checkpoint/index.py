"""The safetensors index, and which files of a folder are the checkpoint.

The index is an allow-list: a tensor counts in the shard the index gives it and nowhere else. Without
one, `model*.safetensors` are the checkpoint where there are any, else every `*.safetensors`. Of the
files left over, those that look like weights (some name ends in `.weight` or `.weight_packed`) are
reported; anything else, such as recorded activations, is nobody's business.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

from msgspec import DecodeError, Raw, Struct
from msgspec.json import Decoder

from hadron.checkpoint.header import Header
from hadron.checkpoint.header_faults import listing, printable
from hadron.checkpoint.json_text import JsonFault, parse_json, parse_json_object
from hadron.problems import Problem, Severity, problem

INDEX_SUFFIX = ".safetensors.index.json"
MODEL_INDEX = "model" + INDEX_SUFFIX
_NUMBERED = re.compile(r"(.+-)(\d+)(-of-)(\d+)(\.safetensors)")
_AGAIN = "download the index again, or remove it to use every model*.safetensors"


class _IndexFile(Struct):
    weight_map: dict[str, str]
    metadata: Raw = Raw(b"")


_DECODER = Decoder(_IndexFile)


def find_index(files: Iterable[str]) -> tuple[str | None, list[Problem]]:
    """The index to obey: `model.safetensors.index.json`, else the only `*.safetensors.index.json`."""
    found = sorted(name for name in files if name.endswith(INDEX_SUFFIX))
    if MODEL_INDEX in found or len(found) < 2:
        return (MODEL_INDEX if MODEL_INDEX in found else next(iter(found), None)), []
    return None, [_unusable("the folder", f"{len(found)} of them: {listing(found)}", "one, or " + MODEL_INDEX)]


def parse_index(name: str, raw: bytes) -> tuple[dict[str, str] | None, list[Problem]]:
    """Tensor name -> shard; None with a problem where the index cannot be used."""
    weight_map = _fast(raw)
    if weight_map is None:
        try:
            weight_map = _slow(parse_json_object(raw))
        except JsonFault as fault:
            return None, [_unusable(name, fault.found, fault.accepted)]
    outside = sorted(shard for shard in set(weight_map.values()) if not _inside(shard))
    if outside:
        return None, [_unusable(name, f"the shard name {printable(outside[0])}", "*.safetensors below the folder")]
    if not weight_map:
        return None, [_unusable(name, "a weight_map that names no tensor", "every tensor with its shard")]
    return weight_map, []


def _fast(raw: bytes) -> dict[str, str] | None:
    """The map of an index without any fault; None as soon as anything is unusual.

    Without escapes the file holds two quotes a string; as many as the strings we got means that no
    key was there twice and nothing was skipped.
    """
    if b"\\" in raw or not raw.isascii() or b"\x7f" in raw:
        return None
    try:
        index = _DECODER.decode(raw)
        metadata = bytes(index.metadata)
        if metadata:
            parse_json(metadata)
    except (DecodeError, RecursionError, JsonFault):
        return None
    quotes = 4 * len(index.weight_map) + 2 + (metadata.count(b'"') + 2 if metadata else 0)
    return index.weight_map if raw.count(b'"') == quotes and "" not in index.weight_map else None


def _slow(index: dict[str, Any]) -> dict[str, str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise JsonFault("no weight_map" if weight_map is None else "a weight_map that is no object", "a weight_map")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            raise JsonFault(f"a shard of {printable(tensor)} that is no string", "the name of its file")
        if not tensor or not tensor.isprintable():
            raise JsonFault(f"the tensor name {tensor!a}", "names that print")
    return weight_map


def _inside(shard: str) -> bool:
    path = PurePosixPath(shard)
    return shard.isprintable() and shard.endswith(".safetensors") and not path.is_absolute() and ".." not in path.parts


def _unusable(name: str, found: str, accepted: str) -> Problem:
    return problem("HC109", f"the index ({name}) cannot be used", found=found, accepted=accepted, hint=_AGAIN)


def select_shards(files: Iterable[str], weight_map: Mapping[str, str] | None) -> tuple[list[str], list[str]]:
    """(shards of the checkpoint, other `*.safetensors`), each sorted; by the rule in the module's docstring."""
    candidates = sorted(name for name in files if name.endswith(".safetensors"))
    if weight_map is not None:
        used = sorted(set(weight_map.values()))
    else:
        used = [name for name in candidates if name.startswith("model")] or candidates
    chosen = set(used)
    return used, [name for name in candidates if name not in chosen]


def missing_numbers(shards: Iterable[str]) -> list[Problem]:
    """HC106 where the names themselves (`…-00001-of-00005`) say that shards are absent."""
    found: dict[tuple[str, ...], set[int]] = {}
    for name in shards:
        if match := _NUMBERED.fullmatch(name):
            prefix, number, middle, total, suffix = match.groups()
            found.setdefault((prefix, middle, total, suffix), set()).add(int(number))
    problems = []
    for (prefix, middle, total, suffix), numbers in found.items():
        if len(total) > 6 or len(numbers) >= int(total):
            continue
        absent = [n for n in range(1, int(total) + 1) if n not in numbers]
        names = [f"{prefix}{n:0{len(total)}d}{middle}{total}{suffix}" for n in absent]
        problems.append(
            problem(
                "HC106",
                f"{len(absent)} shard(s) are not there: {listing(names)}",
                found=f"{len(numbers)} of the {int(total)} shards that their names count",
                accepted="all of them",
                hint="finish the download",
                tensors=tuple(names[:1000]),
            )
        )
    return problems


def report_unused(name: str, header: Header, index: str | None, tensors: Mapping[str, object]) -> Problem | None:
    """HC107 for a file that is no shard of the checkpoint but looks like weights, or cannot be read; else None."""
    names = list(header.tensors)
    if not header.data_start:
        return problem(
            "HC107",
            f"{name} is not part of the checkpoint and cannot be read",
            found="; ".join(fault.message for fault in header.problems),
            accepted="safetensors files",
            hint="nothing to do unless its tensors are wanted; then fetch it again",
            severity=Severity.NOTE,
        )
    if not any(tensor.endswith((".weight", ".weight_packed")) for tensor in names):
        return None
    twice = [tensor for tensor in names if tensor in tensors]
    where = f"is not in {index}" if index else "is not named model*.safetensors"
    if len(twice) == len(names):
        hint = "nothing is lost: the checkpoint holds all of these; delete the file if it is a leftover"
    elif index:
        hint = f"to use its tensors, add them to the weight_map of {index}"
    else:
        hint = f"to use its tensors, rename it to model-{name} or write an index"
    return problem(
        "HC107",
        f"{name} {where}, so its tensors are not used",
        found=f"{len(names)} tensors ({listing(names)}), {len(twice)} of them also in the checkpoint",
        accepted="weights that are shards of the checkpoint",
        hint=hint,
        tensors=tuple(names),
        severity=None if index else Severity.NOTE,
    )
