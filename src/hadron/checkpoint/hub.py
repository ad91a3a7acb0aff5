"""Checkpoints on the Hub: a downloaded snapshot where there is one, else headers by byte range.

Checking a 700 GB checkpoint reads a few megabytes: the configuration files, the index, and of each shard
its header. Nothing is written to disk on that road. `download` is for running the model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from huggingface_hub import constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import LocalEntryNotFoundError
from tqdm.std import tqdm  # type: ignore[import-untyped]  # huggingface_hub reports through it

from hadron.checkpoint.fetch import TRANSPORT_ERRORS, Fetcher, Part
from hadron.checkpoint.header import LENGTH_BYTES, Header, check_length, parse_header
from hadron.checkpoint.index import find_index, missing_numbers, parse_index, select_shards
from hadron.checkpoint.json_text import MAX_CONFIG_BYTES, JsonFault, parse_json_object
from hadron.checkpoint.source import LocalFolder, Progress, Source, no_progress
from hadron.errors import CheckpointError, HubError

#: what running a model can need; other weights formats and pictures stay on the Hub
_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
#: asked for first; longer headers take a second request
_FIRST_BYTES = 256 * 1024
#: of all headers together; published checkpoints need less than a tenth
_MAX_ALL_HEADERS = 1 << 30
#: RuntimeError is how its transfer library reports trouble
_DOWNLOAD_ERRORS: tuple[type[Exception], ...] = (*TRANSPORT_ERRORS, LocalEntryNotFoundError, ValueError, RuntimeError)
_HUB_ID = re.compile(r"(?P<id>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w./-]+))?", re.ASCII)

R = TypeVar("R")


def parse_hub_id(model: str) -> tuple[str, str]:
    """(`org/name`, revision) of `org/name` or `org/name@revision`; `CheckpointError` for anything else."""
    match = _HUB_ID.fullmatch(model)
    if match is None or ".." in model or len(match["id"]) > 96:
        raise CheckpointError(
            f"there is no folder {model!r}",
            where=model,
            found="neither a folder nor a Hub id",
            accepted="a folder with config.json and *.safetensors, or ORG/NAME or ORG/NAME@REVISION on the Hub",
            hint="check the spelling and the current folder",
        )
    return match["id"], match["revision"] or constants.DEFAULT_REVISION


@dataclass(frozen=True)
class Hub:
    """Access to one Hub.

    endpoint: None takes HF_ENDPOINT, or huggingface_hub's default. cache_dir: None takes its cache.
    workers: requests at a time.
    """

    endpoint: str | None = None
    cache_dir: Path | None = None
    fetcher: Fetcher = field(default_factory=Fetcher)
    workers: int = 8

    @property
    def url(self) -> str:
        """Where requests go, without a slash at the end."""
        return (self.endpoint or os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")

    def source(self, model: str, progress: Progress = no_progress) -> Source:
        """The downloaded snapshot of `model` where it is complete (or nothing else can be had), else the
        repository itself. `CheckpointError` when `model` is no Hub id, `HubError` from the network.
        """
        repo, revision = parse_hub_id(model)
        cached = self._cached(repo, revision)
        if cached is not None and (constants.is_offline_mode() or _complete(cached)):
            return LocalFolder(cached, model, progress)
        if constants.is_offline_mode():
            raise HubError(
                f"{model} is not downloaded, and the Hub must not be asked",
                where=model,
                found="HF_HUB_OFFLINE is set, and no snapshot in the cache",
                accepted="a local folder, a downloaded snapshot, or access to the Hub",
                hint=f"run `hf download {repo}` while online",
            )
        return RemoteFolder(self, model, repo, revision, progress)

    def download(self, model: str, progress: Progress = no_progress) -> Path:
        """The local folder of `model`, downloaded (an interrupted download resumes) unless it is there.

        progress gets `download`, bytes done and bytes known so far, from several threads.
        """
        repo, revision = parse_hub_id(model)
        cached = self._cached(repo, revision)
        if cached is not None and _complete(cached):
            return cached
        try:
            folder = snapshot_download(
                repo,
                revision=revision,
                endpoint=self.url,
                cache_dir=self.cache_dir,
                token=self.fetcher.token,
                allow_patterns=list(_FILES),
                max_workers=self.workers,
                tqdm_class=_bars(progress),
            )
        except _DOWNLOAD_ERRORS as error:
            raise _download_error(model, error) from None
        return Path(folder)

    def _cached(self, repo: str, revision: str) -> Path | None:
        config = try_to_load_from_cache(repo, "config.json", cache_dir=self.cache_dir, revision=revision)
        return Path(config).parent if isinstance(config, str) else None


def _download_error(model: str, error: Exception) -> HubError:
    response = getattr(error, "response", None)
    status = f"HTTP status {response.status_code}: " if response is not None else ""
    lines = str(error).strip().splitlines()
    return HubError(
        f"{model} could not be downloaded",
        where=model,
        found=status + (lines[0] if lines else type(error).__name__),
        accepted="a repository that may be read, a connection, and room on the disk",
        hint="run the command again to resume; `hf auth login` for gated models",
    )


def _complete(folder: Path) -> bool:
    """Whether every shard is there, as far as the index or the numbering in the names tells."""
    files = LocalFolder(folder).files()
    index, problems = find_index(files)
    try:
        weight_map = parse_index(index, (folder / index).read_bytes())[0] if index else None
    except OSError:  # a link into a part of the cache that was removed
        return False
    used, _ = select_shards(files, weight_map)
    return bool(used) and not problems and not missing_numbers(used) and all((folder / name).exists() for name in used)


def _bars(progress: Progress) -> type[Any]:
    class Bars(tqdm):  # type: ignore[misc]
        """Draws nothing; tells `progress` about the bar that counts all bytes."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            self._counts = kwargs.get("unit") == "B" and kwargs.get("desc") != "Downloading bytes"
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            """Count, and report."""
            with self.get_lock():
                self.n += n or 0
            if self._counts:
                progress("download", int(self.n), int(self.total or 0))
            return None

    return Bars


class RemoteFolder:
    """A repository on the Hub at one commit, read file by file and range by range."""

    root: Path | None = None

    def __init__(self, hub: Hub, model: str, repo: str, revision: str, progress: Progress) -> None:
        self.model = model
        self._hub = hub
        self._progress = progress
        self._repo = repo
        self._commit, self._files = self._listing(revision)

    def _listing(self, revision: str) -> tuple[str, list[str]]:
        url = f"{self._hub.url}/api/models/{self._repo}/revision/{quote(revision, safe='')}"
        try:
            info = parse_json_object(self._hub.fetcher.whole(url, self.model, MAX_CONFIG_BYTES))
            commit = info.get("sha")
            siblings = info.get("siblings")
            if not isinstance(commit, str) or not commit.isalnum() or not isinstance(siblings, list):
                raise JsonFault("no commit or no list of files", "a model's description")
            names = [s.get("rfilename") if isinstance(s, dict) else None for s in siblings]
        except (JsonFault, FileNotFoundError) as error:
            fault = isinstance(error, JsonFault)
            raise HubError(
                f"{self.model} could not be found on the Hub",
                where=url,
                found=f"an answer that cannot be used: {error}" if fault else "HTTP status 404",
                accepted="the description of a model repository",
                hint="check HF_ENDPOINT" if fault else "check the id and the revision; private models need a token",
            ) from None
        return commit, sorted(name for name in names if isinstance(name, str))

    def files(self) -> list[str]:
        """Names of the files at the top of the repository."""
        return [name for name in self._files if "/" not in name]

    def _url(self, name: str) -> str:
        return f"{self._hub.url}/{self._repo}/resolve/{self._commit}/{quote(name)}"

    def read(self, name: str, limit: int) -> bytes:
        """A small file's bytes; `FileNotFoundError`, `HubError`."""
        if name not in self._files:
            raise FileNotFoundError(name)
        self._progress(name, 0, 1)
        data = self._hub.fetcher.whole(self._url(name), f"{self.model}/{name}", limit)
        self._progress(name, 1, 1)
        return data

    def headers(self, names: Sequence[str]) -> list[Header | None]:
        """The header of each shard, by byte ranges; None where the repository has no such file."""
        there = set(self._files)
        present = {name: number for number, name in enumerate(names) if name in there}
        total = len(present)
        first = self._all(
            lambda name: self._part(name, 0, _FIRST_BYTES),
            present,
            lambda done: self._progress("headers", done, total),
        )
        headers: dict[str, Header] = {}
        for name, part in first.items():
            refused = check_length(name, part.data[:LENGTH_BYTES], part.total)
            if refused is not None:
                headers[name] = refused
        lengths = {
            name: int.from_bytes(first[name].data[:LENGTH_BYTES], "little") for name in present if name not in headers
        }
        if sum(lengths.values()) > _MAX_ALL_HEADERS:
            raise HubError(
                f"the headers of {self.model} are too long to fetch",
                where=self.model,
                found=f"{sum(lengths.values())} bytes in {len(lengths)} shards",
                accepted=f"at most {_MAX_ALL_HEADERS} bytes",
                hint="download the checkpoint and check the folder",
            )
        longer = [name for name, length in lengths.items() if LENGTH_BYTES + length > len(first[name].data)]
        rest = self._all(
            lambda name: self._part(name, len(first[name].data), LENGTH_BYTES + lengths[name] - len(first[name].data)),
            longer,
            lambda done: self._progress("long headers", done, len(longer)),
        )
        for name, length in lengths.items():
            data = first[name].data + (rest[name].data if name in rest else b"")
            raw = data[LENGTH_BYTES : LENGTH_BYTES + length]
            headers[name] = parse_header(name, raw, first[name].total, present[name])
        return [headers.get(name) for name in names]

    def _part(self, name: str, start: int, length: int) -> Part:
        return self._hub.fetcher.part(self._url(name), f"{self.model}/{name}", start, length)

    def _all(self, one: Callable[[str], R], names: Iterable[str], report: Callable[[int], None]) -> dict[str, R]:
        """`one(name)` for every name, several at a time; the first failure stops the rest."""
        with ThreadPoolExecutor(max_workers=self._hub.workers, thread_name_prefix="hadron-hub") as pool:
            futures = {pool.submit(one, name): name for name in names}
            results = {}
            try:
                for done, future in enumerate(as_completed(futures), 1):
                    results[futures[future]] = future.result()
                    report(done)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return results
