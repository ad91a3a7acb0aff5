"""Every malformed file of `tests/hostile` ends in its own problem or error, with a text that says what is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hadron.checkpoint.facts import read_facts
from hadron.errors import CheckpointError, ConfigError
from hadron.problems import Severity
from hostile.build import checkpoint, entry, good_shard, header, index, shard
from hostile.configs import BAD_CONFIGS, BadConfig
from hostile.headers import BAD_FILES, BadFile


@pytest.mark.parametrize("bad", BAD_FILES.values(), ids=BAD_FILES.keys())
def test_bad_header_is_a_problem(bad: BadFile, tmp_path: Path) -> None:
    facts = read_facts(checkpoint(tmp_path, model__safetensors=bad.content))
    assert bad.code in {problem.code for problem in facts.problems}
    problem = next(problem for problem in facts.problems if problem.code == bad.code)
    assert problem.severity is Severity.ERROR
    for words in ("model.safetensors", "found", "accepted", *bad.says):
        assert words in problem.message + problem.hint
    assert problem.hint
    assert set(bad.tensors) <= set(problem.tensors)
    assert set(bad.kept) <= set(facts.tensors)


@pytest.mark.parametrize("bad", BAD_CONFIGS.values(), ids=BAD_CONFIGS.keys())
def test_bad_config_is_an_error(bad: BadConfig, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, model__safetensors=good_shard("a"))
    (folder / "config.json").write_bytes(bad.content)
    with pytest.raises(ConfigError) as caught:
        read_facts(folder)
    for words in ("config.json cannot be read", str(tmp_path), "found:", "accepted:", "try:", *bad.says):
        assert words in str(caught.value)


@pytest.mark.parametrize("bad", BAD_CONFIGS.values(), ids=BAD_CONFIGS.keys())
@pytest.mark.parametrize("name", ["generation_config.json", "hf_quant_config.json"])
def test_bad_side_file_is_reported(name: str, bad: BadConfig, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, model__safetensors=good_shard("a"))
    (folder / name).write_bytes(bad.content)
    (problem,) = read_facts(folder).problems
    assert problem.code == "HC208"
    assert name in problem.message
    for words in bad.says:
        assert words in problem.message
    # without a quantization_config elsewhere, nothing but this file describes the quantization
    assert problem.severity is (Severity.ERROR if name.startswith("hf") else Severity.WARNING)


def test_quantization_side_file_that_is_not_needed(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, model__safetensors=good_shard("a"), hf_quant_config__json=b"{")
    (folder / "config.json").write_bytes(b'{"quantization_config": {}}')
    assert [p.severity for p in read_facts(folder).problems] == [Severity.WARNING]


BAD_INDEXES = {
    "empty": (b"", "an empty file"),
    "not json": (b"{", "line 1, column 2"),
    "array": (b"[]", "an array at the top"),
    "no weight_map": (b'{"metadata": {}}', "no weight_map"),
    "weight_map of a list": (b'{"weight_map": []}', "a weight_map that is no object"),
    "empty weight_map": (b'{"weight_map": {}}', "names no tensor"),
    "shard that is a number": (b'{"weight_map": {"a": 1}}', "a shard of a that is no string"),
    "tensor twice": (b'{"weight_map": {"a": "m.safetensors", "a": "m.safetensors"}}', "the key 'a' twice"),
    "weight_map twice": (b'{"weight_map": {"a": "m.safetensors"}, "weight_map": {"a": "n.safetensors"}}', "twice"),
    "metadata with a key twice": (b'{"metadata": {"t": 1, "t": 2}, "weight_map": {"a": "m.safetensors"}}', "'t' twice"),
    "shard outside the folder": (b'{"weight_map": {"a": "../../m.safetensors"}}', "../../m.safetensors"),
    "absolute shard": (b'{"weight_map": {"a": "/etc/m.safetensors"}}', "/etc/m.safetensors"),
    "shard of another format": (b'{"weight_map": {"a": "pytorch_model.bin"}}', "pytorch_model.bin"),
    "shard that does not print": (b'{"weight_map": {"a": "\\u001b.safetensors"}}', "'\\x1b.safetensors'"),
    "tensor that does not print": (b'{"weight_map": {"\\u0000": "m.safetensors"}}', "'\\x00'"),
    "byte order mark": (b"\xef\xbb\xbf{}", "byte order mark"),
    "nesting bomb": (b'{"weight_map":' * 100_000, "nesting too deep"),
}


@pytest.mark.parametrize(("content", "says"), BAD_INDEXES.values(), ids=BAD_INDEXES.keys())
def test_bad_index_is_a_problem(content: bytes, says: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, model__safetensors=good_shard("a"))
    (folder / "model.safetensors.index.json").write_bytes(content)
    facts = read_facts(folder)
    assert [problem.code for problem in facts.problems] == ["HC109"]
    assert says in facts.problems[0].message
    assert list(facts.tensors) == ["a"], "the shards are read all the same"


def test_two_indexes(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, model__safetensors=good_shard("a"))
    for name in ("x", "y"):
        (folder / f"{name}.safetensors.index.json").write_bytes(index(a="model.safetensors"))
    (problem,) = read_facts(folder).problems
    assert problem.code == "HC109"
    assert "x.safetensors.index.json, y.safetensors.index.json" in problem.message


def test_missing_config(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(good_shard("a"))
    with pytest.raises(ConfigError, match="no such file"):
        read_facts(tmp_path)


def test_config_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(good_shard("a"))
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"(?i)not a regular file|is a directory"):
        read_facts(tmp_path)


def test_pipes_do_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes(b"{}")
    (problem,) = read_facts(tmp_path).problems
    assert problem.code == "HC101"
    assert "not a regular file" in problem.message
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="not a regular file"):
        read_facts(tmp_path)


def test_huge_config_is_not_read(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, model__safetensors=good_shard("a"))
    with (folder / "config.json").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match=f"{1 << 40} bytes, more than"):
        read_facts(folder)


def test_dangling_link(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    (folder / "model.safetensors").symlink_to(tmp_path / "gone")
    (problem,) = read_facts(folder).problems
    assert problem.code == "HC101"
    assert "No such file" in problem.message


def test_link_to_itself(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    (folder / "model.safetensors").symlink_to("model.safetensors")
    (problem,) = read_facts(folder).problems
    assert "symbolic links" in problem.message


@pytest.mark.parametrize(
    ("names", "found", "hint"),
    [
        ([], "an empty folder", "download"),
        (["pytorch_model.bin", "config.json"], "1 x .bin", ".bin are not read; convert"),
        (["x.gguf"], "1 x .gguf", ".gguf are not read"),
        (["consolidated.00.pth", "consolidated.01.pth"], "2 x .pth", ".pth are not read"),
        (["config.json", "tokenizer.json"], "2 x .json", "not finished, or this is the wrong folder"),
    ],
)
def test_folder_without_safetensors(names: list[str], found: str, hint: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(CheckpointError) as caught:
        read_facts(tmp_path)
    assert "holds no safetensors files" in str(caught.value)
    assert found in caught.value.found
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("name", "hint"),
    [("model.safetensors", "give the folder: "), ("m.gguf", "GGUF is not read"), ("m.zip", "the folder that holds")],
)
def test_file_in_place_of_a_folder(name: str, hint: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match="is a file, not a checkpoint's folder") as caught:
        read_facts(tmp_path / name)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    "model",
    ["./nothing", "/nothing/here", "a/b/c", "nothing", "", "../x", "a\0b/c", "x" * 5000, "org/na me", "org/..", "~/m"],
)
def test_no_such_folder_is_not_sent_to_the_hub(model: str) -> None:
    with pytest.raises(CheckpointError, match="there is no folder") as caught:
        read_facts(model)
    assert "ORG/NAME" in caught.value.accepted


def test_many_faults_make_few_problems(tmp_path: Path) -> None:
    entries = {f"t{i}": entry("F32", [1], 0, 4) for i in range(3000)}
    facts = read_facts(checkpoint(tmp_path, model__safetensors=shard(header(**entries), b"\0" * 4)))
    (problem,) = facts.problems
    assert problem.code == "HC104"
    assert len(problem.tensors) == 3000
    assert "2999 such pairs" in problem.message
    assert len(problem.message) < 400
