"""The catalogues: every operation is defined, and every dotted path leads somewhere."""

from __future__ import annotations

import importlib

import pytest

from hadron.errors import UsageError
from hadron.kernels.ops import OPERATIONS
from hadron.kernels.select import CATALOGS, providers
from hadron.quantization.scheme import parse_scheme

SCHEMES = [
    "f32", "f16", "bf16", "fp8_e4m3_tensor", "fp8_e4m3_channel", "fp8_e4m3_block_128x128", "mxfp4", "mxfp6_e2m3",
    "mxfp6_e3m2", "mxfp8_e4m3", "nvfp4", "int8_tensor", "int8_channel", "int4_channel", "int4_channel_asym",
    "int4_group_32", "int4_group_128_asym", "int4_channel_fp8",
]  # fmt: skip


def test_reference_defines_every_operation() -> None:
    assert [kernel.operation for kernel in CATALOGS["reference"].kernels] == list(OPERATIONS)


@pytest.mark.parametrize("provider", CATALOGS)
def test_every_path_leads_somewhere(provider: str) -> None:
    catalog = CATALOGS[provider]
    assert bool(catalog.kernels) != bool(catalog.absent), "kernels, or the reason why there are none"
    for kernel in catalog.kernels:
        try:
            found: object = importlib.import_module(kernel.path)
        except ModuleNotFoundError:
            module, _, name = kernel.path.rpartition(".")
            found = getattr(importlib.import_module(module), name)
            assert callable(found)
        assert f".{provider}.{kernel.operation}" in kernel.path


@pytest.mark.parametrize("operation", ["linear", "mlp", "moe", "lm_head", "router"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_reference_multiplies_by_every_scheme(operation: str, scheme: str) -> None:
    rows = [kernel for kernel in CATALOGS["reference"].kernels if kernel.operation == operation]
    assert [kernel.refusal(parse_scheme(scheme)) for kernel in rows] == [None]


def test_an_unknown_provider_is_refused_with_the_known() -> None:
    with pytest.raises(UsageError, match="There is no such kernel provider") as caught:
        providers("blas", ("reference",))
    text = str(caught.value)
    assert "--kernels" in text and "'blas'" in text and "auto, " + ", ".join(CATALOGS) in text
    assert "leave it out to let the platform choose" in text
