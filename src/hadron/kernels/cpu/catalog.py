"""Native kernels for the CPU: every operation, products from packed weights. `reference` runs other schemes."""

from __future__ import annotations

from importlib.util import find_spec

from hadron.kernels.catalog import PLAIN_ELEMENTS, Catalog, Kernel
from hadron.quantization.dtypes import Element

#: what `csrc/cpu/formats.h` reads; a new element has no native kernel until it is listed here
_READS = (
    Element.F32, Element.F16, Element.BF16, Element.E4M3, Element.E2M1, Element.E2M3, Element.E3M2, Element.INT8,
    Element.INT4,
)  # fmt: skip

_ROWS = (
    Kernel("linear", "hadron.kernels.cpu.linear.bind", _READS),
    Kernel("mlp", "hadron.kernels.cpu.mlp.bind", _READS),
    Kernel("moe", "hadron.kernels.cpu.moe.bind", _READS),
    Kernel("lm_head", "hadron.kernels.cpu.lm_head"),
    Kernel("router", "hadron.kernels.cpu.router.bind", most=(("groups", 64),)),
    Kernel("mla", "hadron.kernels.cpu.mla", _READS),
    Kernel("indexer", "hadron.kernels.cpu.indexer"),
    Kernel("kda", "hadron.kernels.cpu.kda.bind", most=(("conv_kernel", 17),)),
    Kernel("hyper_connection", "hadron.kernels.cpu.hyper_connection", most=(("streams", 16),)),
    Kernel("norm", "hadron.kernels.cpu.norm", PLAIN_ELEMENTS),
    Kernel("rope", "hadron.kernels.cpu.rope"),
    Kernel("embedding", "hadron.kernels.cpu.embedding", PLAIN_ELEMENTS),
    Kernel("quantize", "hadron.kernels.cpu.quantize.bind"),
)

CATALOG = (
    Catalog("cpu", _ROWS, completed_by="reference")
    if find_spec("hadron.kernels.cpu._native") is not None
    else Catalog("cpu", absent="this build has no native CPU kernels (it was installed with HADRON_SKIP_NATIVE)")
)
