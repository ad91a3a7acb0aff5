"""`DiskPrefixes`: pages and states of prompts in a folder, for a later process with the same model and options.

On a processor a long prompt costs hours, so what it left is worth keeping. One file a page or state, named by
the hash of all tokens before its end, written beside and renamed, checked by a digest when read. A file that
cannot be read, or whose digest is wrong, is removed, and its tokens are computed again. The folder is bounded;
what was not used for longest goes first. What prompts said can be told from the files: the folder is for its
owner alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hadron.cache.pages import Pages
from hadron.cache.states import States
from hadron.errors import UsageError

logger = logging.getLogger("hadron.engine")

_MAGIC = b"HADRONP1"
_DIGEST = 32
_HEAD = len(_MAGIC) + _DIGEST + 8
#: How a file is called while it is written, and the seconds after which nobody writes it any more.
_ASIDE, _ABANDONED = ".part", 3600


class DiskPrefixes:
    """Implements `cache.stores.PrefixStore` in `root`, in a folder of its own for each `key`.

    key: everything that the bits in the caches depend on. limit: bytes of that folder. `UsageError` where
    the folder cannot be made.
    """

    def __init__(self, root: Path, key: Mapping[str, Any], limit: int, pages: Pages, states: States) -> None:
        self._limit = limit
        self._pages = pages
        self._states = states
        text = json.dumps(key, sort_keys=True, indent=1)
        self._folder = root / hashlib.sha256(text.encode()).hexdigest()[:32]
        self._writes = True
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self._folder / "key.json").write_text(text)
            self._sizes = _found(self._folder)
        except OSError as error:
            raise UsageError(
                "the folder for prefixes cannot be used",
                where="--prefix-cache-dir",
                found=f"{self._folder}: {error.strerror}",
                accepted="a folder that can be written to, or the name of a new one",
                hint="name another folder, or leave the option out",
            ) from error
        self._total = sum(self._sizes.values())
        self._shrink(0)

    def has_page(self, content: bytes) -> bool:
        """Whether there is a file of that page."""
        return _page(content) in self._sizes

    def has_state(self, content: bytes) -> bool:
        """Whether there is a file of that state."""
        return _state(content) in self._sizes

    def save_page(self, content: bytes, block: int) -> None:
        """Write a page, unless it is there."""
        if not self._known(_page(content)):
            self._write(_page(content), 0, self._pages.dump(block))

    def save_state(self, content: bytes, slot: int, tokens: int) -> None:
        """Write a state, unless it is there."""
        if not self._known(_state(content)):
            self._write(_state(content), tokens, self._states.dump(slot))

    def load_page(self, content: bytes, block: int) -> bool:
        """Fill a page; False, and the file is gone, where it cannot be used."""
        data = self._read(_page(content), 0)
        try:
            if data is not None:
                self._pages.load(block, data)
        except ValueError as error:
            self._drop(_page(content), str(error))
            return False
        return data is not None

    def load_state(self, content: bytes, slot: int, tokens: int) -> bool:
        """Fill and stamp a state; False, and the file is gone, where it cannot be used."""
        data = self._read(_state(content), tokens)
        try:
            if data is not None:
                self._states.load(slot, data, tokens)
        except ValueError as error:
            self._drop(_state(content), str(error))
            return False
        return data is not None

    def _known(self, name: str) -> bool:
        if name in self._sizes:
            self._sizes.move_to_end(name)
            return True
        return not self._writes

    def _read(self, name: str, tokens: int) -> bytes | None:
        path = self._folder / name
        try:
            data = path.read_bytes()
        except OSError as error:
            self._drop(name, str(error.strerror))
            return None
        with suppress(OSError):  # a folder that has become read-only is read all the same
            os.utime(path)
        body = memoryview(data)[len(_MAGIC) + _DIGEST :]
        if len(data) < _HEAD or data[: len(_MAGIC)] != _MAGIC or _digest(body) != data[len(_MAGIC) :][:_DIGEST]:
            self._drop(name, "its digest is wrong")
            return None
        if int.from_bytes(body[:8], "little") != tokens:
            self._drop(name, f"it is of {int.from_bytes(body[:8], 'little')} tokens, not {tokens}")
            return None
        self._sizes.move_to_end(name)
        return bytes(body[8:])

    def _write(self, name: str, tokens: int, data: bytes) -> None:
        body = tokens.to_bytes(8, "little") + data
        size = len(body) + len(_MAGIC) + _DIGEST
        if size > self._limit:
            return
        self._shrink(size)
        if not self._writes:
            return
        path = self._folder / name
        aside = path.with_suffix(f".{os.getpid()}{_ASIDE}")
        try:
            with aside.open("wb") as file:
                file.write(_MAGIC + _digest(body))
                file.write(body)
            aside.replace(path)
        except OSError as error:
            with suppress(OSError):
                aside.unlink(missing_ok=True)
            self._stop(error)
            return
        self._sizes[name] = size
        self._total += size

    def _shrink(self, more: int) -> None:
        """Remove what was not used for longest until `more` bytes fit, as long as anything can be removed."""
        while self._writes and self._sizes and self._total + more > self._limit:
            self._remove(next(iter(self._sizes)))

    def _drop(self, name: str, reason: str) -> None:
        logger.warning("a saved prefix is not used and removed: %s: %s", self._folder / name, reason)
        self._remove(name)

    def _remove(self, name: str) -> None:
        self._total -= self._sizes.pop(name, 0)
        try:
            (self._folder / name).unlink(missing_ok=True)
        except OSError as error:
            self._stop(error)

    def _stop(self, error: OSError) -> None:
        """Write no more: a disk that is full, or a folder that has become read-only, must not end a request."""
        self._writes = False
        logger.warning("prefixes are no longer written to %s: %s", self._folder, error.strerror)


def _page(content: bytes) -> str:
    return content.hex() + ".page"


def _state(content: bytes) -> str:
    return content.hex() + ".state"


def _digest(body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST).digest()


def _found(folder: Path) -> OrderedDict[str, int]:
    """Files of pages and states with their sizes, least recently used first; half-written ones are removed."""
    files = []
    for entry in os.scandir(folder):
        status = entry.stat()
        if entry.name.endswith((".page", ".state")):
            files.append((status.st_mtime_ns, entry.name, status.st_size))
        elif entry.name.endswith(_ASIDE) and time.time() - status.st_mtime > _ABANDONED:
            Path(entry.path).unlink(missing_ok=True)
    return OrderedDict((name, size) for _, name, size in sorted(files))
