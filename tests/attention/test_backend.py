"""The attention contract: what a class must declare, what metadata holds, which path a step takes."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch

from hadron.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    create_backend,
    split_decodes_and_prefills,
)
from hadron.attention.reference import ReferenceBackend
from hadron.attention.select import BACKENDS, AttentionChoice, AttentionNeeds, select
from hadron.batch import ForwardBatch, RequestStep, make_batch
from hadron.cache.blocks import BlockPool
from hadron.cache.manager import CacheManager
from hadron.cache.pages import Pages
from hadron.cache.spec import CacheSpec, LayerCache
from hadron.cache.states import States
from hadron.errors import UnsupportedError


def mqa(self: Any, step: Any, metadata: Any, pages: Any) -> torch.Tensor:
    return torch.empty(0)


DECLARED: dict[str, Any] = {
    "name": "toy",
    "is_sparse": True,
    "supports_dense_mha_prefill": False,
    "supports_speculative_verification": False,
    "cache_dtypes": ("float32",),
    "forward_mqa": mqa,
}


def declare(base: type = AttentionBackend, **changes: Any) -> Any:
    body = {**DECLARED, **changes}
    return type("Toy", (base,), {key: value for key, value in body.items() if value is not None})


class MqaOnly(AttentionBackend):
    """A sparse backend without a dense path."""

    name = "mqa_only"
    is_sparse = True
    supports_dense_mha_prefill = False
    supports_speculative_verification = False
    cache_dtypes = ("float32",)
    forward_mqa = mqa


def batch_of(query_lens: tuple[int, ...], context_lens: tuple[int, ...] | None = None) -> ForwardBatch:
    spec = CacheSpec((LayerCache(latent_width=4),), 1, "float32", 4, "float32")
    pages, states = Pages(spec, 64), States(spec, 8)
    manager = CacheManager(spec, BlockPool(64, 4), pages, states)
    steps = []
    for length, context in zip(query_lens, context_lens or (0,) * len(query_lens), strict=True):
        cache = manager.admit()
        manager.grow(cache, context + length)
        states.advance([cache.state_slot], [context])
        manager.commit([cache], [[0] * context])
        steps.append(RequestStep(cache, [0] * length))
    return make_batch(steps, pages, states)


def test_a_complete_declaration_is_accepted() -> None:
    assert declare().name == "toy"


@pytest.mark.parametrize("key", [key for key in DECLARED if key != "forward_mqa"])
def test_each_declaration_is_required(key: str) -> None:
    with pytest.raises(TypeError, match=f"Toy: .*{key} must be declared"):
        declare(**{key: None})


def test_a_class_that_declares_nothing_does_not_come_into_being() -> None:
    with pytest.raises(TypeError) as error:
        type("Silent", (AttentionBackend,), {})
    for key in DECLARED:
        assert key in str(error.value)


def test_declarations_are_not_inherited() -> None:
    parent = declare()
    with pytest.raises(TypeError, match="supports_dense_mha_prefill must be declared"):
        type("Child", (parent,), {"forward_mqa": mqa})
    with pytest.raises(TypeError, match="is_sparse must be declared as a bool"):
        declare(parent, is_sparse=1)
    with pytest.raises(TypeError, match="cache_dtypes must be declared"):
        declare(cache_dtypes=())


def test_a_declaration_must_agree_with_the_methods() -> None:
    flag, method = "supports_dense_mha_prefill", "forward_mha"
    with pytest.raises(TypeError, match=f"{flag} is True, but {method} is not defined"):
        declare(**{flag: True})
    with pytest.raises(TypeError, match=f"{flag} is False, but {method} is defined"):
        declare(**{method: mqa})
    assert declare(**{flag: True, method: mqa})


def test_mqa_must_be_defined() -> None:
    with pytest.raises(TypeError, match="forward_mqa must be defined"):
        declare(forward_mqa=None)


def test_no_field_of_the_metadata_has_a_default() -> None:
    fields = dataclasses.fields(AttentionMetadata)
    missing = dataclasses.MISSING
    assert all(f.default is missing and f.default_factory is missing for f in fields)
    given = {f.name: None for f in fields}
    for name in given:
        with pytest.raises(TypeError, match=name):
            AttentionMetadata(**{k: v for k, v in given.items() if k != name})  # type: ignore[arg-type]
    metadata = AttentionMetadata(**given)  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        metadata.num_decodes = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("query_lens", "threshold", "expected"),
    [
        ((1, 1), 1, (2, 0, 2, 0)),
        ((1, 9), 1, (1, 1, 1, 9)),
        ((7,), 1, (0, 1, 0, 7)),
        ((4, 2, 4, 5, 9), 4, (3, 2, 10, 14)),
        ((5, 5), 4, (0, 2, 0, 10)),
        ((), 1, (0, 0, 0, 0)),
    ],
)
def test_split(query_lens: tuple[int, ...], threshold: int, expected: tuple[int, ...]) -> None:
    assert split_decodes_and_prefills(query_lens, threshold) == expected


@pytest.mark.parametrize(
    ("query_lens", "threshold", "words"),
    [((3, 1), 1, "must come first"), ((1, 0), 1, "at least 1 each"), ((1,), 0, "decode threshold 0")],
)
def test_split_refuses(query_lens: tuple[int, ...], threshold: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        split_decodes_and_prefills(query_lens, threshold)


def metadata_of(backend: AttentionBackend, *lens: Any) -> AttentionMetadata:
    return backend.build_metadata(batch_of(*lens))


@pytest.mark.parametrize("kind", [MqaOnly, ReferenceBackend])
def test_a_decode_only_batch_of_two(kind: type[AttentionBackend]) -> None:
    found = metadata_of(kind("mqa", selection_budget=8), (1, 1), (5, 2))
    assert (found.num_decodes, found.num_prefills, found.num_decode_tokens, found.num_prefill_tokens) == (2, 0, 2, 0)
    assert found.sequence_lens == (6, 3)
    assert found.positions.tolist() == [5, 2]
    assert found.prefill is None
    assert found.prefill_max_seq_len == 0


def test_one_decode_and_one_prefill_without_a_dense_path() -> None:
    found = metadata_of(MqaOnly("mqa", selection_budget=8), (1, 3), (5, 2))
    assert (found.num_decodes, found.num_prefills, found.num_decode_tokens) == (1, 1, 1)
    assert found.prefill is None
    assert found.prefill_max_seq_len == 0


def test_the_dense_path_is_taken_while_every_context_fits_the_budget() -> None:
    backend = ReferenceBackend("dense_mha", selection_budget=8)
    found = metadata_of(backend, (1, 3, 6), (50, 5, 1))
    assert found.prefill is not None
    assert (found.prefill.first_request, found.prefill.first_token) == (1, 1)
    assert found.prefill.query_lens == (3, 6)
    assert found.prefill.sequence_lens == (8, 7)
    assert found.prefill_max_seq_len == 8
    assert metadata_of(backend, (1, 3, 6), (50, 6, 1)).prefill is None
    assert metadata_of(backend, (1,), (3,)).prefill is None


def test_the_threshold_of_speculative_steps_counts_as_decode() -> None:
    found = metadata_of(MqaOnly("mqa", selection_budget=8, decode_threshold=3), (3, 1, 4))
    assert (found.num_decodes, found.num_prefills, found.num_decode_tokens) == (2, 1, 4)


def test_a_path_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="mqa_only has no dense_mha prefill"):
        MqaOnly("dense_mha", selection_budget=8)
    with pytest.raises(ValueError, match="prefill path 'flash'"):
        MqaOnly("flash", selection_budget=8)


def test_a_backend_without_a_dense_path_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hadron.attention"):
        backend = MqaOnly("mqa", selection_budget=8)
        for _ in range(3):
            metadata_of(backend, (1, 3), (5, 2))
    assert [r.getMessage() for r in caplog.records] == [
        "attention backend mqa_only has no dense_mha prefill: every prefill takes mqa"
    ]


def test_rows_of_the_table_equal_the_declarations() -> None:
    for row in BACKENDS:
        choice = AttentionChoice(row.name, row.path, "mqa", ())
        backend = create_backend(choice, selection_budget=8)
        assert backend.name == row.name
        assert backend.is_sparse == row.is_sparse
        assert backend.supports_dense_mha_prefill == row.dense_mha_prefill
        assert backend.supports_speculative_verification == row.speculative_verification
        assert backend.cache_dtypes == row.cache_dtypes


def test_opening_a_choice_logs_its_reasons(caplog: pytest.LogCaptureFixture) -> None:
    choice = select(AttentionNeeds("cpu", True, "float32", False, 8))
    with caplog.at_level(logging.INFO, logger="hadron.attention"):
        create_backend(choice, selection_budget=8)
    (record,) = caplog.records
    assert "reference, prefill path mqa (cpu needs the mla kernels" in record.getMessage()
    assert "; reference: first that can serve; mqa: default" in record.getMessage()


def test_opening_a_refusal_raises_every_reason() -> None:
    choice = select(AttentionNeeds("tpu", False, "int8", True, 8), backend="reference")
    with pytest.raises(UnsupportedError) as error:
        create_backend(choice, selection_budget=8)
    assert error.value.found == "; ".join(choice.reasons)
    assert len(choice.reasons) == 3
