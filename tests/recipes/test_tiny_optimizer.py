"""The small models' optimizer: Muon is what torch calls Muon, shared among processes, and moves only what it should."""

from __future__ import annotations

import os

os.environ["TINY_COMPILE"] = os.environ["TINY_NATIVE"] = "0"  # read when the modules below are imported

import pytest
import torch
from torch import nn

from recipes.tiny.training import muon
from recipes.tiny.training.config import FLASH, GLM52, TinyConfig
from recipes.tiny.training.model import TinyModel
from recipes.tiny.training.optimizer import Optimizer, orthogonalised


@pytest.mark.parametrize("shape", [(96, 64), (64, 96), (64, 64)])
def test_singular_values_become_one_and_vectors_stay(shape: tuple[int, int]) -> None:
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    got = muon.orthogonal(x).float()
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    turned = u.mT @ got @ v.mT
    values = turned.diagonal(dim1=1, dim2=2)[s / s.amax(1, keepdim=True) > 0.05]  # smaller ones take more rounds
    assert values.min() > 0.6 and values.max() < 1.3
    assert (turned - torch.diag_embed(turned.diagonal(dim1=1, dim2=2))).abs().max() < 0.05  # bfloat16


def test_steps_are_those_of_torch() -> None:
    torch.manual_seed(2)
    mine = [nn.Parameter(torch.randn(shape)) for shape in ((96, 64), (64, 96), (2, 64, 96))]
    flat = [part for p in mine for part in (p.detach().clone().unbind(0) if p.dim() == 3 else (p.detach().clone(),))]
    theirs = [nn.Parameter(part.clone()) for part in flat]
    ours = muon.Muon(mine)
    ours.param_groups[0]["lr"] = 0.02
    stock = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.01, momentum=0.95, adjust_lr_fn="original")
    for _ in range(3):
        gradients = [torch.randn_like(p) for p in mine]
        parts = [part for g in gradients for part in (g.unbind(0) if g.dim() == 3 else (g,))]
        for parameters, values in ((mine, gradients), (theirs, parts)):
            for p, value in zip(parameters, values, strict=True):
                p.grad = value.clone()
        ours.step()
        stock.step()
    moved = [part for p in mine for part in (p.unbind(0) if p.dim() == 3 else (p,))]
    for a, b, start in zip(moved, theirs, flat, strict=True):
        assert (a - b).norm() < 0.02 * (b - start).norm()


def test_processes_share_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    stacks = [torch.randn(count, 64, 32, generator=torch.Generator().manual_seed(count)) for count in (5, 1)]
    alone = muon.shared(stacks)
    sent = []
    monkeypatch.setattr(muon.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(muon.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(muon.dist, "all_reduce", lambda flat: sent.append(flat.clone()))
    for rank in range(2):
        monkeypatch.setattr(muon.dist, "get_rank", lambda rank=rank: rank)
        muon.shared(stacks)
    assert torch.allclose(sent[0] + sent[1], torch.cat([stack.flatten() for stack in alone]), atol=0.02)
    assert not (sent[0] * sent[1]).any()
    assert muon.shared([]) == []  # the stage in which only the indexers learn


@pytest.mark.parametrize("config", [FLASH, GLM52], ids=["flash", "glm52"])
def test_muon_moves_the_matrices_inside_the_layers(config: TinyConfig) -> None:
    model = TinyModel(config)
    moved = {name for name, p in model.named_parameters() if orthogonalised(name, p)}
    assert {"layers.3.self_attn.kv_b_proj.weight", "layers.3.mlp.experts.gate_up_proj", "mtp.eh_proj.weight"} <= moved
    outside = ("embed_tokens", "lm_head", "norm", "indexer", "_hc", "conv1d", "gate.weight", "b_proj.weight", "A_log")
    assert not [name for name in moved if any(part in name.replace("_b_proj", "") for part in outside)]
    groups = [*Optimizer(model).adamw.param_groups, *Optimizer(model).muon.param_groups]
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
