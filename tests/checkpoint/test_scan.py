"""`check --data`: exhaustive code tables against numpy, positions, zero scales, files cut meanwhile."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from conftest import checkpoint_names
from hadron.checkpoint import scan as scan_module
from hadron.checkpoint.facts import Facts, read_facts
from hadron.checkpoint.scan import scan
from hadron.errors import CheckpointError
from hadron.preflight.build import make_plan
from hadron.problems import Problem, Severity
from hadron.quantization.scheme import BF16, FP8_TENSOR, MXFP4, NVFP4, PLAIN_STORAGE, QuantizationScheme, Storage
from hostile.build import checkpoint, entry, shard


@dataclass
class Module:
    scheme: QuantizationScheme
    tensors: dict[str, str]
    storage: Storage = PLAIN_STORAGE


@dataclass
class Plan:
    facts: Facts
    modules: list[Module]


def scanned(
    folder: Path,
    scheme: QuantizationScheme,
    roles: dict[str, tuple[str, np.ndarray]],
    tensors: dict[str, str] | None = None,
) -> list[Problem]:
    """Scan one module `m` whose tensor of each role (or that of `tensors`) has that dtype and those bytes."""
    entries, data = {}, b""
    for role, (dtype, values) in roles.items():
        raw = values.tobytes()
        width = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}.get(dtype, 1)
        shape = list(values.shape) if values.itemsize == width else [len(raw) // width]
        entries[f"m.{role}"] = entry(dtype, shape, len(data), len(data) + len(raw))
        data += raw
    facts = read_facts(checkpoint(folder, model__safetensors=shard(json.dumps(entries).encode(), data)))
    assert facts.problems == []
    return scan(Plan(facts, [Module(scheme, tensors or {role: f"m.{role}" for role in roles})]))


BYTES = np.arange(256, dtype=np.uint8)
HALVES = np.arange(65536, dtype=np.uint16)
FLOATS = np.array([0, 0x7F7F_FFFF, 0x7F80_0000, 0xFF80_0000, 0x7FC0_0000, 0xFF80_0001, 1, 0x8000_0000], np.uint32)


@pytest.mark.parametrize(
    ("dtype", "codes", "bad"),
    [
        ("F8_E4M3", BYTES, 2),
        ("F8_E5M2", BYTES, 8),
        ("F8_E8M0", BYTES, 1),
        ("BF16", HALVES, int((~np.isfinite((HALVES.astype(np.uint32) << 16).view(np.float32))).sum())),
        ("F16", HALVES, int((~np.isfinite(HALVES.view(np.float16))).sum())),
        ("F32", FLOATS, int((~np.isfinite(FLOATS.view(np.float32))).sum())),
    ],
)
def test_every_code_of_a_weight(dtype: str, codes: np.ndarray, bad: int, tmp_path: Path) -> None:
    """BR-30: 0x7F and 0xFF of E4M3 and 255 of E8M0 are NaN; every other code is a number."""
    (problem,) = scanned(tmp_path, BF16, {"weight": (dtype, codes)})
    assert problem.code == "HC601"
    assert problem.severity is Severity.ERROR
    assert problem.tensors == ("m.weight",)
    assert f"found {bad} in m.weight" in problem.message
    assert f"{bad} in all" in problem.message


@pytest.mark.parametrize("dtype", ["U8", "I8", "I32", "BOOL"])
def test_integers_have_no_bad_codes(dtype: str, tmp_path: Path) -> None:
    codes = BYTES.view(np.int32) if dtype == "I32" else BYTES
    entries = {"m.weight": entry(dtype, list(codes.shape), 0, 256)}
    facts = read_facts(checkpoint(tmp_path, model__safetensors=shard(json.dumps(entries).encode(), BYTES.tobytes())))
    assert scan(Plan(facts, [Module(MXFP4, {"weight": "m.weight"})])) == []


def test_packed_scale_bytes(tmp_path: Path) -> None:
    """A U8 scale of an MX scheme is E8M0: 255 is NaN, 0 is 2^-127 and fine."""
    (problem,) = scanned(tmp_path, MXFP4, {"weight": ("U8", np.zeros(16 * 256, np.uint8)), "scale": ("U8", BYTES)})
    assert problem.code == "HC602"
    assert problem.tensors == ("m.scale",)
    assert "found 1 in m.scale (first at [255])" in problem.message


def test_nan_in_a_group_scale(tmp_path: Path) -> None:
    scales = np.full((2, 4), 0x38, np.uint8)
    scales[1, 2] = 0xFF
    found = scanned(tmp_path, NVFP4, {"weight": ("U8", np.zeros((2, 32), np.uint8)), "scale": ("F8_E4M3", scales)})
    assert [problem.code for problem in found] == ["HC602"]
    assert "first at [1, 2]" in found[0].message


@pytest.mark.parametrize("role", ["scale", "global_scale", "input_scale"])
@pytest.mark.parametrize(("value", "code"), [(0.0, "HC603"), (-0.0, "HC603"), (np.inf, "HC602"), (np.nan, "HC602")])
def test_float_scales(role: str, value: float, code: str, tmp_path: Path) -> None:
    roles = {"weight": ("F8_E4M3", np.ones((2, 2), np.uint8)), role: ("F32", np.array([1.0, value], np.float32))}
    (problem,) = scanned(tmp_path, FP8_TENSOR, roles)
    assert problem.code == code
    assert problem.tensors == (f"m.{role}",)
    assert problem.severity is (Severity.WARNING if code == "HC603" else Severity.ERROR)


def test_a_scale_that_is_divided_by_may_not_be_zero(tmp_path: Path) -> None:
    """compressed-tensors stores reciprocals of global scales, under a name of their own."""
    roles = {"weight_global_scale": ("F32", np.zeros(1, np.float32))}
    (fatal,) = scanned(tmp_path, NVFP4, roles, {"global_scale": "m.weight_global_scale"})
    assert (fatal.code, fatal.severity) == ("HC602", Severity.ERROR)
    assert "divisors not zero" in fatal.message


def test_zero_in_a_bfloat16_scale(tmp_path: Path) -> None:
    (problem,) = scanned(tmp_path, FP8_TENSOR, {"scale": ("BF16", np.array([0x3F80, 0, 0x8000], np.uint16))})
    assert problem.code == "HC603"
    assert "found 2 in m.scale" in problem.message


def test_zero_weights_are_weights(tmp_path: Path) -> None:
    assert scanned(tmp_path, BF16, {"weight": ("F32", np.zeros(8, np.float32))}) == []


def test_zero_group_scales(tmp_path: Path) -> None:
    """Groups of nothing but zeros (also negative ones) may have a zero scale; other groups lose their codes."""
    scales = np.full((2, 3), 0x38, np.uint8)
    codes = np.full((2, 3, 8), 0x11, np.uint8)
    scales[0, 1], codes[0, 1] = 0x00, 0x80
    scales[1, 0], codes[1, 0] = 0x80, 0x00
    roles = {"weight": ("U8", codes.reshape(2, 24)), "scale": ("F8_E4M3", scales)}
    assert scanned(tmp_path / "zeros", NVFP4, roles) == []
    codes[1, 0, 7] = 0x10
    scales[1, 2] = 0
    roles["weight"] = ("U8", codes.reshape(2, 24))
    (problem,) = scanned(tmp_path / "lost", NVFP4, roles)
    assert problem.code == "HC603"
    assert problem.severity is Severity.NOTE
    assert "found 2 in m.scale" in problem.message


def test_position_counts_across_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_module, "CHUNK_BYTES", 64)
    weight = np.zeros((50, 7), np.float32)
    weight[33, 5] = np.nan
    weight[49, 6] = np.inf
    events: list[tuple[str, int, int]] = []
    entries = {"w": entry("F32", [50, 7], 0, 1400)}
    facts = read_facts(checkpoint(tmp_path, model__safetensors=shard(json.dumps(entries).encode(), weight.tobytes())))
    (problem,) = scan(Plan(facts, []), lambda *event: events.append(event))
    assert "found 2 in w (first at [33, 5])" in problem.message
    assert [total for _, _, total in events] == [1400] * len(events)
    assert events[-1] == ("data", 1400, 1400)
    assert len(events) > 3


def test_one_problem_for_many_tensors(tmp_path: Path) -> None:
    nan = np.array([0x7F], np.uint8)
    entries = {f"t{i}": entry("F8_E4M3", [1], i, i + 1) for i in range(100)}
    content = shard(json.dumps(entries).encode(), nan.tobytes() * 100)
    facts = read_facts(checkpoint(tmp_path, model__safetensors=content))
    (problem,) = scan(Plan(facts, []))
    assert len(problem.tensors) == 100
    assert "100 F8_E4M3 tensor(s)" in problem.message
    assert "100 in all" in problem.message


def test_file_cut_after_the_plan(tmp_path: Path) -> None:
    entries = {"a": entry("F32", [100], 0, 400), "b": entry("F32", [100], 400, 800)}
    facts = read_facts(checkpoint(tmp_path, model__safetensors=shard(json.dumps(entries).encode(), bytes(800))))
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(500)
    (problem,) = scan(Plan(facts, []))
    assert problem.code == "HC105"
    assert "the file ends at 500" in problem.message


def test_file_gone_after_the_plan(tmp_path: Path) -> None:
    facts = read_facts(
        checkpoint(tmp_path, model__safetensors=shard(json.dumps({"a": entry("F32", [1], 0, 4)}).encode(), bytes(4)))
    )
    (tmp_path / "model.safetensors").unlink()
    (problem,) = scan(Plan(facts, []))
    assert problem.code == "HC105"
    assert "No such file" in problem.message


def test_headers_alone_cannot_be_scanned(tmp_path: Path) -> None:
    facts = read_facts(checkpoint(tmp_path, model__safetensors=shard(b"{}")))
    from msgspec.structs import replace

    facts.shards = tuple(replace(one, path=None) for one in facts.shards)
    with pytest.raises(CheckpointError, match="hf download"):
        scan(Plan(facts, []))


@pytest.mark.parametrize("name", checkpoint_names())
def test_real_checkpoints_are_clean(name: str, checkpoints: Path) -> None:
    assert scan(make_plan(str(checkpoints / name))) == []


def test_faults_put_into_a_real_checkpoint(checkpoints: Path, tmp_path: Path) -> None:
    """Roles come from the plan: one NaN in a weight, one in a block scale, one zero scale."""
    source = checkpoints / "glm53f-quark-mxfp4-blockfp8"
    for name in ("config.json", "model.safetensors.index.json"):
        shutil.copyfile(source / name, tmp_path / name)
    content = bytearray((source / "model.safetensors").read_bytes())
    facts = read_facts(source)
    at = "model.language_model.layers.3."
    faults = {
        f"{at}self_attn.o_proj.weight": ("HC601", b"\x7f"),
        f"{at}self_attn.o_proj.weight_scale": ("HC603", bytes(4)),
        f"{at}mlp.experts.0.up_proj.weight_scale": ("HC602", b"\xff"),
    }
    for name, (_, value) in faults.items():
        tensor = facts.tensors[name]
        start = facts.shards[tensor.shard].data_start + tensor.data_offsets[0]
        content[start : start + len(value)] = value
    (tmp_path / "model.safetensors").write_bytes(content)
    found = scan(make_plan(str(tmp_path)))
    assert {problem.tensors: problem.code for problem in found} == {(name,): code for name, (code, _) in faults.items()}
