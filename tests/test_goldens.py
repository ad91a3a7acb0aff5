"""Every checkpoint of the set, from its files to its tokens, against what transformers computed.

Last logits within 1e-4 of the largest, the top token at every position, and 16 greedy tokens decoded
through the cache, for all prompts.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from conftest import DATA, checkpoint_names
from hadron import LLM, SamplingParams

SMALL = sorted(path.parent.name for path in DATA.glob("*/goldens.safetensors"))
FULL = [name for name in checkpoint_names() if name not in SMALL]
GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)


ON_A_GPU = ("glm52-ct-w4a16", "glm53f-modelopt-nvfp4")


def load(folder: Path, **options: Any) -> LLM:
    threads = int(os.environ.get("OMP_NUM_THREADS", "2"))
    return LLM(folder, kernels="reference", dtype="float32", threads=threads, **options)


def compare(folder: Path, **options: Any) -> None:
    llm, goldens = load(folder, **options), load_file(folder / "goldens.safetensors")
    for i in range(3):
        ids = goldens[f"prompt{i}.input_ids"].tolist()
        logits = llm.logits(ids)
        expected = goldens[f"prompt{i}.last_logits"]
        assert logits.shape == (len(ids), len(expected))
        difference = float(np.abs(logits[-1] - expected).max() / np.abs(expected).max())
        assert difference <= 1e-4, f"prompt {i}: {difference:.2e} of the largest logit"
        assert logits.argmax(-1).tolist() == goldens[f"prompt{i}.argmax"].tolist(), f"prompt {i}"
        (output,) = llm.generate({"prompt_token_ids": ids}, GREEDY)
        assert output.outputs[0].token_ids == goldens[f"prompt{i}.greedy16"].tolist(), f"prompt {i}"


@pytest.mark.parametrize("name", SMALL)
def test_small_checkpoints(name: str) -> None:
    compare(DATA / name)


@pytest.mark.parametrize("name", FULL or ["none"])
def test_full_set(checkpoints: Path, name: str) -> None:
    compare(checkpoints / name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_A_GPU)
def test_on_a_gpu(name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU that torch can use, and a build of torch for it")
    compare(DATA / name, device="cuda")
