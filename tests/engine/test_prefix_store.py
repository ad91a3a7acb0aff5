"""Prefixes on disk: found by a later process with the same bits, by no other model, and never trusted blindly."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import hadron
from hadron import LLM, SamplingParams
from hadron.cache.blocks import extend_hashes
from hadron.cache.pages import Pages
from hadron.cache.spec import CacheSpec, LayerCache
from hadron.cache.states import States
from hadron.engine.prefix_store import DiskPrefixes
from tests.conftest import DATA

FAMILIES = ("glm52-quark-mxfp4-attnptpc", "glm53f-quark-mxfp4-blockfp8")
TEXT = random.Random(5).choices(range(256), k=700)


def load(name: str | Path, folder: Path | None, **options: Any) -> LLM:
    return LLM(DATA / name, **({"threads": 1, "prefix_cache_dir": folder} | options))


def ask(llm: LLM, ids: list[int], most: int = 8) -> Any:
    params = SamplingParams(temperature=1.2, seed=3, max_tokens=most, ignore_eos=True, logprobs=2)
    (output,) = llm.generate({"prompt_token_ids": ids}, params)
    return output


def files(folder: Path, suffix: str) -> list[Path]:
    return sorted(folder.glob(f"*/*.{suffix}"))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_later_process_finds_them_with_the_same_bits(name: str, tmp_path: Path) -> None:
    cold = ask(load(name, None), TEXT)
    assert ask(load(name, tmp_path), TEXT).outputs == cold.outputs
    later = ask(load(name, tmp_path), TEXT)
    assert later.num_cached_tokens == 640 and later.outputs == cold.outputs
    turn = [*TEXT, *cold.outputs[0].token_ids, 1, 2, 3]
    assert ask(load(name, tmp_path), turn).num_cached_tokens == 704 == (700 + 8 - 1) // 64 * 64
    part = [*TEXT[:300], 7, 7, 7]
    other = ask(load(name, tmp_path), part)
    assert other.num_cached_tokens == 256 and other.outputs == ask(load(name, None), part).outputs
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o077 == 0, "what prompts said is for the owner alone"


@pytest.mark.parametrize("name", FAMILIES)
def test_with_less_room_than_the_prefix_needs_nothing_breaks(name: str, tmp_path: Path) -> None:
    ask(load(name, tmp_path), TEXT)
    tight = load(name, tmp_path, num_pages=12)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts: list[Any] = [{"prompt_token_ids": ids} for ids in (TEXT, TEXT[:500], [*TEXT[:200], 9], TEXT[100:])]
    expected = load(name, None).generate(prompts, params)
    for ours, theirs in zip(tight.generate(prompts, params), expected, strict=True):
        assert ours.outputs == theirs.outputs


@pytest.mark.parametrize("kind", ["page", "state"])
@pytest.mark.parametrize("how", ["flipped", "short", "empty", "other", "gone"])
def test_what_is_damaged_is_removed_and_computed_again(kind: str, how: str, tmp_path: Path) -> None:
    name = FAMILIES[1]
    cold = ask(load(name, tmp_path), TEXT)
    there = files(tmp_path, kind)
    assert len(there) == {"page": 11, "state": 4}[kind], "states after 256, 512, 640 and, at the end, 704 tokens"
    llm = load(name, tmp_path)
    hashes = extend_hashes([], TEXT, 64)
    path = next(path for path in there if path.stem == hashes[6 if kind == "page" else 9].hex())
    data = bytearray(path.read_bytes())
    if how == "flipped":
        data[-5] ^= 4
    if how == "other":
        data[40] ^= 1  # the number of tokens
        data[8:40] = hashlib.blake2b(data[40:], digest_size=32).digest()
    path.write_bytes(data[: {"short": 60, "empty": 0}.get(how, len(data))])
    if how == "gone":
        path.unlink()
    again = ask(llm, TEXT)
    assert (again.outputs, again.num_cached_tokens) == (cold.outputs, 256 if kind == "page" else 512)
    assert files(tmp_path, kind) == there, "what was computed is saved again"
    assert ask(load(name, tmp_path), TEXT).num_cached_tokens == 640


@pytest.mark.parametrize("name", FAMILIES)
def test_latents_in_fp8_are_found_by_their_own_kind_with_the_same_bits(name: str, tmp_path: Path) -> None:
    cold = ask(load(name, None, kv_cache_dtype="fp8_e4m3"), TEXT)
    assert ask(load(name, tmp_path, kv_cache_dtype="fp8_e4m3"), TEXT).outputs == cold.outputs
    size = files(tmp_path, "page")[0].stat().st_size
    later = ask(load(name, tmp_path, kv_cache_dtype="fp8_e4m3"), TEXT)
    assert later.num_cached_tokens == 640 and later.outputs == cold.outputs
    for other in ("fp32", "auto"):
        assert ask(load(name, tmp_path, kv_cache_dtype=other), TEXT).num_cached_tokens == 0, other
    assert max(path.stat().st_size for path in files(tmp_path, "page")) > size
    assert ask(load(name, tmp_path, kv_cache_dtype="bf16"), TEXT).num_cached_tokens == 640, "which auto is here"


def test_another_model_or_option_finds_nothing(tmp_path: Path) -> None:
    name = FAMILIES[1]
    prefixes = tmp_path / "prefixes"
    ask(load(name, prefixes), TEXT)
    for options in ({"dtype": "float32"}, {"mla_prefill": "dense_mha"}, {"activation_quantization": "declared"}):
        assert ask(load(name, prefixes, **options), TEXT[:400]).num_cached_tokens == 0, options
    tuned = Path(shutil.copytree(DATA / name, tmp_path / "tuned"))
    tensors = load_file(tuned / "model.safetensors")
    with safe_open(tuned / "model.safetensors", "pt") as opened:
        metadata = opened.metadata()
    for tensor in tensors.values():
        if tensor.dtype == torch.bfloat16:
            tensor *= 1.5
    save_file(tensors, tuned / "model.safetensors", metadata=metadata)
    assert ask(load(tuned, prefixes), TEXT).num_cached_tokens == 0, "the same names and shapes, other weights"
    assert ask(load(Path(shutil.copytree(DATA / name, tmp_path / "copy")), prefixes), TEXT).num_cached_tokens == 640
    assert ask(load(name, prefixes, max_num_batched_tokens=33, max_num_seqs=2), TEXT).num_cached_tokens == 640


def test_the_folder_is_bounded_and_the_oldest_goes(tmp_path: Path) -> None:
    name = FAMILIES[0]
    ask(load(name, tmp_path), TEXT[:300])
    size = files(tmp_path, "page")[0].stat().st_size
    llm = load(name, tmp_path, prefix_cache_bytes=6 * size)
    ask(llm, TEXT[300:600])
    assert len(files(tmp_path, "page")) == 6
    assert ask(load(name, tmp_path), [*TEXT[300:600], 1]).num_cached_tokens == 256
    load(name, tmp_path, prefix_cache_bytes=2 * size)
    assert len(files(tmp_path, "page")) == 2


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(hadron.UsageError, match="folder for prefixes cannot be used") as caught:
        load(FAMILIES[0], tmp_path / "file")
    assert caught.value.where == "--prefix-cache-dir" and "file" in caught.value.found
    with pytest.raises(hadron.UsageError) as caught:
        load(FAMILIES[0], tmp_path, prefix_cache_dir=7)
    assert caught.value.where == "--prefix-cache-dir"


def test_a_full_disk_ends_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    llm = load(FAMILIES[0], tmp_path)
    monkeypatch.setattr(Path, "replace", full)
    assert len(ask(llm, TEXT).outputs[0].token_ids) == 8
    assert [path.name for folder in tmp_path.iterdir() for path in folder.iterdir()] == ["key.json"]


def test_a_folder_that_becomes_read_only_is_read_and_ends_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = FAMILIES[0]
    expected = ask(load(name, tmp_path), TEXT[:300]).outputs
    size = files(tmp_path, "page")[0].stat().st_size
    kept = files(tmp_path, "page")
    llm = load(name, tmp_path, prefix_cache_bytes=5 * size)

    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for owner, act in ((os, "utime"), (Path, "unlink"), (Path, "replace")):
        monkeypatch.setattr(owner, act, read_only)
    again = ask(llm, TEXT[:300])
    assert again.num_cached_tokens == 256 and again.outputs == expected
    assert len(ask(llm, TEXT[300:600]).outputs[0].token_ids) == 8  # there is no room, and none can be made
    assert files(tmp_path, "page") == kept


@pytest.mark.parametrize("name", FAMILIES)
def test_reading_that_is_interrupted_leaves_nothing_behind(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ask(load(name, tmp_path), TEXT)
    llm = load(name, tmp_path)
    free = llm._engine.load

    def interrupted(*_: Any) -> bool:
        raise KeyboardInterrupt

    for what in ("load_page", "load_state") if name.startswith("glm53f") else ("load_page",):
        with monkeypatch.context() as patch:
            patch.setattr(DiskPrefixes, what, interrupted)
            with pytest.raises(KeyboardInterrupt):
                ask(llm, TEXT)
        assert not llm._engine.has_requests and llm._engine.load == free
    found = ask(llm, TEXT)
    assert found.num_cached_tokens == 640 and found.outputs == expected.outputs


def store(folder: Path, limit: int = 1 << 20, width: int = 3) -> DiskPrefixes:
    spec = CacheSpec(
        (LayerCache(latent_width=width, index_width=2, kda=(1, 2), conv=(2, 3)),), 2, "bfloat16", 4, "bfloat16"
    )
    pages, states = Pages(spec, 3), States(spec, 2)
    made = DiskPrefixes(folder, {"a": 1}, limit, pages, states)
    for tensor in (*pages.latents, *pages.index_keys, *states.kda, *states.conv):
        assert tensor is not None
        tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape))
    return made


def test_a_page_and_a_state_come_back_as_they_were(tmp_path: Path) -> None:
    ours = store(tmp_path)
    ours.save_page(b"p", 1)
    ours.save_state(b"s", 0, 8)
    theirs = store(tmp_path)
    assert theirs.has_page(b"p") and theirs.has_state(b"s") and not theirs.has_page(b"s")
    assert theirs.load_page(b"p", 2) and theirs.load_state(b"s", 1, 8)
    for a, b in zip(ours._pages.latents + ours._pages.index_keys, theirs._pages.latents + theirs._pages.index_keys,
                    strict=True):  # fmt: skip
        assert a is not None and b is not None and torch.equal(a[1], b[2])
    for a, b in zip(ours._states.kda + ours._states.conv, theirs._states.kda + theirs._states.conv, strict=True):
        assert a is not None and b is not None and torch.equal(a[0], b[1])
    assert theirs._states.stamp(1) == 8


def test_what_has_another_layout_is_not_loaded(tmp_path: Path) -> None:
    store(tmp_path).save_page(b"p", 1)
    wider = store(tmp_path, width=5)
    assert not wider.load_page(b"p", 0)
    assert not wider.has_page(b"p") and files(tmp_path, "page") == []


def test_half_written_files_are_removed_when_nobody_writes_them(tmp_path: Path) -> None:
    store(tmp_path)
    (folder,) = tmp_path.iterdir()
    old, new = folder / "00.7.part", folder / "01.7.part"
    for path in (old, new):
        path.write_text("x")
    os.utime(old, (time.time() - 7200,) * 2)
    store(tmp_path)
    assert (old.exists(), new.exists()) == (False, True)


def test_something_larger_than_the_bound_is_not_written(tmp_path: Path) -> None:
    small = store(tmp_path, limit=60)
    small.save_page(b"p", 1)
    assert not small.has_page(b"p") and files(tmp_path, "page") == []
