"""The native backend against the reference backend, over scattered pages and whole steps."""

from __future__ import annotations

import pytest
import torch

from hadron.attention.backend import AttentionBackend, AttentionInput
from hadron.attention.cpu import CpuBackend
from hadron.attention.reference import ReferenceBackend
from hadron.batch import ForwardBatch, RequestStep, make_batch
from hadron.cache.blocks import BlockPool
from hadron.cache.manager import CacheManager
from hadron.cache.pages import Pages
from hadron.cache.spec import FP8, CacheSpec, LayerCache
from hadron.cache.states import States
from hadron.kernels.cpu import native
from hadron.kernels.ops import OPERATIONS
from hadron.kernels.provider import Provider
from hadron.kernels.reference.mla import encode_rows
from hadron.kernels.select import KernelChoice
from hadron.layers.dimensions import MlaDimensions
from hadron.layers.linear import Linear
from hadron.quantization.scheme import parse_scheme
from tests.kernels.test_native import random_weight

pytestmark = pytest.mark.skipif(
    not native.levels(), reason="this build has no native kernels: install with a C++ compiler to run these"
)

SIZES = MlaDimensions(
    hidden=1, heads=3, q_rank=1, kv_rank=40, nope=6, rope=4, v=5, latent_norm_eps=1e-5, rope_theta=1e4,
    rope_interleave=True, bias=False,
)  # fmt: skip
PAGE = 4


class Step:
    """Requests of which some tokens are cached and the rest are new; pages of different requests interleave."""

    def __init__(
        self, contexts: tuple[int, ...], queries: tuple[int, ...], dtype: torch.dtype, latents: str = ""
    ) -> None:
        g = torch.Generator().manual_seed(sum(contexts))
        layers = (LayerCache(), LayerCache(latent_width=SIZES.latent_width, rope_width=SIZES.rope))
        spec = CacheSpec(layers, 1, str(dtype)[6:], PAGE, latents or str(dtype)[6:])
        self.pages, states = Pages(spec, 64), States(spec, 8)
        rows = torch.randn(64 * PAGE, SIZES.latent_width, generator=g)
        stored = encode_rows(rows, SIZES.kv_rank) if latents == FP8 else rows
        self.pages.write_latents(1, torch.arange(len(rows)), stored)
        manager = CacheManager(spec, BlockPool(64, PAGE), self.pages, states)
        caches = [manager.admit() for _ in contexts]
        for length in range(1, max(c + q for c, q in zip(contexts, queries, strict=True)) + 1):
            for cache, context, count in zip(caches, contexts, queries, strict=True):
                manager.grow(cache, min(length, context + count))
        for cache, context in zip(caches, contexts, strict=True):
            states.advance([cache.state_slot], [context])
            manager.commit([cache], [[0] * context])
        self.batch: ForwardBatch = make_batch(
            [RequestStep(cache, [0] * n) for cache, n in zip(caches, queries, strict=True)], self.pages, states
        )
        self.query = torch.randn(self.batch.tokens, SIZES.heads, SIZES.nope + SIZES.rope, generator=g).to(dtype)
        positions = torch.arange(int(self.batch.positions.max()) + 1)
        every = torch.where(positions <= self.batch.positions.unsqueeze(1), positions, -1)
        self.everything = every
        some = torch.where(torch.rand(every.shape, generator=g) < 0.6, every, -1)
        last = torch.iinfo(torch.int64).max
        ordered = torch.where(some < 0, last, some).sort(dim=1).values
        self.selection = torch.where(ordered == last, -1, ordered)
        weight = random_weight(parse_scheme("mxfp4"), SIZES.heads * (SIZES.nope + SIZES.v), SIZES.kv_rank)
        assert weight.scale is not None
        weight.scale[:] = 122  # scores of a few units
        self.kv_b = Linear(weight, KernelChoice("linear", "reference", "hadron.kernels.reference.linear.bind"))

    def attend(self, backend: AttentionBackend, *, everything: bool = False) -> torch.Tensor:
        metadata = backend.build_metadata(self.batch)
        assert (metadata.prefill is not None) == (backend.prefill_path == "dense_mha" and metadata.num_prefills > 0)
        expansion = backend.bind_expansion(self.kv_b, SIZES)()
        selection = self.everything if everything else self.selection
        return backend.attend(AttentionInput(1, self.query, selection, expansion), metadata, self.pages)


STEPS = [((9, 0), (1, 6)), ((3, 6, 0, 2), (1, 1, 8, 5)), ((11,), (1,)), ((0,), (13,)), ((70, 3, 20), (1, 1, 40))]


@pytest.mark.parametrize("latents", ["", FP8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("path", ["mqa", "dense_mha"])
@pytest.mark.parametrize(("contexts", "queries"), STEPS)
def test_mixed_batches_equal_the_reference(
    contexts: tuple[int, ...], queries: tuple[int, ...], path: str, dtype: torch.dtype, latents: str
) -> None:
    step = Step(contexts, queries, dtype, latents)
    everything = path == "dense_mha"
    found = step.attend(CpuBackend(path, selection_budget=100), everything=everything)
    expected = step.attend(ReferenceBackend(path, selection_budget=100), everything=everything)
    assert found.dtype == dtype and found.shape == expected.shape
    bound = OPERATIONS["mla"].tolerance * float(expected.float().abs().max())
    assert float((found.float() - expected.float()).abs().max()) <= bound


def test_threads_are_the_providers_and_change_no_bit() -> None:
    step = Step((70, 3, 20), (1, 1, 40), torch.bfloat16)
    one, three = (step.attend(CpuBackend("mqa", selection_budget=100, kernels=Provider(threads=n))) for n in (1, 3))
    assert torch.equal(one, three)


def test_the_projection_is_bound_once_and_stays_as_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step((11,), (2,), torch.bfloat16)
    backend = CpuBackend("mqa", selection_budget=100)
    bound = backend.bind_expansion(step.kv_b, SIZES)
    monkeypatch.setattr(Linear, "dequantized", lambda self: pytest.fail("the projection was dequantized"))
    assert bound() is bound()
    step.attend(backend)


def test_a_block_outside_the_cache_is_refused() -> None:
    step = Step((11,), (2,), torch.bfloat16)
    step.batch.block_tables[0, 1] = 64
    with pytest.raises(IndexError, match="block outside 0"):
        step.attend(CpuBackend("mqa", selection_budget=100))
