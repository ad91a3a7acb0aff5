"""The catalogues: every operation is defined, and every dotted path leads somewhere."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType

import pytest

from hadron.errors import UsageError
from hadron.kernels.ops import OPERATIONS
from hadron.kernels.select import CATALOGS, Refusal, providers, select
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


def _functions(module: ModuleType) -> dict[str, list[str]]:
    """name -> parameters of what a module defines for others, but the two that a provider binds."""
    return {
        name: [p for p in inspect.signature(value).parameters if p not in ("threads", "level")]
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }


@pytest.mark.parametrize("operation", [kernel.operation for kernel in CATALOGS["cpu"].kernels])
def test_a_native_function_is_called_as_its_definition(operation: str) -> None:
    native, defined = (
        _functions(importlib.import_module(f"hadron.kernels.{provider}.{operation}"))
        for provider in ("cpu", "reference")
    )
    shared = {name: parameters for name, parameters in native.items() if name in defined}
    assert shared and shared == {name: defined[name] for name in shared}
    (path,) = (kernel.path for kernel in CATALOGS["cpu"].kernels if kernel.operation == operation)
    assert path.endswith(operation) or path.rpartition(".")[2] in shared


def test_a_size_that_a_kernel_does_not_run_goes_to_the_next_provider() -> None:
    for operation, size, most in (
        ("router", "groups", 64),
        ("kda", "conv_kernel", 17),
        ("hyper_connection", "streams", 16),
    ):
        within, beyond = (
            select(operation, sizes=((size, value),), providers=("cpu", "reference")) for value in (most, most + 1)
        )
        assert not isinstance(within, Refusal) and not isinstance(beyond, Refusal)
        assert (within.provider, within.refused) == ("cpu", ()) and beyond.provider == "reference"
        assert f"runs {size} up to {most}, not {most + 1}" in beyond.refused[0]


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
