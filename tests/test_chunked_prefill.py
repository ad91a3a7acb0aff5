"""A prompt taken in pieces of any size gives what transformers computed for it as a whole."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

from conftest import DATA
from hadron import LLM, SamplingParams

NAMES = ("glm52-ct-w4a16", "glm53f-modelopt-nvfp4")


@pytest.mark.parametrize("chunk_size", [1, 5, 64])
@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_in_pieces(name: str, chunk_size: int) -> None:
    """100 tokens: more than the indexer selects, and pools, pages and convolution windows cut anywhere."""
    goldens = load_file(DATA / name / "goldens.safetensors")
    llm = LLM(DATA / name, kernels="reference", dtype="float32", max_num_batched_tokens=chunk_size)
    ids, expected = goldens["prompt2.input_ids"].tolist(), goldens["prompt2.last_logits"]
    logits = llm.logits(ids)
    assert float(np.abs(logits[-1] - expected).max() / np.abs(expected).max()) <= 1e-4
    assert logits.argmax(-1).tolist() == goldens["prompt2.argmax"].tolist()
    greedy = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": ids}, greedy)
    assert output.outputs[0].token_ids == goldens["prompt2.greedy16"].tolist()
