"""`benchmarks/peers/llama_cpp.py`: arguments, refusals, what a fake llama-bench prints, the GGUF, ggml's blocks."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hadron.bench import kernels
from hadron.errors import ConfigError, UnsupportedError, UsageError
from hadron.kernels.reference.dequantize import dequantize
from hadron.quantization.scheme import MXFP4
from tests.conftest import ROOT

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of `benchmarks/peers/`, and of `benchmarks/` beside them."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "peers"))
    import full_width
    import ggml_products
    import llama_cpp
    import random_gguf

    return SimpleNamespace(full_width=full_width, ggml=ggml_products, script=llama_cpp, gguf=random_gguf)


@pytest.fixture
def config(peers: Any) -> dict[str, Any]:
    return peers.full_width.build("small-mxfp4", None, None).config  # type: ignore[no-any-return]


# arguments


def test_products_and_experts_are_measured_by_default_and_a_model_where_one_is_given(peers: Any) -> None:
    arguments = peers.script.arguments
    assert arguments([]).only == ("products", "moe")
    assert arguments(["--model", "a", "--gguf", "b"]).only == ("products", "moe", "model")
    assert arguments(["--only", "moe"]).only == ("moe",)
    assert arguments(["--contexts", "0,4096"]).contexts == (0, 4096)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--model", "a"], "--model and --gguf belong together"),
        (["--gguf", "a"], "--model and --gguf belong together"),
        (["--only", "model"], "--only model needs --model CHECKPOINT and --gguf FOLDER"),
        (["--rest", "F16"], "'F16' is none of BF16, Q8_0"),
        (["--only", "moe,attention"], "'attention' is none of products, moe, model"),
    ],
)
def test_arguments_that_cannot_be_used(
    peers: Any, capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    with pytest.raises(SystemExit):
        peers.script.arguments(words)
    assert text in capsys.readouterr().err


# refusals


def test_without_the_program_the_place_that_was_searched_is_named(
    peers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert peers.script.main([]) == UsageError.exit_code
    text = capsys.readouterr().out
    assert "llama.cpp was not measured" in text
    assert "where:    PATH" in text
    assert "no program named llama-bench" in text
    assert "give the folder of its programs with --bin" in text
    with pytest.raises(UsageError, match=f"--bin {tmp_path}"):
        peers.script.program(tmp_path)


def test_programs_without_a_shared_libggml(peers: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"no libggml beside the programs(.|\n)*-DBUILD_SHARED_LIBS=ON"):
        peers.ggml.library(tmp_path / "bin")
    (tmp_path / "lib").mkdir()
    path = tmp_path / "lib" / "libggml.so"
    path.write_text("no library")
    assert peers.ggml.library(tmp_path / "bin") == path
    with pytest.raises(UnsupportedError, match=r"libggml\.so(.|\n)*with its CPU backend(.|\n)*--only model"):
        peers.ggml.Ggml(path, 1)


def test_without_the_gguf_package_none_is_written(peers: Any, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UnsupportedError, match=r"Python package gguf(.|\n)*not installed(.|\n)*pip install gguf"):
        peers.gguf.write(config, Path("unwritten.gguf"))
    assert not Path("unwritten.gguf").exists()


def test_a_gguf_is_of_one_model_type(peers: Any) -> None:
    with pytest.raises(ConfigError, match=r"model_type(.|\n)*'llama'(.|\n)*full_width\.py small-mxfp4"):
        peers.gguf.metadata({"model_type": "llama"})


def test_a_folder_without_a_configuration_is_no_checkpoint(peers: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no config\.json(.|\n)*full_width\.py"):
        peers.script.ggufs(tmp_path, tmp_path / "ggufs", ("BF16",))


# llama-bench


def fake_program(folder: Path, body: str) -> None:
    path = folder / "llama-bench"
    path.write_text(f"#!{sys.executable}\nimport json, sys\nwords = sys.argv[1:]\n{body}\n")
    path.chmod(0o755)


ANSWERS = """
asked = dict(zip(words[::2], words[1::2]))
assert (asked["-t"], asked["-o"]) == ("2", "json"), asked
rest = 2.0 if "q8_0" in asked["-m"] else 1.0
if asked["-p"] != "0":
    tests = [{"n_prompt": 128, "n_gen": 0, "n_depth": 0, "avg_ts": 100.0 * rest, "backends": "CPU"}]
else:
    depths = map(int, asked["-d"].split(","))
    tests = [{"n_prompt": 0, "n_gen": 32, "n_depth": d, "avg_ts": (20.0 - d / 1024) * rest} for d in depths]
print(json.dumps(tests))
"""


@pytest.fixture
def checkpoint(peers: Any, config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments with a configuration, and GGUFs that are there already; Hadron's speed is a given one."""
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(config))
    for rest in ("bf16", "q8_0"):
        (tmp_path / f"small-{rest}.gguf").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    given = {(1, 0): 30.0, (1, 1024): 28.5, (128, 0): 400.0}
    monkeypatch.setattr(peers.script, "hadron_rates", lambda *_: given)
    words = ["--model", str(tmp_path / "small"), "--gguf", str(tmp_path)]
    return [*words, "--only", "model", "--threads", "2", "--rounds", "2"]


def test_what_llama_bench_prints_stands_beside_hadron(
    peers: Any, tmp_path: Path, checkpoint: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    fake_program(tmp_path, ANSWERS)
    assert peers.script.main(checkpoint) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| decode behind 0 | MXFP4 experts, rest BF16 | 30.00 | 20.00 | tokens/s | 1.50 | 1.09 |",
        "| decode behind 0 | MXFP4 experts, rest Q8_0 | 30.00 | 40.00 | tokens/s | 0.75 | 1.09 |",
        "| decode behind 1024 | MXFP4 experts, rest BF16 | 28.50 | 19.00 | tokens/s | 1.50 | 1.09 |",
        "| decode behind 1024 | MXFP4 experts, rest Q8_0 | 28.50 | 38.00 | tokens/s | 0.75 | 1.09 |",
        "| prompt of 128 | MXFP4 experts, rest BF16 | 400.00 | 100.00 | tokens/s | 4.00 | 350 tokens/s |",
        "| prompt of 128 | MXFP4 experts, rest Q8_0 | 400.00 | 200.00 | tokens/s | 2.00 | 350 tokens/s |",
    ]


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        (
            "sys.exit('unknown model architecture')",
            ["did not measure", "exit code 1: unknown model architecture", "with --rest"],
        ),
        ("print('| model | size |')", ["did not measure", "a list of tests in JSON"]),
        ("print('[{\"n_prompt\": 128}]')", ["did not measure", "missing required field `n_gen`"]),
        ("print('[]')", ["left out a test", "none of generating behind 0 tokens", "use a newer llama.cpp"]),
    ],
)
def test_what_llama_bench_may_do_instead(
    peers: Any, tmp_path: Path, checkpoint: list[str], capsys: pytest.CaptureFixture[str], body: str, texts: list[str]
) -> None:
    fake_program(tmp_path, body)
    assert peers.script.main(checkpoint) == UnsupportedError.exit_code
    out = capsys.readouterr().out
    assert all(text in out for text in texts), out


# the GGUF


@pytest.mark.parametrize("rest", ["BF16", "Q8_0"])
def test_the_gguf_has_as_many_parameters_as_the_checkpoint(peers: Any, rest: str) -> None:
    """FP4 codes are two in a byte; scales are no parameters."""
    fake = peers.full_width.build("small-mxfp4", None, None)
    expected = sum(
        int(np.prod(shape)) * (2 if dtype == "U8" else 1)
        for name, (dtype, shape) in fake.tensors.items()
        if not name.endswith("_scale")
    )
    wanted = peers.gguf.tensors(fake.config, rest)
    assert sum(int(np.prod(shape)) for _, shape in wanted.values()) == expected
    assert 1.5e9 < expected < 1.6e9
    assert {name for name, (dtype, _) in wanted.items() if dtype == "MXFP4"} == {
        f"blk.{layer}.ffn_{part}_{kind}.weight"
        for layer in (2, 3, 4) for part in ("gate", "up", "down") for kind in ("exps", "shexp")
    }  # fmt: skip
    assert "blk.2.indexer.proj.weight" in wanted
    assert "blk.3.indexer.proj.weight" not in wanted  # shares the selection of layer 2


def test_metadata_says_what_the_configuration_says(peers: Any, config: Any) -> None:
    pairs = peers.gguf.metadata(config)
    assert pairs["glm-dsa.attention.key_length_mla"] == 192 + 64
    assert pairs["glm-dsa.attention.key_length"] == 512 + 64
    assert pairs["glm-dsa.attention.indexer.types"] == [True, True, True, False, False]
    assert pairs["glm-dsa.leading_dense_block_count"] == 2
    assert pairs["glm-dsa.expert_used_count"] == 8


@pytest.mark.parametrize("dtype", ["F32", "BF16", "Q8_0", "MXFP4"])
def test_values_keep_the_size_of_what_they_multiply(peers: Any, dtype: str) -> None:
    raw = peers.gguf.values("output.weight", dtype, (3, 64, 512), np.random.default_rng(0))
    if dtype == "F32":
        decoded = raw.view(np.float32)
    elif dtype == "BF16":
        decoded = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    elif dtype == "Q8_0":
        each = raw.reshape(3, 64, 16, 34)
        decoded = each[..., 2:].view(np.int8) * each[..., :2].copy().view(np.float16).astype(np.float32)
    else:
        decoded = from_blocks(raw.reshape(3, 64, 16, 17))
    assert decoded.size == 3 * 64 * 512
    assert 0.2 < np.sqrt(np.mean(np.square(decoded))) * 512**0.5 < 5


def test_a_gguf_reads_back(peers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = pytest.importorskip("gguf", reason="needs the gguf package: pip install gguf")
    monkeypatch.setattr(peers.full_width, "SMALL_SIZES", (256, 640, 128))
    config = peers.full_width.build("small-mxfp4", None, 8).config
    peers.gguf.write(config, tmp_path / "a.gguf", "Q8_0")
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    found = {t.name: (t.tensor_type.name, tuple(int(n) for n in reversed(t.shape))) for t in reader.tensors}
    assert found == peers.gguf.tensors(config, "Q8_0")
    assert reader.fields["glm-dsa.vocab_size"].contents() == 640
    assert reader.fields["general.architecture"].contents() == "glm-dsa"


# ggml


def from_blocks(blocks: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, Any]:
    """ggml's definition of MXFP4: a scale 2^(e - 127), then element j in a low and j + 16 in a high nibble."""
    codes = np.concatenate((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), axis=-1)
    return E2M1[codes] * np.exp2(blocks[..., :1].astype(np.float64) - 127)


def test_blocks_hold_the_values_of_a_weight(peers: Any) -> None:
    weight = kernels.random_weight(MXFP4, 6, 96)
    found = from_blocks(peers.ggml.blocks(weight)).reshape(6, 96)
    np.testing.assert_array_equal(found, dequantize(weight).numpy())


def test_products_of_an_installed_ggml_agree(peers: Any) -> None:
    """Its activations are int8: about a hundredth off."""
    found = shutil.which("llama-bench")
    if found is None:
        pytest.skip("needs llama.cpp's programs, built with shared libraries, on PATH")
    ggml = peers.ggml.Ggml(peers.ggml.library(Path(found).resolve().parent), 1)
    gate, down = kernels.random_weight(MXFP4, 64, 128), kernels.random_weight(MXFP4, 128, 64, seed=1)
    values = [dequantize(w) for w in (gate, down)]
    x, choice = kernels.activations(5, 128), kernels.choose(5, 8, 2, 0)
    weights = torch.rand(5, 2)
    kinds = [ggml.plain] + [kind for kind, _ in filter(None, [ggml.repacking()])]
    for kind in kinds:
        linear = peers.ggml.Linear(ggml, kind, gate, 2)
        experts = peers.ggml.Experts(ggml, kind, gate, down, 8)
        with linear.context, experts.context, peers.ggml.Context(ggml, ggml.plain) as rest:
            call, result = linear.bind(rest, x)
            call(0)
            assert peers.ggml.difference(result(), x @ values[0].T) < 0.02
            with peers.ggml.Context(ggml, ggml.plain) as other:
                call, result = experts.bind(other, x, [choice], weights)
                call(0)
                up = x @ values[0].T  # every expert has the same weights
                one = (torch.nn.functional.silu(up) * up) @ values[1].T
                assert peers.ggml.difference(result(), one * weights.sum(1, keepdim=True)) < 0.03
