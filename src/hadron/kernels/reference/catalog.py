"""The reference provider runs every operation on every scheme: it defines them.

Where an operation is several functions, its path is the module that holds them.
"""

from __future__ import annotations

from hadron.kernels.catalog import PLAIN_ELEMENTS, Catalog, Kernel

CATALOG = Catalog(
    "reference",
    (
        Kernel("linear", "hadron.kernels.reference.linear.bind"),
        Kernel("mlp", "hadron.kernels.reference.mlp.bind"),
        Kernel("moe", "hadron.kernels.reference.moe.bind"),
        Kernel("router", "hadron.kernels.reference.router.route"),
        Kernel("mla", "hadron.kernels.reference.mla"),
        Kernel("indexer", "hadron.kernels.reference.indexer"),
        Kernel("kda", "hadron.kernels.reference.kda"),
        Kernel("hyper_connection", "hadron.kernels.reference.hyper_connection"),
        Kernel("norm", "hadron.kernels.reference.norm", PLAIN_ELEMENTS),
        Kernel("rope", "hadron.kernels.reference.rope"),
        Kernel("embedding", "hadron.kernels.reference.embedding", PLAIN_ELEMENTS),
        Kernel("lm_head", "hadron.kernels.reference.lm_head"),
        Kernel("quantize", "hadron.kernels.reference.quantize.bind"),
    ),
)
