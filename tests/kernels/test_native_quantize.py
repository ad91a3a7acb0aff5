"""The native emulation at every level equals its definition bit for bit, whatever it is given."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hadron.engine.build import build_model
from hadron.engine.config import EngineConfig
from hadron.kernels.cpu import quantize as native
from hadron.kernels.reference import quantize as reference
from hadron.preflight.build import make_plan
from hadron.quantization.dtypes import Element
from hadron.quantization.scheme import NO_ACTIVATION, ActivationScheme, Granularity
from tests.conftest import DATA
from tests.kernels.levels import every_level, generator, handle, needs_native
from tests.tiny.oracle import Run, tokens

pytestmark = needs_native

MX = (Element.E2M1, Element.E2M3, Element.E3M2, Element.E4M3)
SCHEMES = [
    NO_ACTIVATION,
    *(ActivationScheme(e, Granularity.TENSOR, scale="float") for e in (Element.E4M3, Element.INT8)),
    *(
        ActivationScheme(e, granularity, columns, "float", dynamic=True)
        for e in (Element.E4M3, Element.INT8)
        for granularity, columns in (
            (Granularity.TENSOR, 0), (Granularity.CHANNEL, 0), (Granularity.GROUP, 128), (Granularity.GROUP, 24),
        )
    ),
    *(ActivationScheme(e, Granularity.GROUP, 32, "e8m0", True, mode) for e in MX for mode in ("even", "floor", "ceil")),
    *(
        ActivationScheme(Element.E2M1, Granularity.GROUP, 16, "e4m3", dynamic, reciprocal=reciprocal)
        for dynamic in (False, True)
        for reciprocal in (False, True)
    ),
]  # fmt: skip


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """All bits, the sign of zero too; of NaN only that it is one."""
    assert found.shape == expected.shape and found.dtype == expected.dtype == torch.float32
    nan = expected.isnan()
    return bool(torch.equal(found.isnan(), nan)) and torch.equal(
        found.masked_fill(nan, 0).view(torch.int32), expected.masked_fill(nan, 0).view(torch.int32)
    )


def inputs(rows: int, columns: int) -> list[torch.Tensor]:
    """Of every size, on the ties of the formats, tiny and huge; zeros, both of them; what is not finite."""
    random = generator(rows * columns)
    sizes = torch.randint(-40, 20, (rows, columns), generator=random)
    wide = torch.ldexp(torch.randn(rows, columns, generator=random), sizes)
    near = torch.randn(rows, columns, generator=random) * 3
    ties = torch.randint(-64, 65, (rows, columns), generator=random) / 8.0
    ties[0, 0] = 6.0  # the scale of its group is a power of two
    zeros = near.clone()
    zeros[rows // 2] = 0.0
    zeros[:, columns // 2 :] = -0.0
    tiny = torch.ldexp(torch.randn(rows, columns, generator=random), torch.tensor(-136))
    given = [wide, near, near.bfloat16(), near.half(), ties, zeros, torch.zeros(rows, columns), tiny, near * 1e37]
    for value in (math.nan, -math.nan, math.inf, -math.inf):
        broken = near.clone()
        broken[rows - 1, columns - 1] = value
        given.append(broken)
    return [*given, near.T.contiguous().T, torch.zeros(0, columns) if columns > 1 else near]


@every_level
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: f"{s.name}-{s.mx_mode}-{s.reciprocal}-{s.columns}")
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 16), (6, 80), (2, 333), (300, 160)])
def test_every_scheme_equals_its_definition_bit_for_bit(
    isa: str, scheme: ActivationScheme, rows: int, columns: int
) -> None:
    static = scheme.element is not None and not scheme.dynamic
    for stored in (0.0371, 27.3, 1.0, 0.0) if static else (None,):
        scale = None if stored is None else torch.tensor(stored)
        quantize = native.bind(scheme, scale, threads=3, level=handle(isa))
        for x in inputs(rows, columns):
            if x.shape[0]:
                expected = reference.quantize(x, scheme, scale)
                assert same_bits(quantize(x), expected), f"{stored} {x.abs().max()}"
            else:
                assert quantize(x).shape == x.shape


def test_a_scale_of_the_file_that_a_dynamic_scheme_ignores() -> None:
    scheme = ActivationScheme(Element.E4M3, Granularity.TENSOR, scale="float", dynamic=True)
    x, stored = torch.randn(4, 32, generator=generator(0)), torch.tensor(7.0)
    assert same_bits(native.bind(scheme, stored)(x), reference.quantize(x, scheme, stored))


@pytest.mark.parametrize("name", ["glm52-quark-mxfp4-attnptpc", "glm53f-modelopt-nvfp4"])
def test_a_declared_run_on_native_kernels_takes_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole models, and the same bits with the definition in its place."""
    plan = make_plan(DATA / name, kernels="cpu", dtype="float32", activation_quantization="declared")
    config = EngineConfig(kernels="cpu", dtype="float32", threads=1)
    ids = tokens(20, vocabulary=plan.config.vocabulary)  # type: ignore[union-attr]
    calls, bind = [], native.bind

    def counted(scheme: ActivationScheme, scale: torch.Tensor | None, *, threads: int, level: object) -> object:
        calls.append(scheme.name)
        return bind(scheme, scale, threads=threads, level=level)

    monkeypatch.setattr(native, "bind", counted)
    found = Run(build_model(plan, config), plan.config).logits(ids)
    assert len(calls) > 10 and set(calls) <= {m.activation.name for m in plan.modules}
    monkeypatch.setattr(native, "bind", lambda scheme, scale, *, threads, level: reference.bind(scheme, scale))
    assert torch.equal(found, Run(build_model(plan, config), plan.config).logits(ids))


@settings(max_examples=60, deadline=None)
@given(
    scheme=st.sampled_from([s for s in SCHEMES if s.dynamic]), rows=st.integers(1, 9), columns=st.integers(1, 300),
    seed=st.integers(0, 1000), threads=st.integers(1, 4),
)  # fmt: skip
def test_any_shape(scheme: ActivationScheme, rows: int, columns: int, seed: int, threads: int) -> None:
    x = torch.ldexp(torch.randn(rows, columns, generator=generator(seed)), torch.tensor(seed % 40 - 20))
    assert same_bits(native.bind(scheme, None, threads=threads)(x), reference.quantize(x, scheme, None))
