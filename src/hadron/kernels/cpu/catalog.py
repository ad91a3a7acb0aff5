"""Native kernels for the CPU: products from packed weights. What is not native yet runs on `reference`."""

from __future__ import annotations

from importlib.util import find_spec

from hadron.kernels.catalog import Catalog, Kernel

_ROWS = (
    Kernel("linear", "hadron.kernels.cpu.linear.bind"),
    Kernel("mlp", "hadron.kernels.cpu.mlp.bind"),
    Kernel("moe", "hadron.kernels.cpu.moe.bind"),
    Kernel("lm_head", "hadron.kernels.cpu.lm_head"),
    Kernel("mla", "hadron.kernels.cpu.mla"),
    Kernel("indexer", "hadron.kernels.cpu.indexer"),
)

CATALOG = (
    Catalog("cpu", _ROWS, completed_by="reference")
    if find_spec("hadron.kernels.cpu._native") is not None
    else Catalog("cpu", absent="this build has no native CPU kernels (no compiler, or HADRON_SKIP_NATIVE was set)")
)
