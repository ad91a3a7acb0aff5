"""The promise on bits: on the native kernels the logits of a position depend on the tokens up to it, and on
nothing else, to the last bit. One checkpoint of each family and of each kind of scheme, with an indexer that
leaves positions out; and, where the full set is at hand, every scheme that a quantizer wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hadron.engine.build import build_model
from hadron.engine.config import EngineConfig
from hadron.kernels.cpu import native
from hadron.kernels.select import KernelChoice, select
from hadron.models.language_model import LanguageModel
from hadron.preflight.build import make_plan
from tests.conftest import DATA, checkpoint_names
from tests.tiny.oracle import Run, tokens

#: of a layer or between layers; `quantize` is asked for apart
OPERATIONS = (
    "linear", "mlp", "moe", "router", "mla", "indexer", "kda", "hyper_connection", "norm", "rope", "embedding",
    "lm_head",
)  # fmt: skip
NATIVE = all(isinstance(c := select(o, providers=("cpu",)), KernelChoice) and c.provider == "cpu" for o in OPERATIONS)
pytestmark = pytest.mark.skipif(
    not NATIVE, reason="this build has no native kernels: install with a C++ compiler to run these"
)

CHECKPOINTS = sorted(path.parent.name for path in DATA.glob("*/goldens.safetensors"))
LENGTH = 45


class Model:
    """A checkpoint's model, the tokens it is given and their logits, all in one pass."""

    def __init__(self, name: str, folder: Path = DATA, **options: Any) -> None:
        self.config = EngineConfig(**{"threads": 2, **options})
        self.plan = make_plan(folder / name, dtype=self.config.dtype, kv_cache_dtype=self.config.kv_cache_dtype)
        assert self.plan.attention.backend == "cpu" and self.plan.config is not None
        self.model: LanguageModel = build_model(self.plan, self.config)
        self.ids = tokens(LENGTH, vocabulary=self.plan.config.vocabulary)
        assert self.plan.config.indexer.topk < LENGTH, "nothing is left out"
        self.whole = self.run().logits(self.ids)

    def run(self) -> Run:
        return Run(self.model, self.plan.config, latents=self.plan.memory.cache_dtype)


@pytest.fixture(scope="module", params=CHECKPOINTS)
def model(request: pytest.FixtureRequest) -> Model:
    return Model(request.param)


def test_a_pass_repeats_itself_and_is_finite(model: Model) -> None:
    assert bool(torch.isfinite(model.whole).all())
    assert torch.equal(model.run().logits(model.ids), model.whole)


def test_token_by_token(model: Model) -> None:
    assert torch.equal(model.run().logits(model.ids, [1] * LENGTH), model.whole)


@pytest.mark.parametrize("chunks", [[7, 1, 13, 3, 21], [33, 2, 10], [16, 16, 13]])
def test_odd_chunks(model: Model, chunks: list[int]) -> None:
    assert torch.equal(model.run().logits(model.ids, chunks), model.whole)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
def test_a_few_tokens_on_top_of_a_prefix(model: Model, count: int) -> None:
    assert torch.equal(model.run().logits(model.ids, [LENGTH - count, count]), model.whole)


def test_whoever_shares_the_step(model: Model) -> None:
    """Decodes and prefills of others, before and behind."""
    run, other = model.run(), tokens(40, 1, model.plan.config.vocabulary)  # type: ignore[union-attr]
    ours, first, second = (run.manager.admit() for _ in range(3))
    run.step((first, other[:9]))
    rows = run.step((first, other[9:10]), (second, other[:17]), (ours, model.ids[:30]))[2:]
    rows += run.step((first, other[10:11]), (ours, model.ids[30:31]), (second, other[17:30]))[1:2]
    rows += run.step((ours, model.ids[31:]))
    assert torch.equal(torch.cat(rows), model.whole)


def test_every_product_of_an_indexer_gives_a_row_the_same_bits_alone(model: Model) -> None:
    """The pooling gate too, which is a parameter and no matrix of a linear layer for who wrote the file."""
    indexers = [layer.self_attn.indexer for layer in model.model.layers if hasattr(layer.self_attn, "indexer")]  # type: ignore[attr-defined]
    x = torch.randn(9, model.plan.config.hidden, generator=torch.Generator().manual_seed(2))  # type: ignore[union-attr]
    for product in (product for indexer in indexers if indexer is not None for product in indexer.of_input):
        whole = product(x)
        for rows in (1, 2, 5):
            assert torch.equal(torch.cat([product(part) for part in x.split(rows)]), whole)


@pytest.mark.parametrize("name", checkpoint_names())
def test_every_checkpoint_of_the_full_set(name: str, checkpoints: Path) -> None:
    model = Model(name, checkpoints)
    for chunks in ([1] * LENGTH, [7, 1, 13, 3, 21], *([LENGTH - count, count] for count in range(2, 7))):
        assert torch.equal(model.run().logits(model.ids, chunks), model.whole), chunks


@pytest.mark.parametrize("threads", [1, 3, 4])
@pytest.mark.parametrize("name", ["glm52-quark-mxfp4-attnptpc", "glm53f-quark-mxfp4-blockfp8"])
def test_any_number_of_threads(name: str, threads: int) -> None:
    assert torch.equal(Model(name, threads=threads).whole, Model(name, threads=2).whole)


@pytest.mark.parametrize("level", native.levels())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["glm52-fp8-block", "glm53f-modelopt-nvfp4"])
def test_every_level_and_dtype(name: str, dtype: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.ENVIRONMENT, level)
    model = Model(name, dtype=dtype)
    for chunks in ([1] * LENGTH, [41, 4], [7, 1, 13, 3, 21]):
        assert torch.equal(model.run().logits(model.ids, chunks), model.whole), chunks


@pytest.mark.parametrize("level", native.levels())
@pytest.mark.parametrize("name", ["glm52-fp8-block", "glm53f-modelopt-nvfp4"])
def test_an_fp8_cache_at_every_level(name: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are quantized when they are written, by themselves, and read back so also in the step that wrote them."""
    monkeypatch.setenv(native.ENVIRONMENT, level)
    model = Model(name, kv_cache_dtype="fp8_e4m3")
    for chunks in ([1] * LENGTH, [41, 4], [7, 1, 13, 3, 21]):
        assert torch.equal(model.run().logits(model.ids, chunks), model.whole), chunks
    run, other = model.run(), tokens(40, 1, model.plan.config.vocabulary)  # type: ignore[union-attr]
    ours, first = run.manager.admit(), run.manager.admit()
    rows = run.step((first, other[:17]), (ours, model.ids[:30]))[1:]
    rows += run.step((first, other[17:18]), (ours, model.ids[30:]))[1:]
    assert torch.equal(torch.cat(rows), model.whole), "whoever shares the step"


@pytest.mark.parametrize("name", ["glm52-fp8-block", "glm53f-modelopt-nvfp4"])
def test_an_fp8_cache_on_other_numbers_of_threads(name: str) -> None:
    whole = Model(name, kv_cache_dtype="fp8_e4m3").whole
    for threads in (1, 3):
        assert torch.equal(Model(name, kv_cache_dtype="fp8_e4m3", threads=threads).whole, whole)
    assert not torch.equal(Model(name).whole, whole), "the cache was no FP8 cache"
