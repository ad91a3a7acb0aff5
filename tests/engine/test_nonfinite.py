"""A weight that is not finite fails the requests that meet it, on real kernels, and is named when asked."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import hadron
from hadron import LLM, SamplingParams
from tests.conftest import DATA

NAME = "glm53f-quark-mxfp4-blockfp8"
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS: list[Any] = [{"prompt_token_ids": ids} for ids in ([5, 9, 2, 8], [5, 77, 3], list(range(20, 60)))]


def poisoned(tmp_path: Path, suffix: str, row: int) -> Path:
    """A copy of a checkpoint with NaN in one row of the tensor of that name."""
    folder = Path(shutil.copytree(DATA / NAME, tmp_path / "model"))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    (name,) = [name for name in tensors if name.endswith(suffix)]
    tensors[name] = tensors[name].clone()
    tensors[name][row] = float("nan")
    save_file(tensors, file, metadata=metadata)
    return folder


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("debug", [False, True])
def test_only_the_request_that_meets_it_fails(tmp_path: Path, kernels: str, debug: bool) -> None:
    options: dict[str, Any] = {"threads": 1, "kernels": kernels, "dtype": "float32"}
    sound = LLM(DATA / NAME, **options).generate(PROMPTS, GREEDY)
    llm = LLM(poisoned(tmp_path, "embed_tokens.weight", 77), **options, debug_nonfinite=debug)
    engine, params = llm._engine, GREEDY.with_defaults({})
    requests = [engine.add(str(i), tuple(p["prompt_token_ids"]), params) for i, p in enumerate(PROMPTS)]
    while engine.has_requests:
        engine.step()
    assert [request.finish_reason for request in requests] == ["length", "error", "length"]
    assert isinstance(requests[1].error, hadron.NumericsError)
    for i in (0, 2):
        assert requests[i].output_token_ids == sound[i].outputs[0].token_ids
    if debug:
        assert requests[1].error.where == "embed_tokens, token 1 of the step"
    with pytest.raises(hadron.NumericsError):
        llm.generate(PROMPTS, GREEDY)
    assert llm.generate(PROMPTS[0], GREEDY)[0].outputs == sound[0].outputs


@pytest.mark.parametrize("layer", [1, 3])
def test_the_layer_is_named(tmp_path: Path, layer: int) -> None:
    folder = poisoned(tmp_path, f"layers.{layer}.post_attention_layernorm.weight", 5)
    llm = LLM(folder, threads=1, debug_nonfinite=True)
    for call in (lambda: llm.generate(PROMPTS[0], GREEDY), lambda: llm.logits([5, 9, 2])):
        with pytest.raises(hadron.NumericsError) as caught:
            call()
        assert caught.value.where.startswith(f"layers.{layer}, token ")
        assert "hadron check" in caught.value.hint


def test_looking_changes_nothing() -> None:
    looked, plain = (LLM(DATA / NAME, threads=1, debug_nonfinite=debug).logits(range(50)) for debug in (True, False))
    assert torch.equal(torch.from_numpy(looked), torch.from_numpy(plain))
