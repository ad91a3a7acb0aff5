"""Mixture of experts: banks whose members differ, the shared expert, the order of the sum."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hadron.kernels.reference.moe import moe
from hadron.layers.dimensions import MoeDimensions
from hadron.layers.moe import Moe
from hadron.quantization.scheme import BF16
from tests.kernels.formats import Array
from tests.kernels.held import Held, close, dense, mxfp4, nvfp4, product, swiglu

HIDDEN, WIDE, EXPERTS, TOP = 64, 32, 4, 2
DIMS = MoeDimensions(HIDDEN, EXPERTS, TOP, WIDE, WIDE, groups=1, topk_groups=1, normalize=True, scaling=2.5, limit=10.0)


def bank(rng: np.random.Generator, makers, shared) -> tuple[Held, list[list[Array]], Array]:  # type: ignore[no-untyped-def]
    """Experts made by `makers`, one each, then the shared one; and the router's weight."""
    weights, values = Held(), []
    places = [f"mlp.experts.{e}" for e in range(EXPERTS)] + ["mlp.shared_experts"]
    for place, make in zip(places, [*makers, shared], strict=True):
        triple = []
        for name, shape in (("gate_proj", (WIDE, HIDDEN)), ("up_proj", (WIDE, HIDDEN)), ("down_proj", (HIDDEN, WIDE))):
            weights.linears[f"{place}.{name}"], value = make(rng, shape)
            triple.append(value)
        values.append(triple)
    weights.linears["mlp.gate"], router = dense(rng, (EXPERTS, HIDDEN))
    weights.tensors["mlp.gate.e_score_correction_bias"] = torch.tensor([0.1, 0.0, 0.05, -0.1])
    return weights, values, router


def written_out(x: Array, values: list[list[Array]], router: Array, bias: Array) -> Array:
    """Each token by itself, in float64."""
    scores = 1 / (1 + np.exp(-(x.astype(np.float64) @ router.T)))
    out = np.zeros(x.shape)
    for t in range(len(x)):
        best = np.argsort(-(scores[t] + bias), kind="stable")[:TOP]
        total = scores[t][best].sum() + 1e-20
        for e in sorted(best):
            out[t] += 2.5 * scores[t][e] / total * swiglu(x[t : t + 1], *values[e], 10.0)[0]
        out[t] += swiglu(x[t : t + 1], *values[-1], 10.0)[0]
    return out


CASES = {
    "br10 mxfp4 experts, bf16 shared": ([mxfp4] * 4, dense),
    "br04 one expert of four left quantized": ([dense, dense, dense, mxfp4], dense),
    "br24 nvfp4 with global scales that differ": (
        [lambda r, shape, g=g: nvfp4(r, shape, g) for g in (1e-2, 1e-3, 4e-3, 2e-3)], mxfp4,
    ),
    "all dense": ([dense] * 4, dense),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_expert_by_its_own_scheme(case: str) -> None:
    rng = np.random.default_rng(0)
    weights, values, router = bank(rng, *CASES[case])
    x = rng.standard_normal((9, HIDDEN)).astype(np.float32)
    found = Moe("mlp", DIMS, weights)(torch.from_numpy(x))
    bias = weights.tensors["mlp.gate.e_score_correction_bias"].numpy()
    close(found, written_out(x, values, router, bias))


def test_one_token_as_in_a_batch() -> None:
    rng = np.random.default_rng(1)
    weights, _, _ = bank(rng, [mxfp4] * 4, dense)
    x = torch.from_numpy(rng.standard_normal((9, HIDDEN)).astype(np.float32))
    layer = Moe("mlp", DIMS, weights)
    together = layer(x)
    for t in range(9):
        close(layer(x[t : t + 1]), together[t : t + 1].double().numpy())


def test_experts_are_added_by_ascending_id_and_the_shared_one_last() -> None:
    """Values for which another order gives another float32: 1e8 swallows 1, unless it was taken back before."""
    amounts = [1e8, -1e8, 1.0]
    experts = [lambda x, a=a: torch.full_like(x, a) for a in amounts]
    x, one = torch.zeros(1, 4), torch.ones(1, 3)
    ids = torch.tensor([[2, 1, 0]])
    assert moe(x, ids, one, experts, None).tolist() == [[1.0] * 4]
    swapped = [experts[0], experts[2], experts[1]]
    assert moe(x, ids, one, swapped, None).tolist() == [[0.0] * 4]
    assert moe(x, ids[:, :2], one[:, :2], [experts[2], experts[0], experts[1]], experts[2]).tolist() == [[1.0] * 4]


def test_the_router_runs_in_float32_for_bf16_activations() -> None:
    """Two experts whose scores differ by less than bfloat16 can tell."""
    weights = Held()
    router = torch.zeros(2, 64)
    router[0, :2] = torch.tensor([1.0, 2.0**-8])
    router[1, :2] = torch.tensor([1.0, 2.0**-9])
    dims = MoeDimensions(64, 2, 1, 32, 0, groups=1, topk_groups=1, normalize=True, scaling=1.0, limit=None)
    weights.linears["mlp.gate"] = product(BF16, (2, 64), weight=router.bfloat16())
    weights.tensors["mlp.gate.e_score_correction_bias"] = torch.zeros(2)
    rng = np.random.default_rng(2)
    for e in range(2):
        for name, shape in (("gate_proj", (32, 64)), ("up_proj", (32, 64)), ("down_proj", (64, 32))):
            weights.linears[f"mlp.experts.{e}.{name}"] = dense(rng, shape)[0]
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    x[0, :2] = 1
    ids, _ = Moe("mlp", dims, weights).route(x)
    assert ids.tolist() == [[0]]
    ids, _ = Moe("mlp", dims, weights).route(-x)
    assert ids.tolist() == [[1]]
