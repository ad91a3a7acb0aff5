"""`hadron env`: what a bug report should say about the machine and the software on it."""

from __future__ import annotations

import json
import platform as host
import re
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

import click

from hadron.errors import HadronError
from hadron.kernels.cpu import native
from hadron.platforms import cpu


@click.command(epilog="Exit code: 0.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> int:
    """Print versions, processor, instruction sets, threads and memory, for bug reports.

    \b
    Example:
      hadron env > environment.txt
    """
    found = environment()
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return 0
    for section, values in found.items():
        click.echo(section)
        for name, value in values.items():
            click.echo(f"  {name:<22} {_shown(value)}")
    return 0


def environment() -> dict[str, dict[str, Any]]:
    """Sections of names and plain values. Memory in bytes."""
    import psutil  # type: ignore[import-untyped]
    import torch

    processor = cpu.detect()
    memory = psutil.virtual_memory()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "software": {
            "hadron": version("hadron-llm"),
            "python": sys.version.split()[0],
            "system": host.platform(),
            "libc": " ".join(host.libc_ver()),
            **{name: _version(name) for name in _libraries()},
        },
        "processor": {
            "name": processor.description,
            "architecture": host.machine(),
            "instruction_sets": list(processor.features),
            "cores": processor.cores,
            "cores_physical": psutil.cpu_count(logical=False),
            "numa_nodes": processor.nodes,
            "native_kernels": _native_level(),
            "native_levels": list(native.levels()),
            "torch_threads": torch.get_num_threads(),
            "torch_instruction_set": torch.backends.cpu.get_cpu_capability(),
        },
        "memory": {
            "total": memory.total,
            "available": memory.available,
            "usable": processor.memory,
            "swap": psutil.swap_memory().total,
        },
        "gpu": {"torch_cuda": torch.version.cuda, "torch_hip": torch.version.hip, "devices": gpus},
    }


def _native_level() -> str | None:
    """The level in use; why none can be used, for a report must never fail."""
    try:
        return native.level_name() if native.levels() else None
    except HadronError as error:
        return f"none: {native.ENVIRONMENT}={error.found} is not one of {error.accepted}"


def _libraries() -> list[str]:
    """What the package itself requires, by its own metadata."""
    names = (
        re.match(r"[\w.-]+", requirement) for requirement in requires("hadron-llm") or [] if ";" not in requirement
    )
    return [name[0] for name in names if name]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return " ".join(map(str, value)) or "-"
    if isinstance(value, int) and value >= 1 << 20:
        return f"{value / 1e9:.1f} GB"
    return str(value)
