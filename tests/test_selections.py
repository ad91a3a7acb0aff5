"""Choices of routers and indexers, recorded on one model and imposed on another."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import hadron
from hadron import LLM, Selections
from hadron.kernels.cpu import native
from tests.conftest import DATA

NAMES = ("glm52-quark-mxfp4-attnptpc", "glm53f-quark-mxfp4-blockfp8")
NATIVE = pytest.mark.skipif(not native.levels(), reason="this build has no native kernels: install with a compiler")


def prompt(name: str, index: int) -> list[int]:
    ids: list[int] = load_file(DATA / name / "goldens.safetensors")[f"prompt{index}.input_ids"].tolist()
    return ids


def load(name: str, **settings: object) -> LLM:
    return LLM(DATA / name, threads=1, **{"kernels": "reference", "dtype": "float32", **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_records_what_it_chose_and_taking_it_again_changes_nothing(name: str) -> None:
    ids = prompt(name, 1)
    recorded = Selections()
    plain = load(name).logits(ids)
    assert np.array_equal(
        load(name, max_num_batched_tokens=7).logits(ids, selections=recorded),
        load(name, max_num_batched_tokens=7).logits(ids),
    )
    config = load(name).plan.config
    assert config is not None and recorded.length == len(ids)
    assert len(recorded.experts) == sum(layer.mlp == "sparse" for layer in config.layers)
    assert len(recorded.positions) == sum(layer.indexer == "full" for layer in config.layers)
    for rows in recorded.experts.values():
        assert rows.shape == (len(ids), 2) and bool((rows[:, 0] < rows[:, 1]).all())
    for rows in recorded.positions.values():
        assert bool((rows.max(dim=1).values <= torch.arange(len(ids))).all()), "no query sees the future"
    recorded.imposed = True
    assert np.abs(load(name).logits(ids, selections=recorded) - plain).max() < 1e-4 * np.abs(plain).max()


@pytest.mark.parametrize("name", NAMES)
def test_other_choices_give_other_logits(name: str) -> None:
    ids = prompt(name, 1)
    llm, recorded = load(name), Selections()
    plain = llm.logits(ids, selections=recorded)
    recorded.imposed = True
    for layer, rows in recorded.experts.items():
        recorded.experts[layer] = rows * 0 + torch.tensor([0, 1])
    assert np.abs(llm.logits(ids, selections=recorded) - plain).max() > 1e-2 * np.abs(plain).max()


@NATIVE
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("index", [0, 1, 2])
def test_native_kernels_stay_near_the_definition_once_choices_are_the_same(name: str, index: int) -> None:
    ids, recorded = prompt(name, index), Selections()
    expected = load(name).logits(ids, selections=recorded)
    recorded.imposed = True
    found = load(name, kernels="cpu").logits(ids, selections=recorded)
    assert np.abs(found - expected).max() < 2e-2 * np.abs(expected).max()


def test_choices_for_other_tokens_are_refused() -> None:
    llm, recorded = load(NAMES[0]), Selections()
    llm.logits([5, 9, 2], selections=recorded)
    recorded.imposed = True
    with pytest.raises(hadron.RequestError, match="selections belong to other tokens") as caught:
        llm.logits([5, 9, 2, 7], selections=recorded)
    assert (caught.value.where, caught.value.found) == ("selections", "choices for 3")
    assert caught.value.accepted == "4, as many as token_ids"
