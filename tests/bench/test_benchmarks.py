"""The scripts of `benchmarks/`: bars that judge rightly, and checkpoints of full width that load and run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hadron.bench.model import Sequence
from hadron.cache.spec import cache_spec
from hadron.engine.build import build_model
from hadron.engine.config import EngineConfig
from hadron.preflight.build import make_plan
from hadron.problems import Severity
from tests.conftest import ROOT


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of `benchmarks/`, which are no package."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import bars
    import full_width
    import models

    return SimpleNamespace(bars=bars, full_width=full_width, models=models)


def row(**changes: object) -> SimpleNamespace:
    values = {
        "op": "linear", "scheme": "mxfp4", "m": 1, "n": 12288, "k": 4096, "shape": "", "threads": 2, "ms": 1.0,
        "gbps": 20.0, "gflops": 100.0, "of_bandwidth": 0.5, "of_peak": 0.3, "warm_gbps": None,
    }  # fmt: skip
    return SimpleNamespace(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "met"),
    [
        ({"of_bandwidth": 0.85}, True),
        ({"of_bandwidth": 0.84}, False),
        ({"scheme": "bf16", "of_bandwidth": 0.94}, False),
        ({"scheme": "bf16", "of_bandwidth": 0.95}, True),
        # as fast as from a cache, which is fast enough: 20 GB/s a core
        ({"gbps": 39.0, "warm_gbps": 40.0}, True),
        ({"gbps": 37.0, "warm_gbps": 40.0}, False),
        ({"gbps": 39.0, "warm_gbps": 39.5}, False),
        ({"m": 4, "gflops": 550.0}, True),
        ({"m": 4, "gflops": 249.0}, False),
        ({"m": 4, "gflops": 250.0}, True),
        ({"m": 8, "scheme": "fp8_e4m3_channel", "gflops": 520.0}, True),
        ({"m": 32, "gflops": 590.0}, False),
        ({"m": 512, "gflops": 740.0}, False),
        ({"m": 512, "scheme": "nvfp4", "gflops": 620.0}, True),
        ({"op": "moe", "shape": "288 experts, top 8", "m": 512, "gflops": 410.0}, True),
        ({"op": "moe", "shape": "64 experts, top 8", "m": 512, "gflops": 410.0}, False),
        ({"op": "moe", "shape": "64 experts, top 8", "of_bandwidth": 0.8}, True),
    ],
)
def test_a_row_meets_its_bar_or_misses_it(scripts: Any, changes: dict[str, object], met: bool) -> None:
    (verdict,) = scripts.bars.verdicts([row(**changes)], 1000.0)
    assert verdict.met is met
    line, count = scripts.bars.table([verdict])
    assert ("MISSED" in line) is not met
    assert count == f"{int(met)} of 1 met"


def test_rows_without_a_bar_are_left_out(scripts: Any) -> None:
    assert list(scripts.bars.verdicts([row(m=3), row(scheme="int4_channel"), row(op="mlp")], 1000.0)) == []


@pytest.mark.parametrize(
    ("fraction", "calls", "far", "met"),
    [
        (0.75, 12.0, 134.0, [True, True, True]),
        (0.74, 12.1, 135.0, [False, False, False]),
    ],
)
def test_a_model_meets_its_bars_or_misses_them(
    scripts: Any, fraction: float, calls: float, far: float, met: list[bool]
) -> None:
    """67.1 MB more behind 256 k than behind 4 k are 4.19 ms at 16 GB/s."""
    profile, more = SimpleNamespace(native_calls_a_layer=calls), 256 << 18
    steps = [
        SimpleNamespace(
            context=context, context_bytes=size, ms=ms, fraction=fraction, limit_value=16.0, profile=profile
        )
        for context, size, ms in ((1024, 0, 99.0), (4096, 500, 100.0), (1 << 18, 500 + more, far))
    ]
    found = scripts.models.judge(SimpleNamespace(steps=steps))
    assert [good for *_, good in found] == met
    assert found[2][1] == pytest.approx((far - more / 16e6) / 100)


def test_layers_fill_the_budget(scripts: Any) -> None:
    full_width = scripts.full_width
    layers = full_width.fitting("amd-flash-mxfp4", 64, 9 * 10**9)
    sizes = [full_width.size(full_width.build("amd-flash-mxfp4", n, 64)) for n in (layers, layers + 1)]
    assert sizes[0] <= 9 * 10**9 < sizes[1]


@pytest.mark.parametrize(
    "kind", ["amd-flash-mxfp4", "amd-glm52-mxfp4", "nvidia-glm52-nvfp4", "zai-flash-fp8", "small-mxfp4"]
)
def test_values_are_sound_in_every_kind_of_tensor(scripts: Any, kind: str) -> None:
    """Products keep the size of what they multiply: the root mean square of a row of weights is about one
    over the root of its length."""
    full_width = scripts.full_width
    fake = full_width.build(kind, 4, 2)
    values = full_width.Values()
    seen = set()
    for name, entry in fake.tensors.items():
        dtype, shape = entry
        leaf = name.rpartition(".")[2]
        if not full_width.runs(name, fake) or leaf != "weight" or len(shape) != 2 or "norm" in name:
            continue
        block = torch.from_numpy(values.block(name, entry)[: 1 << 16].copy())
        if dtype == "BF16":
            decoded, scheme = block.view(torch.bfloat16).double(), "bf16"
        elif dtype == "F8_E4M3":
            scale_name = next(n for n in fake.tensors if n.startswith(name + "_scale"))
            scale = values.block(scale_name, fake.tensors[scale_name]).view(np.float32)[0]
            decoded, scheme = block.view(torch.float8_e4m3fn).float().double() * float(scale), "fp8"
        else:
            decoded, scheme = _fp4(values, fake, name, block), "fp4"
        seen.add(scheme)
        width = shape[1] * (2 if dtype == "U8" else 1)
        size = float(decoded.square().mean().sqrt()) * width**0.5
        assert 0.2 < size < 5, (name, entry, size)
    assert seen >= ({"fp8"} if kind.startswith("zai") else {"fp4"})


def _fp4(values: Any, fake: Any, name: str, block: torch.Tensor) -> torch.Tensor:
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([table, -table]).double()
    codes = table[torch.stack([block & 15, block >> 4]).long()]
    entry = fake.tensors[name + "_scale"]
    scale = torch.from_numpy(values.block(name + "_scale", entry)[: 1 << 10].copy())
    if entry[0] == "U8":
        return codes * float((scale.double() - 127).exp2().mean())
    second = float(values.block(name + "_scale_2", ("F32", ())).view(np.float32)[0])
    return codes * float(scale.view(torch.float8_e4m3fn).double().mean()) * second


def test_a_checkpoint_has_no_problem_and_gives_finite_logits(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GLM-5.2's shapes are too wide for a test; the small kind is narrowed, its names and configuration kept."""
    full_width = scripts.full_width
    monkeypatch.setattr(full_width, "SMALL_SIZES", (256, 640, 128))
    full_width.write("small-mxfp4", tmp_path, experts=8)
    plan = make_plan(str(tmp_path))
    assert [p for p in plan.problems if p.severity is not Severity.NOTE] == []
    assert {m.scheme.name for m in plan.modules if ".experts." in m.name} == {"mxfp4"}
    model = build_model(plan, EngineConfig(kernels="reference", dtype="float32", threads=1))
    logits = Sequence(model, cache_spec(plan.config, dtype="float32"), 64).step([1, 2, 3])  # type: ignore[arg-type]
    assert bool(torch.isfinite(logits).all())
    assert float(logits.std()) > 1e-3
