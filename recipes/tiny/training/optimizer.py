"""What moves the weights: Muon the matrices inside the layers, AdamW everything else, each at its own rate."""

from typing import Any

import torch
from torch import nn

from .model import TinyModel
from .muon import Muon

#: Rate of Muon over that of AdamW, whose step of every number is about its rate; Muon's have it as spectral norm.
MUON = 5.0
#: In the names of what is no matrix between activations: tables, gates, kernels; and the indexers, trained apart.
OUTSIDE = ("embed_tokens", "lm_head", ".indexer.", "_hc.", "conv1d", ".gate.weight")


def orthogonalised(name: str, p: nn.Parameter) -> bool:
    """Whether Muon moves a parameter: a matrix between activations that is not a few rows."""
    return p.dim() > 1 and min(p.shape[-2:]) >= 32 and not any(part in name for part in OUTSIDE)


class Optimizer:
    """Both optimizers as one, with one state."""

    def __init__(self, model: TinyModel, dtype: torch.dtype = torch.bfloat16):
        by_muon = [p for name, p in model.named_parameters() if orthogonalised(name, p)]
        mine = {id(p) for p in by_muon}
        rest = [p for p in model.trunk_parameters() if id(p) not in mine]
        self.adamw = torch.optim.AdamW(
            [
                {"params": [p for p in rest if p.dim() > 1], "weight_decay": 0.01},
                {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0},
                {"params": model.indexer_parameters(), "weight_decay": 0.0},
            ],
            betas=(0.9, 0.98),
            fused=True,
        )
        self.muon = Muon(by_muon, dtype)

    def step(self, rate: float, indexer_rate: float) -> None:
        """One step of all that has a gradient, the indexers at a rate of their own."""
        for group, lr in zip(self.adamw.param_groups, (rate, rate, indexer_rate), strict=True):
            group["lr"] = lr
        self.adamw.step()
        for group in self.muon.param_groups:
            group["lr"] = MUON * rate
        self.muon.step()

    def state_dict(self) -> dict[str, Any]:
        """The states of both."""
        return {"adamw": self.adamw.state_dict(), "muon": self.muon.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.adamw.load_state_dict(state["adamw"])
        self.muon.load_state_dict(state["muon"])
