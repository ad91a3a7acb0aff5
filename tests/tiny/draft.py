"""Checkpoints as drafts: read the headers of a real one, change what a test is about, write it out.

Files are sparse (zeros), so a draft costs nothing whatever its shapes; a test that needs values gives
them. The writer shares no code with the package.
"""

from __future__ import annotations

import copy
import json
import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

BITS = {"F32": 32, "BF16": 16, "F16": 16, "F8_E4M3": 8, "U8": 8, "I8": 8, "I32": 32, "I64": 64, "F8_E8M0": 8}
Entry = tuple[str, tuple[int, ...]]


def read_header(path: Path) -> dict[str, Entry]:
    """name -> (dtype, shape) of a safetensors file."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}


def write_safetensors(path: Path, tensors: dict[str, Entry], values: dict[str, bytes] | None = None) -> None:
    """A valid file with those tensors, zeros unless `values` has their bytes."""
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        size = prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
        for name, data in (values or {}).items():
            begin, end = header[name]["data_offsets"]
            assert len(data) == end - begin, name
            file.seek(8 + len(text) + begin)
            file.write(data)


@dataclass
class Draft:
    """A checkpoint to be written: change `config`, `tensors` and `values`, then `write`."""

    config: dict[str, Any]
    tensors: dict[str, Entry] = field(default_factory=dict)
    values: dict[str, bytes] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> Draft:
        """A draft with the configuration and the headers of a real checkpoint, without its data."""
        draft = cls(json.loads((folder / "config.json").read_text()), read_header(folder / "model.safetensors"))
        if (folder / "hf_quant_config.json").exists():
            draft.files["hf_quant_config.json"] = json.loads((folder / "hf_quant_config.json").read_text())
        return draft

    def copy(self) -> Draft:
        """An independent copy."""
        return copy.deepcopy(self)

    @property
    def quantization(self) -> dict[str, Any]:
        """The quantization configuration, for changing."""
        return self.config["quantization_config"]

    @property
    def text(self) -> dict[str, Any]:
        """The configuration of the text tower, for changing."""
        return self.config.get("text_config", self.config)

    def drop(self, *parts: str) -> None:
        """Remove every tensor whose name contains one of `parts`."""
        self.tensors = {n: e for n, e in self.tensors.items() if not any(p in n for p in parts)}

    def rename(self, old: str, new: str) -> None:
        """Replace `old` by `new` in every tensor name."""
        self.tensors = {n.replace(old, new): e for n, e in self.tensors.items()}

    def write(self, folder: Path) -> Path:
        """Write everything into `folder`, made if need be, and return it."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        for name, value in self.files.items():
            (folder / name).write_text(json.dumps(value))
        write_safetensors(folder / "model.safetensors", self.tensors, self.values)
        return folder
