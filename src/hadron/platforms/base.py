"""`Platform`: the machine a model runs on, as plain values."""

from __future__ import annotations

from msgspec import Struct


class Platform(Struct, frozen=True):
    """name: `cpu`, `cuda` or `rocm`. device: torch's word for it. memory: bytes usable in all.

    features: instruction sets (`avx2`, `avx512f`, …) or compute capability. providers: kernel
    providers in the order they are asked. nodes: of NUMA, with memory of the processor's.
    """

    name: str
    device: str
    description: str
    cores: int
    memory: int
    features: tuple[str, ...]
    providers: tuple[str, ...]
    nodes: int
