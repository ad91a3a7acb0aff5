"""`hadron bench`: the JSON that is documented, the table, and what becomes of wrong usage. Nothing is timed."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hadron.bench import attention, limits, measure, model, run, small
from hadron.cli import main
from hadron.errors import CapacityError
from hadron.kernels.cpu import native
from tests.conftest import DATA

built = pytest.mark.skipif(not native.levels(), reason="this build has no native kernels: install with a C++ compiler")

LIMITS = {"read_gbps", "update_gbps", "bf16_gflops", "int8_gops", "fp32_gflops", "tile_gflops"}
ROW = {
    "op", "scheme", "m", "n", "k", "shape", "provider", "threads", "isa", "ms", "gbps", "gflops", "limit", "limit_value",
    "fraction", "of_bandwidth", "of_peak", "warm_gbps",
}  # fmt: skip
STEP = {
    "context", "context_bytes", "tokens", "steps", "ms", "tokens_per_second", "gbps", "gflops", "limit", "limit_value", "fraction",
    "profile",
}  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small memory, and measurements that end at once."""
    monkeypatch.setattr(limits, "SLICE", 1 << 16)
    monkeypatch.setattr(limits, "WORK", 1e5)
    monkeypatch.setattr(measure, "ROUND", 1e-4)
    monkeypatch.setattr(run, "ARENA", 1 << 22)
    monkeypatch.setattr(model, "ARENA", 1 << 20)


def kernels(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main.run(["bench", "kernels", "--json", "--rounds", "1", "--threads", "1", *options]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@built
def test_json_has_limits_and_a_row_for_each_case(capsys: pytest.CaptureFixture[str]) -> None:
    found = kernels(capsys, "--op", "linear", "--scheme", "mxfp4,fp8_block", "--m", "1,3", "--n", "64", "--k", "256")
    assert set(found) == {"environment", "limits", "rows", "notes"}
    assert set(found["limits"]) == LIMITS
    assert [set(row) for row in found["rows"]] == [ROW] * 4
    cases = [(r["scheme"], r["m"], r["n"], r["k"]) for r in found["rows"]]
    assert cases == [(s, m, 64, 256) for s in ("mxfp4", "fp8_e4m3_block_128x128") for m in (1, 3)]
    sizes = {"mxfp4": 64 * 256 / 2 + 64 * 8, "fp8_e4m3_block_128x128": 64 * 256 + 8}
    for row in found["rows"]:
        assert row["gbps"] == pytest.approx(sizes[row["scheme"]] / row["ms"] / 1e6)
        assert row["gflops"] == pytest.approx(2 * row["m"] * 64 * 256 / row["ms"] / 1e6)
        rate = row["gbps"] if row["limit"] == "read_gbps" else row["gflops"]
        assert row["fraction"] == pytest.approx(rate / row["limit_value"])
        assert row["fraction"] == max(row["of_bandwidth"], row["of_peak"])
        assert (row["warm_gbps"] is None) == (row["m"] > 1)
        assert (row["threads"], row["isa"]) == (1, native.level_name())


@built
def test_blocks_count_three_matrices_and_experts_those_that_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    found = kernels(
        capsys, "--op", "mlp,moe", "--scheme", "bf16", "--m", "1", "--n", "32", "--k", "64", "--experts", "16"
    )  # fmt: skip
    mlp, moe = found["rows"]
    size, work = 3 * 32 * 64 * 2, 3 * 2 * 32 * 64
    assert (mlp["op"], moe["op"], moe["shape"]) == ("mlp", "moe", "16 experts, top 8")
    for row, times in ((mlp, 1), (moe, 8)):
        assert row["gbps"] == pytest.approx(times * size / row["ms"] / 1e6)
        assert row["gflops"] == pytest.approx(times * work / row["ms"] / 1e6)


@built
def test_attention_counts_what_it_reads_and_multiplies(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attention, "CONTEXT", 256)
    monkeypatch.setattr(attention, "SELECTED", 32)
    monkeypatch.setattr(attention, "POOLS", 512)
    whole, alone, indexer = kernels(capsys, "--op", "mla,indexer", "--m", "2")["rows"]
    for row, size in ((whole, 256), (alone, 16)):
        weights = 64 * 2 * size * 512 * 2
        assert row["gbps"] == pytest.approx((weights + 2 * 32 * 512 * 2) / row["ms"] / 1e6)
        work = 2 * 2 * 64 * (2 * 32 * 512 + 2 * size * 512)
        assert row["gflops"] == pytest.approx(work / row["ms"] / 1e6)
    assert indexer["gbps"] == pytest.approx(512 * 128 * 2 / indexer["ms"] / 1e6)
    assert indexer["gflops"] == pytest.approx(2 * 2 * 512 * 32 * 128 / indexer["ms"] / 1e6)


@built
def test_a_recurrence_reads_and_writes_its_state(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attention, "KDA", replace(attention.KDA, heads=2, head_dim=32))
    (row,) = kernels(capsys, "--op", "kda", "--m", "1")["rows"]
    assert row["gbps"] == pytest.approx(2 * 4 * 2 * 32 * 32 / row["ms"] / 1e6)
    assert row["limit"] in ("update_gbps", "fp32_gflops")
    assert row["shape"] == "2 heads of 32 x 32"


@built
def test_progress_ends_at_the_number_of_rows() -> None:
    seen: list[tuple[int, int]] = []
    asked = run.Asked(
        ops=("linear", "moe"), schemes=("bf16", "mxfp4"), ms=(1, 2), shape=(32, 64), experts=8, threads=1, rounds=1
    )  # fmt: skip
    report = run.kernels(asked, lambda *at: seen.append(at))
    assert seen == [(2, 8), (4, 8), (6, 8), (8, 8)]
    assert len(report.rows) == 8


@built
def test_operations_around_the_products_count_what_they_move(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, mixes, m = 64, 24, 2
    monkeypatch.setattr(small, "HIDDEN", hidden)
    monkeypatch.setattr(small, "VOCABULARY", 100)
    monkeypatch.setattr(small, "EXPERTS", replace(small.EXPERTS, hidden=hidden, experts=16))
    monkeypatch.setattr(small, "STREAMS", replace(small.STREAMS, hidden=hidden))
    moved = {
        "router": 16 * hidden * 2 + m * hidden * 4,
        "hyper_connection": mixes * 4 * hidden * 2 + 3 * m * 4 * hidden * 4 + 2 * m * hidden * 2,
        "norm": m * hidden * 6, "rope": 2 * m * 64 * 256 * 2, "embedding": m * hidden * 6, "lm_head": 100 * hidden * 2,
        "quantize": 2 * m * hidden * 4,
    }  # fmt: skip
    seen: list[tuple[int, int]] = []
    threads = torch.get_num_threads()
    try:
        report = run.kernels(run.Asked(ops=tuple(moved), ms=(m,), threads=1, rounds=1), lambda *at: seen.append(at))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    assert seen[-1] == (9, 9) and [row.op for row in report.rows] == [*list(moved)[:-1], *["quantize"] * 3]
    for row in report.rows:
        assert row.provider == "cpu" and row.gbps == pytest.approx(moved[row.op] / row.ms / 1e6)
    schemes = {row.scheme for row in report.rows if row.op == "quantize"}
    assert schemes == {"fp8_e4m3_token_dynamic", "mxfp4_dynamic", "nvfp4_dynamic"}


@pytest.mark.parametrize(
    ("options", "flag", "deaf", "heeding"),
    [
        (["--op", "linear,kda", "--scheme", "mxfp4"], "--scheme", "--op kda", "with linear, mlp, moe"),
        (["--op", "norm", "--n", "64", "--k", "64"], "--n and --k", "--op norm", "with linear, mlp, moe"),
        (["--op", "linear,mlp", "--experts", "8"], "--experts", "--op linear,mlp", "with moe"),
    ],
)
def test_an_option_that_no_operation_would_heed_is_refused(
    options: list[str], flag: str, deaf: str, heeding: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["bench", "kernels", *options]) == 2
    text = capsys.readouterr().err
    assert "an option says nothing to an operation" in text and "leave it out" in text
    assert flag in text and deaf in text and heeding in text


@built
def test_every_level_is_held_against_peaks_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    for level in native.levels():
        found = kernels(
            capsys, "--op", "linear", "--scheme", "int8", "--m", "64", "--n", "64", "--k", "64", "--isa", level
        )
        (row,) = found["rows"]
        assert row["isa"] == found["environment"]["isa"] == level
        peaks = [f"{kind}_gflops" for kind in ("tile", "bf16", "fp32")]
        has = [name for name in peaks if found["limits"][name] is not None]
        assert has == [p for p in peaks if native.extension().probe_peak_operations(level, p.partition("_")[0])]
        assert row["limit"] in ("read_gbps", has[0])
    assert native.ENVIRONMENT not in os.environ


@built
def test_the_table_names_the_limit_and_says_how_it_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--op", "linear", "--scheme", "nvfp4", "--m", "1", "--n", "64", "--k", "64", "--rounds", "1"]
    assert main.run(["bench", "kernels", *options]) == 0
    shown = capsys.readouterr()
    assert "limits here: read " in shown.out
    assert any(line.split()[:6] == ["cpu.linear", "nvfp4", "64", "->", "64", "1"] for line in shown.out.splitlines())
    assert "cold at M = 1 unless a cache" in shown.out
    assert shown.err == ""  # progress is for terminals


@built
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--op", "conv"],
            "'conv'\n  accepted: linear, mlp, moe, kda, mla, indexer, router, hyper_connection, norm, rope, embedding, lm_head, quantize",
        ),
        (["--scheme", "fp5"], "'fp5'\n  accepted: names that `hadron check` prints"),
        (["--m", "1,x"], "where:    --m\n  found:    '1,x'"),
        (["--m", "0"], "whole numbers above 0"),
        (["--n", "64"], "--n without --k"),
        (["--k", "64"], "--k without --n"),
        (["--isa", "mmx"], "where:    HADRON_ISA\n  found:    'mmx'"),
    ],
)
def test_wrong_usage_is_refused_with_what_would_do(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["bench", "kernels", *options]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.out == ""


def test_without_native_kernels_it_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native, "_native", None)
    assert main.run(["bench", "kernels"]) == 2
    assert "This build has no native CPU kernels" in capsys.readouterr().err


def test_too_little_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = 100 << 20

    monkeypatch.setattr(run.psutil, "virtual_memory", Memory)
    with pytest.raises(CapacityError, match="there is no memory to measure in") as refused:
        run.fitting(1 << 30)
    assert refused.value.found == "0.07 GB that could be used"
    assert run.fitting(1 << 20) == 1 << 20


@built
def test_decode_has_a_step_for_each_context_with_its_profile(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--contexts", "8,1k", "--steps", "1", "--threads", "1", "--json"]
    assert main.run(["bench", "decode", str(DATA / "glm53f-quark-mxfp4-blockfp8"), *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"environment", "limits", "model", "layers", "bytes", "cost", "steps", "notes"}
    assert [set(step) for step in found["steps"]] == [STEP] * 2
    assert [(step["context"], step["tokens"]) for step in found["steps"]] == [(8, 1), (1024, 1)]
    for step in found["steps"]:
        profile = step["profile"]
        assert profile["native_calls"] > 0
        assert profile["native_calls_a_layer"] == pytest.approx(profile["native_calls"] / found["layers"])
        assert {share["name"] for share in profile["native"]} >= {"linear", "moe"}


@built
def test_prefill_prints_a_table_and_where_the_time_went(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--tokens", "4", "--context", "3", "--steps", "1", "--threads", "1"]
    assert main.run(["bench", "prefill", str(DATA / "glm52-fp8-block"), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:2] == ["3", "4"] for line in lines)
    assert "a step of 4 behind 3" in lines
    assert any(line.startswith("outside ") for line in lines)


def test_a_checkpoint_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["bench", "decode", str(tmp_path)]) == 2
    assert "hadron: error: " in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "1,,2", "k", "-1k", "1.5k"])
def test_contexts_that_are_no_numbers_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["bench", "decode", "model", "--contexts", text]) == 2
    assert f"where:    --contexts\n  found:    {text!r}" in capsys.readouterr().err
