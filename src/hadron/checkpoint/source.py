"""Where a checkpoint comes from: a local folder here, a Hub repository in `hub`, one protocol for both."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from hadron.checkpoint.header import Header, open_file, read_header
from hadron.errors import CheckpointError

#: what is being done (`headers`, a file name), steps done, steps in all
Progress = Callable[[str, int, int], None]


def no_progress(what: str, done: int, total: int) -> None:
    """Report to nobody."""


class Source(Protocol):
    """A folder of files, wherever it is. root is None where there are no local files."""

    model: str
    root: Path | None

    def files(self) -> list[str]:
        """Names of the files at the top of the folder."""

    def read(self, name: str, limit: int) -> bytes:
        """A small file's bytes. `FileNotFoundError` when absent, `OSError` when it cannot be read or
        is longer than `limit`, `HubError` from the network.
        """

    def headers(self, names: Sequence[str]) -> list[Header | None]:
        """The header of each shard, its tensors numbered by place in `names`; None where absent."""


class LocalFolder:
    """A checkpoint in a local folder."""

    def __init__(self, root: Path, model: str | None = None, progress: Progress = no_progress) -> None:
        self.root: Path | None = root
        self.model = model or str(root)
        self._folder = root
        self._progress = progress

    def files(self) -> list[str]:
        """Names of the files at the top of the folder; `CheckpointError` when it cannot be listed."""
        try:
            with os.scandir(self._folder) as entries:
                return sorted(entry.name for entry in entries if not _is_dir(entry))
        except OSError as error:
            raise CheckpointError(
                f"the folder {self._folder} cannot be listed",
                where=str(self._folder),
                found=error.strerror or str(error),
                accepted="a folder you may read",
                hint="check its permissions",
            ) from None

    def read(self, name: str, limit: int) -> bytes:
        """A small file's bytes; `OSError` as the protocol says."""
        with open_file(self._folder / name) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise OSError(0, "not a regular file")
            if status.st_size > limit:
                raise OSError(0, f"{status.st_size} bytes, more than the {limit} read at most")
            return file.read(limit)

    def headers(self, names: Sequence[str]) -> list[Header | None]:
        """The header of each shard."""
        found: list[Header | None] = []
        for number, name in enumerate(names):
            path = self._folder / name
            found.append(read_header(path, name, number) if os.path.lexists(path) else None)
            self._progress("headers", number + 1, len(names))
        return found


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, say: opening it will tell
        return False


def local_folder(model: str | Path, progress: Progress = no_progress) -> LocalFolder | None:
    """The local folder that `model` names, or None where nothing of that name exists.

    `CheckpointError` where it is a file.
    """
    if not str(model):  # which `Path` takes for the current folder
        return None
    path = Path(model)
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return None
    if stat.S_ISDIR(mode):
        return LocalFolder(path, str(model), progress)
    if path.suffix == ".safetensors" or path.name == "config.json":
        hint = f"give the folder: {path.parent}"
    elif path.suffix == ".gguf":
        hint = "GGUF is not read; use the safetensors checkpoint it was made from"
    else:
        hint = "give the folder that holds config.json and the *.safetensors"
    raise CheckpointError(
        f"{model} is a file, not a checkpoint's folder",
        where=str(model),
        found="a file",
        accepted="a folder with config.json and *.safetensors, or a Hub id",
        hint=hint,
    )


def no_weights(model: str, files: Sequence[str]) -> CheckpointError:
    """The error for a folder without any `*.safetensors`, saying what is there instead."""
    kinds = Counter(Path(name).suffix or name for name in files)
    other = [kind for kind in (".bin", ".pth", ".pt", ".gguf", ".npz", ".ckpt") if kind in kinds]
    found = ", ".join(f"{count} x {kind}" for kind, count in kinds.most_common(6)) if files else "an empty folder"
    if other:
        hint = f"weights in {' and '.join(other)} are not read; convert them to safetensors, or take the original"
    elif files:
        hint = "the download is not finished, or this is the wrong folder"
    else:
        hint = "download the checkpoint into it, or give another folder"
    return CheckpointError(
        f"{model} holds no safetensors files",
        where=model,
        found=found,
        accepted="config.json and *.safetensors",
        hint=hint,
    )
