"""A checkpoint folder in hub naming, read whole and written whole: the tiny models fit in memory many times."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
INDEX = "model.safetensors.index.json"


def folders(usage: str | None) -> tuple[Path, Path]:
    """BF16_FOLDER and OUT_FOLDER of the command line; OUT_FOLDER is new, so that nothing old stays in it."""
    if len(sys.argv) != 3:
        sys.exit(f"{usage}\nusage: python {sys.argv[0]} BF16_FOLDER OUT_FOLDER")
    source, out = map(Path, sys.argv[1:])
    if not (source / "config.json").exists():
        sys.exit(f"{source} is no checkpoint: it has no config.json")
    if out.exists():
        sys.exit(f"{out} exists already: delete it or name another folder")
    return source, out


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's `config.json`."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Writes `config.json`."""
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of all files that hold weights, by name."""
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("model*.safetensors"):
        tensors |= load_file(file)
    return dict(sorted(tensors.items()))


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Makes the folder: `config.json`, one file of weights and its index."""
    folder.mkdir(parents=True)
    write_config(folder, config)
    add_shard(folder, "model.safetensors", tensors)


def add_shard(folder: Path, name: str, tensors: dict[str, Tensor]) -> None:
    """Adds a file of weights, and writes the index of all there are."""
    save_file(tensors, folder / name, metadata={"format": "pt"})
    files = sorted(folder.glob("model*.safetensors"))
    weight_map = {}
    for file in files:
        with safe_open(file, "pt") as shard:
            weight_map |= dict.fromkeys(shard.keys(), file.name)
    index = {"metadata": {"total_size": sum(file.stat().st_size for file in files)}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def copy_companions(source: Path, out: Path) -> None:
    """Copies tokenizer, chat template and generation settings, those there are."""
    for name in COMPANIONS:
        if (source / name).exists():
            shutil.copyfile(source / name, out / name)


def mtp_prefix(tensors: dict[str, Tensor]) -> str:
    """What the names of the MTP layer's tensors begin with, such as `model.layers.6.`."""
    marks = [name.removesuffix("eh_proj.weight") for name in tensors if name.endswith(".eh_proj.weight")]
    if len(marks) != 1:
        raise SystemExit(f"the checkpoint should have one MTP layer (a tensor `*.eh_proj.weight`), not {len(marks)}")
    return marks[0]
