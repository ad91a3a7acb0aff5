"""`Facts`: what is in a checkpoint, before anybody interprets it.

Configuration files, the index, and every tensor's name, dtype, shape and place, from headers alone.
What is wrong with the files is collected in `problems`; only a checkpoint that cannot be read at all
(no configuration, no weights, no network) is an exception.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from hadron.checkpoint.garbage import paused_gc
from hadron.checkpoint.header import MAX_HEADER_BYTES, Header, Tensor
from hadron.checkpoint.index import find_index, missing_numbers, parse_index, report_unused, select_shards
from hadron.checkpoint.json_text import MAX_CONFIG_BYTES, JsonFault, parse_json_object
from hadron.checkpoint.placing import Placing
from hadron.checkpoint.source import Progress, Source, local_folder, no_progress, no_weights
from hadron.errors import ConfigError
from hadron.problems import Problem, Severity, problem

if TYPE_CHECKING:
    from hadron.checkpoint.hub import Hub

__all__ = ["Facts", "Shard", "Tensor", "open_source", "read_facts"]


class Shard(Struct, frozen=True):
    """One safetensors file. size is its length in bytes, data_start where its data section begins.

    path is None when only the header was fetched; mtime_ns is 0 then. data_start is 0 where the header
    could not be read.
    """

    name: str
    path: Path | None
    size: int
    data_start: int
    mtime_ns: int


@dataclass
class Facts:
    """A checkpoint as found. `modules` maps a tensor name without its last part to suffix -> tensor.

    config is `config.json`. unusable: names of tensors that the files or the index speak of, but that
    are not in `tensors` because of a problem already reported (so nobody need call them missing).
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
    unusable: frozenset[str] = frozenset()


def open_source(model: str | Path, hub: Hub | None = None, progress: Progress = no_progress) -> Source:
    """The local folder `model`, or else the Hub repository of that id.

    `CheckpointError` when it is neither, `HubError` from the Hub.
    """
    folder = local_folder(model, progress)
    if folder is not None:
        return folder
    from hadron.checkpoint.hub import Hub  # costs a second of imports, and local folders need none of it

    return (hub or Hub()).source(str(model), progress)


def read_facts(model: str | Path | Source, *, hub: Hub | None = None, progress: Progress = no_progress) -> Facts:
    """Everything that headers and configuration files say about a checkpoint.

    `ConfigError` without a usable `config.json`, `CheckpointError` without weights, `HubError` from the
    Hub; whatever else is wrong is in `Facts.problems`.
    """
    source = open_source(model, hub, progress) if isinstance(model, str | Path) else model
    with paused_gc():
        return _read(source)


def _read(source: Source) -> Facts:
    files = source.files()
    if not any(name.endswith(".safetensors") for name in files):
        raise no_weights(source.model, files)
    problems: list[Problem] = []
    config = _config(source)
    hf_quant_config = _side_file(source, files, "hf_quant_config.json", problems, needed=not _has_quantization(config))
    generation_config = _side_file(source, files, "generation_config.json", problems, needed=False)
    index, weight_map = _index(source, files, problems)
    used, others = select_shards(files, weight_map)
    headers = source.headers(used)
    placing = Placing(index, weight_map)
    shards = []
    for name, header in zip(used, headers, strict=True):
        found = header or Header()
        path = source.root / name if source.root is not None else None
        shards.append(Shard(name, path, found.size, found.data_start, found.mtime_ns))
        placing.add(name, header)
    problems += placing.finish()
    if weight_map is None:
        problems += missing_numbers(used)
    for name, header in zip(others, source.headers(others), strict=True):
        report = report_unused(name, header, index, placing.tensors) if header else None
        problems += [report] if report else []
    return Facts(
        model=source.model,
        root=source.root,
        config=config,
        hf_quant_config=hf_quant_config,
        generation_config=generation_config or {},
        shards=tuple(shards),
        tensors=placing.tensors,
        modules=_modules(placing.tensors),
        problems=problems,
        unusable=frozenset(placing.unusable),
    )


def _modules(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        of_module = modules.get(module)
        if of_module is None:
            modules[module] = {suffix: tensor}
        else:
            of_module[suffix] = tensor
    return modules


def _has_quantization(config: Mapping[str, Any]) -> bool:
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, Mapping) else [config]
    return any("quantization_config" in part or "compression_config" in part for part in parts)


def _object(source: Source, name: str) -> dict[str, Any]:
    """A JSON file of the checkpoint; `JsonFault` says why not."""
    try:
        return parse_json_object(source.read(name, MAX_CONFIG_BYTES))
    except FileNotFoundError:
        raise JsonFault("no such file", "a JSON object") from None
    except OSError as error:
        raise JsonFault(error.strerror or str(error), "a readable file") from None


def _config(source: Source) -> dict[str, Any]:
    try:
        return _object(source, "config.json")
    except JsonFault as fault:
        raise ConfigError(
            "config.json cannot be read",
            where=f"config.json of {source.model}",
            found=fault.found,
            accepted=fault.accepted,
            hint="take the config.json of the release this checkpoint was made from",
        ) from None


def _side_file(
    source: Source, files: list[str], name: str, problems: list[Problem], *, needed: bool
) -> dict[str, Any] | None:
    if name not in files:
        return None
    try:
        return _object(source, name)
    except JsonFault as fault:
        problems.append(
            problem(
                "HC208",
                f"{name} cannot be read",
                found=fault.found,
                accepted=fault.accepted,
                hint="it is all that describes the quantization; fetch it again"
                if needed
                else "it is ignored; fetch it again or delete it",
                severity=Severity.ERROR if needed else None,
            )
        )
        return None


def _index(source: Source, files: list[str], problems: list[Problem]) -> tuple[str | None, dict[str, str] | None]:
    index, found = find_index(files)
    weight_map = None
    if index is not None:
        try:
            weight_map, found = parse_index(index, source.read(index, MAX_HEADER_BYTES))
        except OSError as error:
            found = [
                problem(
                    "HC109",
                    f"the index ({index}) cannot be used",
                    found=error.strerror or str(error),
                    accepted="a readable file",
                    hint="fetch it again, or remove it to use every model*.safetensors",
                )
            ]
    problems += found
    return (index if weight_map is not None else None), weight_map
