"""Choosing a backend and a prefill path: refusals carry every reason with its value."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from hadron.attention.select import BACKENDS, AttentionNeeds, select, selection_budget

NEEDS = AttentionNeeds("cpu", True, "bfloat16", False, 2048)
TINY = msgspec.structs.replace(
    BACKENDS[0], name="tiny", platforms=("cuda",), kernels=(), dense_mha_prefill=False,
    cache_dtypes=("float32", "bfloat16"), speculative_verification=False,
)  # fmt: skip
ROWS = (TINY, *BACKENDS)


def test_the_default_is_mqa_on_the_first_backend_that_can_serve() -> None:
    choice = select(NEEDS)
    assert (choice.backend, choice.prefill_path) == ("reference", "mqa")
    assert choice.path == "hadron.attention.reference:ReferenceBackend"


def test_native_kernels_bring_their_backend() -> None:
    choice = select(msgspec.structs.replace(NEEDS, kernels="cpu"))
    assert (choice.backend, choice.path) == ("cpu", "hadron.attention.cpu:CpuBackend")
    assert choice.reasons[0] == "cpu: first that can serve"


def test_without_native_kernels_the_reference_serves_and_says_why() -> None:
    choice = select(NEEDS)
    assert choice.backend == "reference"
    assert choice.reasons[0] == "cpu needs the mla kernels of cpu, not of reference"
    assert select(NEEDS, backend="cpu").reasons == choice.reasons[:1], "named, it never falls back"


def test_an_automatic_choice_falls_back_and_says_why() -> None:
    choice = select(NEEDS, rows=ROWS)
    assert choice.backend == "reference"
    assert choice.reasons[0] == "tiny runs on cuda, not on cpu"


def test_a_backend_that_was_named_never_falls_back() -> None:
    needs = msgspec.structs.replace(NEEDS, cache_dtype="fp8_e4m3", speculative=True)
    choice = select(needs, backend="tiny", rows=ROWS)
    assert choice.backend is None
    assert choice.prefill_path is None
    assert choice.reasons == (
        "tiny runs on cuda, not on cpu",
        "tiny reads caches of float32, bfloat16, not of fp8_e4m3",
        "tiny does not verify speculative tokens",
    )


def test_an_fp8_cache_is_read_by_both_backends_and_falls_back_past_one_that_does_not() -> None:
    needs = msgspec.structs.replace(NEEDS, platform="cuda", cache_dtype="fp8_e4m3")
    choice = select(needs, rows=ROWS)
    assert choice.backend == "reference"
    assert choice.reasons[0] == "tiny reads caches of float32, bfloat16, not of fp8_e4m3"
    assert select(msgspec.structs.replace(needs, platform="cpu", kernels="cpu")).backend == "cpu"
    assert select(msgspec.structs.replace(needs, cache_dtype="int8")).reasons[-1] == (
        "reference reads caches of float32, bfloat16, fp8_e4m3, not of int8"
    )


def test_a_dense_model_is_refused_by_a_sparse_backend() -> None:
    choice = select(msgspec.structs.replace(NEEDS, sparse=False), backend="reference")
    assert choice.reasons == ("reference is a sparse backend, the model's attention is dense",)


def test_dense_prefill_is_taken_when_named_and_equal() -> None:
    assert select(NEEDS, prefill="dense_mha").prefill_path == "dense_mha"


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_dense_prefill_is_refused_where_it_is_never_equal(backend: str) -> None:
    choice = select(msgspec.structs.replace(NEEDS, selection_budget=0), backend=backend, prefill="dense_mha")
    assert choice.backend is None
    assert "selection budget 0" in choice.reasons[-1]


def test_dense_prefill_named_without_a_dense_path() -> None:
    choice = select(msgspec.structs.replace(NEEDS, platform="cuda"), backend="tiny", prefill="dense_mha", rows=ROWS)
    assert choice.reasons == ("tiny has no dense_mha prefill",)
    fallen = select(msgspec.structs.replace(NEEDS, platform="cuda"), prefill="dense_mha", rows=ROWS)
    assert (fallen.backend, fallen.prefill_path) == ("reference", "dense_mha")


@pytest.mark.parametrize(("arguments", "words"), [({"backend": "flash"}, "'flash'"), ({"prefill": "fast"}, "'fast'")])
def test_unknown_names_list_the_known(arguments: dict[str, str], words: str) -> None:
    choice = select(NEEDS, **arguments)  # type: ignore[arg-type]
    assert choice.backend is None
    assert words in choice.reasons[0]
    assert "reference" in choice.reasons[0] or "dense_mha" in choice.reasons[0]


def test_the_selection_budget() -> None:
    assert selection_budget(2048, pooled=False, pool=1, always_select_tail=False) == 2048
    assert selection_budget(2048, pooled=True, pool=4, always_select_tail=True) == 2048
    assert selection_budget(2048, pooled=True, pool=1, always_select_tail=False) == 2048
    assert selection_budget(2048, pooled=True, pool=4, always_select_tail=False) == 0


def test_choosing_loads_no_tensor_library() -> None:
    code = "import sys, hadron.attention.select, hadron.cache.manager, hadron.cache.spec; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
