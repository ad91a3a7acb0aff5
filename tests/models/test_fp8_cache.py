"""An FP8 cache over whole models: how far its logits are from those of a bfloat16 cache, and that it is used."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

from hadron import LLM, Selections
from hadron.cache.spec import FP8
from tests.conftest import DATA

#: of the largest logit, with the same routers' and indexers' choices. A latent's rounding to E4M3 is 2.6 % of it
#: (root mean square, uniform within half a step of 1/8 to 1/16), bfloat16's 0.2 %; several layers add up.
BOUND, BOUND_BF16 = 6e-2, 2e-2


@pytest.mark.parametrize("prefill", ["mqa", "dense_mha"])
@pytest.mark.parametrize("name", ["glm52-fp8-block", "glm53f-modelopt-nvfp4"])
def test_logits_are_near_those_of_other_caches(name: str, prefill: str) -> None:
    def load(kept: str) -> LLM:
        options = {"kernels": "reference", "dtype": "float32", "max_model_len": 128}
        return LLM(DATA / name, kv_cache_dtype=kept, mla_prefill=prefill, **options)  # type: ignore[arg-type]

    models = {kept: load(kept) for kept in ("fp32", "bf16", FP8)}
    goldens, worst = load_file(DATA / name / "goldens.safetensors"), {"bf16": 0.0, FP8: 0.0}
    for i in range(3):
        ids = goldens[f"prompt{i}.input_ids"].tolist()
        chosen = Selections()
        expected = models["fp32"].logits(ids, selections=chosen)
        chosen.imposed = True
        for kept in worst:
            found = models[kept].logits(ids, selections=chosen)
            worst[kept] = max(worst[kept], float(np.abs(found - expected).max() / np.abs(expected).max()))
    assert worst["bf16"] < worst[FP8] <= BOUND, worst
    assert worst["bf16"] <= BOUND_BF16, worst


def test_br56_auto_keeps_bfloat16_where_the_file_brings_no_scales_and_says_so() -> None:
    llm = LLM(DATA / "glm52-fp8-block", max_model_len=64, threads=1)
    assert llm.plan.memory.cache_dtype == "bfloat16"
    smaller = LLM(DATA / "glm52-fp8-block", max_model_len=64, threads=1, kv_cache_dtype=FP8)
    assert smaller.plan.memory.cache_dtype == FP8
    config = smaller.plan.config
    assert config is not None
    saved = len(config.layers) * (config.mla.kv_rank - 4)  # a byte an element, and a scale
    assert llm.plan.memory.cache_per_token - smaller.plan.memory.cache_per_token == saved
