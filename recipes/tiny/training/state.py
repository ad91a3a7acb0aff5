"""The state file a training resumes from."""

import os
from pathlib import Path
from typing import Any

import torch

from .config import TinyConfig, as_dict, from_dict
from .model import TinyModel
from .optimizer import Optimizer


def save(path: Path, model: TinyModel, optimizer: Optimizer, step: int, plan: dict[str, Any]) -> None:
    """Writes beside `path`, then replaces it at once, so that an interrupted write leaves the old state."""
    waiting = path.with_suffix(".new")
    torch.save(
        {
            "config": as_dict(model.config),
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": step,
            "plan": plan,
        },
        waiting,
    )
    os.replace(waiting, path)  # noqa: PTH105


def load(path: Path) -> dict[str, Any]:
    """The state, `config` as a TinyConfig."""
    state: dict[str, Any] = torch.load(path, weights_only=True)
    state["config"] = from_dict(state["config"])
    return state


def model_of(state: dict[str, Any]) -> TinyModel:
    """A model with the weights of `state`."""
    config: TinyConfig = state["config"]
    model = TinyModel(config)
    model.load_state_dict(state["model"])
    return model
