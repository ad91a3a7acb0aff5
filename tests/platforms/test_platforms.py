"""Machines described from recorded facts; no hardware is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from hadron import platforms
from hadron.errors import UsageError
from hadron.platforms import cpu, cuda, rocm

EPYC = """processor\t: 0
model name\t: AMD EPYC 9654 96-Core Processor
flags\t\t: fpu sse2 fma f16c avx2 avx512f avx512bw avx512vl avx512vbmi avx512_vnni avx512_bf16

processor\t: 1
model name\t: AMD EPYC 9654 96-Core Processor
flags\t\t: fpu
"""
GRAVITON = "processor\t: 0\nFeatures\t: fp asimd sve\nCPU implementer\t: 0x41\n"
MEMINFO = "MemTotal:       16384 kB\nMemFree:        1 kB\n"


def test_a_processor_is_described_by_its_first_core() -> None:
    found = cpu.describe(EPYC, MEMINFO, None, 2, 8)
    assert (found.name, found.description, found.cores) == ("cpu", "AMD EPYC 9654 96-Core Processor", 2)
    assert found.features == (
        "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vbmi", "avx512_vnni", "avx512_bf16",
    )  # fmt: skip
    assert found.memory == 16384 * 1024 and found.providers == ("cpu", "reference") and found.nodes == 8


def test_arm_names_its_features_otherwise() -> None:
    assert cpu.describe(GRAVITON, MEMINFO, None, 1, 1).features == ("neon", "sve")


def test_a_control_group_bounds_the_memory() -> None:
    assert cpu.describe(EPYC, MEMINFO, 1 << 20, 2, 1).memory == 1 << 20
    assert cpu.describe(EPYC, MEMINFO, 1 << 40, 2, 1).memory == 16384 * 1024


def test_this_machine_is_described() -> None:
    found = platforms.detect("cpu")
    assert found.cores >= 1 and found.memory > 1 << 28 and found.description


def test_an_nvidia_gpu_is_described_from_its_tools_answer() -> None:
    found = cuda.describe("NVIDIA H200, 143771, 9.0\nNVIDIA H200, 143771, 9.0\n")
    assert found is not None
    assert (found.name, found.device, found.memory, found.features) == ("cuda", "cuda", 143771 << 20, ("sm_90",))
    assert cuda.describe("") is None and cuda.describe("No devices were found\n") is None


def test_an_amd_gpu_is_described_from_the_kernels_files(tmp_path: Path) -> None:
    for node, target in ((0, 0), (1, 90402)):
        bank = tmp_path / str(node) / "mem_banks" / "0"
        bank.mkdir(parents=True)
        (tmp_path / str(node) / "properties").write_text(f"cpu_cores_count 8\ngfx_target_version {target}\n")
        (tmp_path / str(node) / "name").write_text("ip discovery\n" if target else "\n")
        (bank / "properties").write_text(f"heap_type 1\nsize_in_bytes {192 << 30}\n")
    found = rocm.detect(tmp_path)
    assert found is not None
    assert (found.name, found.device, found.features, found.memory) == ("rocm", "cuda", ("gfx942",), 192 << 30)
    assert rocm.detect(tmp_path / "absent") is None


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(platforms.DETECT, "cuda", (lambda: None,))
    with pytest.raises(UsageError) as caught:
        platforms.detect("cuda")
    assert "this device is not available" in str(caught.value)
    assert caught.value.found == "cuda" and caught.value.accepted == "cpu"
    assert "--device cpu" in caught.value.hint
