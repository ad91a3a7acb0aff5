"""Every tensor that a run on reference kernels makes is put on a device by name.

A machine without a GPU cannot see a tensor that was left on the CPU by default; this can. The runs on a
GPU itself carry the marker `gpu`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from hadron import LLM, SamplingParams
from tests.conftest import DATA

FACTORIES = frozenset({"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros"})


class Factories(TorchFunctionMode):
    """Counts calls that make a tensor, and names those that leave its device to the default."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.without_device: set[str] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if (name := getattr(func, "__name__", "")) in FACTORIES:
            self.calls += 1
            if named.get("device") is None:
                self.without_device.add(name)
        return func(*args, **named)


@pytest.mark.parametrize("activations", ["none", "declared"])
@pytest.mark.parametrize("prefill", ["mqa", "dense_mha"])
@pytest.mark.parametrize("name", ["glm52-fp8-block", "glm53f-quark-mxfp4-blockfp8"])
def test_no_tensor_is_left_on_the_default_device(name: str, prefill: str, activations: str) -> None:
    with Factories() as made:
        llm = LLM(
            DATA / name, kernels="reference", dtype="bfloat16", max_num_batched_tokens=16, mla_prefill=prefill,
            activation_quantization=activations,
        )  # fmt: skip
        ids = list(range(1, 40))
        llm.generate([{"prompt_token_ids": ids}], SamplingParams(max_tokens=4, temperature=0.7, seed=1, logprobs=2))
        llm.logits(ids)
    assert made.calls > 100 and not made.without_device


def test_the_count_sees_a_default() -> None:
    with Factories() as made:
        torch.zeros(2)
        torch.zeros(2, device="cpu")
    assert made.calls == 2 and made.without_device == {"zeros"}
