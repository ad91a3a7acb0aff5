"""The CPU: instruction sets, cores and memory, from /proc and /sys alone."""

from __future__ import annotations

import os
import platform as host
from pathlib import Path

from hadron.platforms import numa
from hadron.platforms.base import Platform

#: flag in /proc/cpuinfo -> name used here; the order is from narrow to wide
INSTRUCTION_SETS: dict[str, str] = {
    "asimd": "neon", "sve": "sve", "avx2": "avx2", "fma": "fma", "f16c": "f16c", "avx512f": "avx512f",
    "avx512bw": "avx512bw", "avx512vl": "avx512vl", "avx512vbmi": "avx512_vbmi", "avx512_vnni": "avx512_vnni",
    "avx512_bf16": "avx512_bf16", "amx_tile": "amx_tile", "amx_bf16": "amx_bf16", "amx_int8": "amx_int8",
}  # fmt: skip


def detect() -> Platform:
    """This machine's processor."""
    return describe(
        Path("/proc/cpuinfo").read_text(errors="replace"), Path("/proc/meminfo").read_text(), cgroup_limit(), cores(),
        len(numa.nodes()),
    )  # fmt: skip


def describe(cpuinfo: str, meminfo: str, limit: int | None, count: int, nodes: int) -> Platform:
    """The platform that those files describe. limit: bytes a control group allows, or None. nodes: of NUMA."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    total = next((int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemTotal:")), 0)
    name = fields.get("model name") or fields.get("Processor") or host.machine()
    features = tuple(shown for flag, shown in INSTRUCTION_SETS.items() if flag in flags)
    memory = total if limit is None else min(total, limit)
    return Platform("cpu", "cpu", name, count, memory, features, ("cpu", "reference"), nodes)


def cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def cgroup_limit() -> int | None:
    """The memory limit of this process's control group (v2, then v1), or None."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return None
