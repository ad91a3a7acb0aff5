"""NVIDIA GPUs, as the driver's own tool describes them: planning loads no tensor library."""

from __future__ import annotations

import shutil
import subprocess

from hadron.platforms import numa
from hadron.platforms.base import Platform
from hadron.platforms.cpu import cores

_QUERY = ["--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits"]


def detect() -> Platform | None:
    """The first NVIDIA GPU, or None."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        done = subprocess.run([tool, *_QUERY], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return describe(done.stdout)


def describe(listing: str) -> Platform | None:
    """The platform in a line `name, MiB, capability` of the tool's answer; None where there is none."""
    fields = [field.strip() for field in listing.splitlines()[0].split(",")] if listing.strip() else []
    if len(fields) != 3 or not fields[1].isdigit():
        return None
    name, mebibytes, capability = fields
    return Platform(
        "cuda", "cuda", name, cores(), int(mebibytes) << 20, (f"sm_{capability.replace('.', '')}",),
        ("triton", "reference"), len(numa.nodes()),
    )  # fmt: skip
