"""The recipe's quantized variants: right by the format's definition, laid out as releases are, clean to `check`.

The sources are random, with sizes that are no multiples of block FP8's 128, like the trained models.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hadron.checkpoint.facts import read_facts
from hadron.preflight.build import make_plan
from hadron.preflight.plan import LoadPlan
from hadron.problems import Severity
from tests.conftest import ROOT, checkpoints_root
from tests.tiny.draft import Draft

QUANTIZE = ROOT / "recipes" / "tiny" / "quantize"
BF16 = {"glm5_next": "glm53f-bf16", "glm_moe_dsa": "glm52-bf16"}
WIDTHS = {"hidden_size": 192, "intermediate_size": 160, "moe_intermediate_size": 64}
COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def make_source(folder: Path, family: str, like: Path) -> Path:
    """A BF16 checkpoint with random weights of other widths than the checkpoint `like`, and no vision tower."""
    draft = Draft.of(like)
    draft.drop("visual")
    draft.config.pop("vision_config", None)
    draft.text.update(WIDTHS)
    if family == "glm5_next":
        draft.config["architectures"] = ["Glm5NextForCausalLM"]
    draft.write(folder)
    module: Any = importlib.import_module(f"hadron.models.{family}.config")
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32}
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    facts = read_facts(folder)
    for spec in module.inventory(module.read(draft.config, []), facts):
        for name, shape in {
            (spec.name if spec.bare else f"{spec.name}.weight"): spec.shape,
            f"{spec.name}.bias": spec.shape[:1],
        }.items():
            if name in draft.tensors:
                value = torch.randn(shape, generator=generator) * 0.05
                tensors[name] = value.to(dtypes[draft.tensors[name][0]])
    assert tensors.keys() == draft.tensors.keys()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name in COMPANIONS:
        (folder / name).write_text(f"{{}} {name}" if name.endswith("jinja") else "{}")
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = checkpoints_root()
    if root is None:
        pytest.skip("the full set of checkpoints is absent: set HADRON_TEST_CHECKPOINTS to its folder")
    folder = tmp_path_factory.mktemp("bf16")
    return {family: make_source(folder / family, family, root / name) for family, name in BF16.items()}


def run(script: str, source: Path, out: Path, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, QUANTIZE / script, source, out], capture_output=True, text=True, timeout=250, check=False
    )


def clean_plan(folder: Path) -> LoadPlan:
    """The plan of a checkpoint that `check` has nothing against; notes are no objection."""
    plan = make_plan(folder)
    assert [p for p in plan.problems if p.severity is not Severity.NOTE] == []
    assert all((folder / name).exists() for name in COMPANIONS)
    return plan


def schemes(plan: LoadPlan, section: str) -> dict[str, set[str]]:
    """Kind of module -> names of its schemes."""
    found: dict[str, set[str]] = {}
    for module in plan.modules:
        if module.spec.section == section:
            found.setdefault(module.spec.kind.value, set()).add(module.scheme.name)
    return found


@pytest.fixture(scope="module", params=BF16)
def block_fp8(request: pytest.FixtureRequest, sources: dict[str, Path], tmp_path_factory: Any) -> tuple[Path, Path]:
    out = tmp_path_factory.mktemp("fp8") / "out"
    done = run("fp8_block.py", sources[request.param], out)
    assert done.returncode == 0, done.stderr
    return sources[request.param], out


def test_block_fp8_is_within_half_a_step(block_fp8: tuple[Path, Path]) -> None:
    source, out = (load_file(folder / "model.safetensors") for folder in block_fp8)
    scaled = [name for name in source if f"{name}_scale_inv" in out]
    assert len(scaled) > 100
    assert out.keys() == source.keys() | {f"{name}_scale_inv" for name in scaled}
    partial = 0
    for name in scaled:
        weight, codes, scales = source[name].float(), out[name], out[f"{name}_scale_inv"]
        assert codes.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
        assert scales.shape == (-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
        partial += scales.numel() > 1
        for r in range(scales.shape[0]):
            for c in range(scales.shape[1]):
                here = slice(r * 128, r * 128 + 128), slice(c * 128, c * 128 + 128)
                torch.testing.assert_close(scales[r, c], weight[here].abs().max() / 448)
                # three bits behind the point, from 2**-6 on; below, steps of 2**-9
                ratio = weight[here] / scales[r, c]
                half = torch.exp2(ratio.abs().clamp(min=2**-6).log2().floor() - 4)
                assert bool(((codes[here].float() - ratio).abs() <= half).all()), name
    assert partial > 50


def test_block_fp8_leaves_the_rest_alone(block_fp8: tuple[Path, Path]) -> None:
    source, out = (load_file(folder / "model.safetensors") for folder in block_fp8)
    kept = [name for name in source if f"{name}_scale_inv" not in out]
    assert all(torch.equal(source[name], out[name]) for name in kept)
    listed = json.loads((block_fp8[1] / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert {name for name in kept if name.endswith(".weight") and source[name].dim() > 1} == {
        f"{name}.weight" for name in listed
    }


def test_block_fp8_is_clean(block_fp8: tuple[Path, Path]) -> None:
    plan = clean_plan(block_fp8[1])
    block, flash = {"fp8_e4m3_block_128x128"}, plan.family == "glm5_next"
    for section in ("text", "mtp"):
        found = schemes(plan, section)
        assert found["expert"] == found["shared_expert"] == block
        assert found["router"] == {"bf16"}
        assert found["attention"] == (block | {"bf16"} if flash else block)
        assert found["indexer"] == ({"bf16"} if flash else block | {"bf16"})
    assert schemes(plan, "text")["mlp"] == block
    assert schemes(plan, "mtp")["mtp_projection"] == {"bf16"}


def test_a_block_of_zeros_stays_zero(sources: dict[str, Path], tmp_path: Path) -> None:
    name, source = "model.layers.0.mlp.up_proj.weight", sources["glm_moe_dsa"]
    tensors = load_file(source / "model.safetensors")
    tensors[name][:, :128] = 0
    (tmp_path / "source").mkdir()
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    (tmp_path / "source" / "config.json").write_bytes((source / "config.json").read_bytes())
    assert run("fp8_block.py", tmp_path / "source", tmp_path / "out").returncode == 0
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert bool((out[name][:, :128].float() == 0).all())
    assert out[f"{name}_scale_inv"][0, 0] == 1


def test_an_existing_folder_is_not_written_into(sources: dict[str, Path], tmp_path: Path) -> None:
    done = run("fp8_block.py", sources["glm5_next"], tmp_path)
    assert done.returncode != 0 and "exists already" in done.stderr
    assert list(tmp_path.iterdir()) == []


#: variant -> its script, the family it is of, the tool it takes, the checkpoint of the same make, if any
TOOLS = {
    "quark-mxfp4-blockfp8": ("quark_mxfp4_blockfp8", "glm5_next", "quark", "glm53f-quark-mxfp4-blockfp8"),
    "quark-mxfp4-ptpc": ("quark_mxfp4_ptpc", "glm_moe_dsa", "quark", "glm52-quark-mxfp4-attnptpc"),
    "flash-nvfp4": ("nvfp4", "glm5_next", "llmcompressor", "glm53f-ct-nvfp4a16"),
    "glm52-nvfp4": ("nvfp4", "glm_moe_dsa", "llmcompressor", None),
}
EXPECTED = {
    "quark-mxfp4-blockfp8": {
        "text": {"expert": "mxfp4", "shared_expert": "mxfp4", "mlp": "fp8_e4m3_block_128x128", "kda": "bf16"},
        "mtp": {"expert": "fp8_e4m3_block_128x128", "shared_expert": "fp8_e4m3_block_128x128"},
    },
    "quark-mxfp4-ptpc": {
        "text": {"expert": "mxfp4", "shared_expert": "mxfp4", "attention": "fp8_e4m3_channel", "mlp": "bf16"},
        "mtp": {"expert": "mxfp4", "attention": "fp8_e4m3_channel", "mtp_projection": "bf16"},
    },
    "flash-nvfp4": {
        "text": {"expert": "nvfp4", "shared_expert": "bf16", "mlp": "bf16", "attention": "bf16"},
        "mtp": {"expert": "bf16", "shared_expert": "bf16", "attention": "bf16", "mtp_projection": "bf16"},
    },
}
EXPECTED["glm52-nvfp4"] = EXPECTED["flash-nvfp4"]


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("model*.safetensors") for name, tensor in load_file(file).items()}


def pattern(name: str, layers: int) -> str:
    """A tensor name without the numbers of layers and experts; the MTP layer stays apart."""
    name = re.sub(r"layers\.(\d+)\.", lambda m: f"layers.{'mtp' if int(m[1]) == layers else '*'}.", name)
    return re.sub(r"experts\.\d+\.", "experts.*.", name)


def layout(folder: Path) -> set[tuple[str, torch.dtype]]:
    """Patterns of names, each with its dtypes; no vision tower."""
    config = json.loads((folder / "config.json").read_text())
    layers = config.get("text_config", config)["num_hidden_layers"]
    return {(pattern(name, layers), t.dtype) for name, t in read_all(folder).items() if ".visual." not in name}


@pytest.mark.parametrize("variant", TOOLS)
def test_variants_of_tools(variant: str, sources: dict[str, Path], tmp_path: Path) -> None:
    script, family, tool, like = TOOLS[variant]
    variable = f"HADRON_{tool.upper()}_PYTHON"
    if variable not in os.environ:
        pytest.skip(
            f"{tool} is absent: set {variable} to the Python of an environment with "
            f"recipes/tiny/quantize/requirements-{tool}.txt (recipes/tiny/quantize/environment.sh makes one)"
        )
    source, out = sources[family], tmp_path / "out"
    done = run(f"{script}.py", source, out, os.environ[variable])
    assert done.returncode == 0, done.stderr

    plan = clean_plan(out)
    assert plan.mtp.usable
    for section, expected in EXPECTED[variant].items():
        found = schemes(plan, section)
        assert {kind: found[kind] for kind in expected} == {kind: {scheme} for kind, scheme in expected.items()}
    root = checkpoints_root()
    assert root is not None
    if like is not None:
        assert layout(out) == layout(root / like)
    if tool == "llmcompressor":
        assert_nothing_excludes_mtp(source, out)


def assert_nothing_excludes_mtp(source: Path, out: Path) -> None:
    made, given = read_all(out), read_all(source)
    (eh_proj,) = [tensor for tensor in given if tensor.endswith(".eh_proj.weight")]
    mtp = eh_proj.removesuffix("eh_proj.weight")
    assert all(torch.equal(made[tensor], given[tensor]) for tensor in given if tensor.startswith(mtp))
    ignore = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignore and not any(entry.startswith((mtp, "re:")) for entry in ignore)
