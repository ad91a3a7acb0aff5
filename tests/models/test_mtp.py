"""The multi-token-prediction layer against goldens made of transformers' own modules.

Through the planned checkpoint: draft step 0 over the whole prompt, then three more, with a fresh selection each and
with the first one's (`index_share_for_mtp_iteration`); from the goldens' hidden states and from the target's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file as save_tensors

from hadron.batch import RequestStep, make_batch
from hadron.cache.blocks import BlockPool
from hadron.cache.manager import CacheManager
from hadron.cache.pages import Pages
from hadron.cache.spec import cache_spec
from hadron.cache.states import States
from hadron.engine.build import Built, build_models
from hadron.engine.config import EngineConfig
from hadron.preflight.build import make_plan
from tests.conftest import DATA, checkpoints_root

GOLDENS = "goldens_mtp.safetensors"
LIMIT = 1e-4  # of the largest logit
STEPS = 4


class Layer:
    """The layer of a checkpoint with caches that hold NaN wherever nothing was written."""

    def __init__(self, folder: Path, **options: Any) -> None:
        settings: dict[str, Any] = {"kernels": "reference", "dtype": "float32", "threads": 1} | options
        config = EngineConfig(speculative_config={"method": "mtp", "num_speculative_tokens": STEPS}, **settings)
        plan = make_plan(
            folder, kernels=config.kernels, dtype=config.dtype, num_speculative_tokens=config.num_speculative_tokens
        )
        self.built: Built = build_models(plan, config)
        assert plan.config is not None and self.built.mtp is not None
        self.mtp = self.built.mtp
        self.spec = cache_spec(plan.config, dtype=config.dtype, drafting=True)
        self.pages, self.states = Pages(self.spec, 16), States(self.spec, 4)
        for tensor in (*self.pages.latents, *self.pages.index_keys):
            if tensor is not None:
                tensor.fill_(float("nan"))
        self.manager = CacheManager(self.spec, BlockPool(16, self.spec.page_size), self.pages, self.states)

    def rows(
        self, cache: Any, start: int, ids: list[int], hidden: torch.Tensor, selection: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the layer makes of rows from `start` on, and the selection it used."""
        self.manager.grow(cache, start + len(ids))
        with torch.inference_mode():
            batch = make_batch([RequestStep(cache, ids, start=start)], self.pages, self.states)
            return self.mtp.forward(batch, hidden, selection)

    def logits(self, hidden: torch.Tensor) -> np.ndarray[Any, Any]:
        with torch.inference_mode():
            return self.mtp.head(hidden).values.numpy()

    def target(self, ids: list[int]) -> torch.Tensor:
        """The target's hidden states."""
        cache = self.manager.admit()
        self.manager.grow(cache, len(ids))
        with torch.inference_mode():
            hidden = self.built.model.forward(make_batch([RequestStep(cache, ids)], self.pages, self.states))
        self.manager.commit([cache], [ids])
        self.manager.release(cache)
        return hidden


def distance(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def folders() -> list[Path]:
    """Those that ship with the tests, and those of the full set where it is there."""
    root = checkpoints_root()
    full = [] if root is None else sorted(path.parent for path in root.glob(f"*/{GOLDENS}"))
    small = [path.parent for path in DATA.glob(f"*/{GOLDENS}")]
    return sorted(small) + [path for path in full if path.name not in {own.name for own in small}]


@pytest.fixture(scope="module", params=folders(), ids=lambda path: path.name)
def checked(request: pytest.FixtureRequest) -> tuple[Layer, dict[str, np.ndarray[Any, Any]]]:
    folder: Path = request.param
    return Layer(folder), load_file(folder / GOLDENS) | load_file(folder / "goldens.safetensors")


@pytest.mark.parametrize("chunks", [[1000], [3, 1, 9, 1000]], ids=["whole", "pieces"])
@pytest.mark.parametrize("prompt", range(3))
def test_br45_br46_the_layer_equals_its_definition(
    checked: tuple[Layer, dict[str, np.ndarray[Any, Any]]], prompt: int, chunks: list[int]
) -> None:
    """A selection of its own, and the normed state handed on from guess to guess."""
    layer, goldens = checked
    key = f"prompt{prompt}."
    ids = goldens[key + "mtp_input_ids"].tolist()
    hidden = torch.from_numpy(goldens[key + "target_hidden"])
    for shared in (False, True):
        drafts = key + ("shared_topk." if shared else "")
        cache, start, top = layer.manager.admit(), 0, []
        for size in chunks:
            part = ids[start : start + size]
            if part:
                m, selection = layer.rows(cache, start, part, hidden[start : start + size])
                top += layer.logits(m).argmax(-1).tolist()
                start += len(part)
        if not shared:
            assert distance(layer.logits(m[-1:])[0], goldens[key + "prefill_last_logits"]) <= LIMIT
            last = selection[-1][selection[-1] >= 0].tolist()
            assert last == goldens[key + "step0_selection"].tolist()
            unsafe = np.flatnonzero(np.array(top) != goldens[key + "prefill_argmax"])
            assert len(unsafe) <= len(ids) // 20, "rows that hang by a thread are few"
        m, fixed = m[-1:], selection[-1:] if shared else None
        found = [layer.logits(m)[0]]
        for k in range(1, STEPS):
            token = int(goldens[drafts + "draft_tokens"][k - 1])
            m, _ = layer.rows(cache, len(ids) - 1 + k, [token], m, fixed)
            found.append(layer.logits(m)[0])
        assert distance(np.stack(found), goldens[drafts + "draft_logits"]) <= LIMIT
        assert np.stack(found).argmax(-1).tolist() == goldens[drafts + "draft_tokens"].tolist()
        layer.manager.release(cache)


@pytest.mark.parametrize("prompt", range(3))
def test_the_targets_hidden_state_is_what_the_layer_was_made_for(
    checked: tuple[Layer, dict[str, np.ndarray[Any, Any]]], prompt: int
) -> None:
    """After the final norm; for streams after their mean."""
    layer, goldens = checked
    key = f"prompt{prompt}."
    found = layer.target(goldens[key + "input_ids"].tolist()).numpy()
    assert distance(found, goldens[key + "target_hidden"]) <= LIMIT


def test_br42_a_stored_embedding_and_head_are_used(tmp_path: Path) -> None:
    """Twice the target's head gives twice the logits, another order of the embedding other guesses."""
    source, prefix = DATA / "glm52-fp8-block", "model.layers.5."
    tensors = load_tensors(source / "model.safetensors")
    shared = Layer(source)
    tensors[prefix + "shared_head.head.weight"] = 2 * tensors["lm_head.weight"]
    tensors[prefix + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_tensors(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    own = Layer(tmp_path)
    assert own.mtp.embed_tokens is not own.built.model.embed_tokens
    assert (
        shared.mtp.embed_tokens is shared.built.model.embed_tokens and shared.mtp.lm_head is shared.built.model.lm_head
    )
    hidden = torch.randn(4, own.built.model.embed_tokens.weight.shape[1], generator=torch.Generator().manual_seed(1))
    vocabulary = own.mtp.embed_tokens.vocabulary
    ids = [3, 200, 17, 90]
    flipped, _ = own.rows(own.manager.admit(), 0, [vocabulary - 1 - i for i in ids], hidden)
    expected, _ = shared.rows(shared.manager.admit(), 0, ids, hidden)
    assert torch.equal(flipped, expected)
    assert np.array_equal(own.logits(flipped), 2 * shared.logits(expected))


@pytest.mark.parametrize("name", ["glm52-quark-mxfp4-attnptpc", "glm53f-quark-mxfp4-blockfp8"])
def test_native_kernels_stay_near_the_definition(name: str) -> None:
    """With activations rounded to bfloat16, of rows whose choices hang by no thread most guess the same."""
    goldens = load_file(DATA / name / GOLDENS)
    layer = Layer(DATA / name, kernels="auto", dtype="bfloat16")
    same = total = 0
    for prompt in range(3):
        key = f"prompt{prompt}."
        ids = goldens[key + "mtp_input_ids"].tolist()
        m, _ = layer.rows(layer.manager.admit(), 0, ids, torch.from_numpy(goldens[key + "target_hidden"]).bfloat16())
        same += int((layer.logits(m).argmax(-1) == goldens[key + "prefill_argmax"]).sum())
        total += len(ids)
    assert same > 0.8 * total, f"{same} of {total}"
