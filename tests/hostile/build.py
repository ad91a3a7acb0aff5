"""Writes safetensors files and checkpoints byte by byte, so that they can be wrong in one way at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GOOD_CONFIG = b'{"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa"}'


def shard(header: bytes, data: bytes = b"") -> bytes:
    """A safetensors file with that header text."""
    return len(header).to_bytes(8, "little") + header + data


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    """One tensor's entry."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def header(**tensors: Any) -> bytes:
    """Header text of those entries; `__` in a name stands for a dot."""
    return json.dumps({name.replace("__", "."): value for name, value in tensors.items()}).encode()


def good_shard(*names: str, dtype: str = "F32", fill: bytes = b"\0\0\0\0") -> bytes:
    """A valid file with one [2] tensor a name."""
    width = 2 * len(fill)
    entries = {name: entry(dtype, [2], i * width, (i + 1) * width) for i, name in enumerate(names)}
    return shard(json.dumps(entries).encode(), fill * 2 * len(names))


def checkpoint(folder: Path, **files: bytes) -> Path:
    """A folder with a configuration and those files; `__` in a name stands for a dot, as in model__safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes(GOOD_CONFIG)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_bytes(content)
    return folder


def index(**shard_of: str) -> bytes:
    """An index; `__` in a name stands for a dot."""
    weight_map = {name.replace("__", "."): shard for name, shard in shard_of.items()}
    return json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}).encode()
