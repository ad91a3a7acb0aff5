"""`Facts`: what is in a checkpoint, before anybody interprets it.

Configuration files, the index, and every tensor's name, dtype, shape and place, from headers alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import Struct

from hadron.problems import Problem


class Tensor(Struct, gc=False):
    """One entry of a safetensors header.

    data_offsets are relative to the shard's data section, as in the header. shard indexes
    `Facts.shards`.
    """

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]
    shard: int = -1


class Shard(Struct, frozen=True):
    """One safetensors file. size is its length in bytes, data_start where its data section begins.

    path is None when only the header was fetched; mtime_ns is 0 then.
    """

    name: str
    path: Path | None
    size: int
    data_start: int
    mtime_ns: int


@dataclass
class Facts:
    """A checkpoint as found. `modules` maps a tensor name without its last part to suffix -> tensor.

    config is `config.json`; quantization_config is what `config.json` (or its text part) holds, else
    what `hf_quant_config.json` holds, else None.
    """

    model: str
    root: Path | None
    config: Mapping[str, Any]
    hf_quant_config: Mapping[str, Any] | None
    generation_config: Mapping[str, Any]
    shards: tuple[Shard, ...]
    tensors: dict[str, Tensor]
    modules: dict[str, dict[str, Tensor]]
    problems: list[Problem] = field(default_factory=list)
