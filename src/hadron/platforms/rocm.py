"""AMD GPUs, as the kernel's topology files describe them."""

from __future__ import annotations

from pathlib import Path

from hadron.platforms import numa
from hadron.platforms.base import Platform
from hadron.platforms.cpu import cores

_NODES = Path("/sys/class/kfd/kfd/topology/nodes")


def detect(nodes: Path = _NODES) -> Platform | None:
    """The first AMD GPU among topology nodes, or None."""
    try:
        found = sorted(nodes.iterdir(), key=lambda node: int(node.name))
    except (OSError, ValueError):
        return None
    for node in found:
        try:
            properties = dict(line.split() for line in (node / "properties").read_text().splitlines() if line)
            target = int(properties.get("gfx_target_version", 0))
            if not target:
                continue  # a processor
            bank = (node / "mem_banks" / "0" / "properties").read_text()
            memory = int(dict(line.split() for line in bank.splitlines() if line)["size_in_bytes"])
            name = (node / "name").read_text().strip()
        except (OSError, ValueError, KeyError):
            continue
        gfx = f"gfx{target // 10000}{target // 100 % 100:x}{target % 100:x}"
        return Platform(
            "rocm", "cuda", name or gfx, cores(), memory, (gfx,), ("triton", "reference"), len(numa.nodes())
        )  # fmt: skip
    return None
