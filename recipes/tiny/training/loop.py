"""The training loop: one process a core, each with half of a step's tokens, gradients added between them.

Threads inside an operator wait for each other hundreds of times a step, which a machine shared with anything else
turns into most of the time; two processes wait once.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import state as states
from .batches import Batches
from .config import TinyConfig
from .model import TinyModel
from .objective import Weights, indexers, language, summary
from .optimizer import Optimizer
from .schedule import Schedule


@dataclass(frozen=True)
class Plan:
    """What a training needs beyond its model; stored in the state file, so that a resumed one has the same."""

    steps: int
    tokens: int = 1536  # a process and step
    processes: int = 2
    seed: int = 1
    dtype: str = "bfloat16"
    peak: float = 2e-3


class Trainer:
    """One process of a training."""

    def __init__(self, config: TinyConfig, plan: Plan, data: Path, pad: int, rank: int = 0):
        self.plan, self.rank = plan, rank
        self.schedule = Schedule(plan.steps, peak=plan.peak)
        self.dtype = getattr(torch, plan.dtype)
        torch.manual_seed(plan.seed)
        self.model = TinyModel(config)
        self.batches = Batches(data / "train.npz", plan.tokens, plan.seed, pad)
        self.optimizer = Optimizer(self.model, self.dtype)
        self.step_number = 0

    def resume(self, state: dict[str, Any]) -> None:
        """Takes weights, optimizer and step of `state`."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step_number = state["step"]

    def step(self) -> Tensor:
        """One step; returns its logged sums over all processes."""
        schedule, number = self.schedule, self.step_number
        stage = schedule.stage(number)
        batch = self.batches.draw(number, schedule.progress(number), self.rank)
        if stage == "B":
            outcome = indexers(self.model, batch, self.dtype)
        else:
            weights = Weights(mtp=schedule.mtp_weight(number), guide=schedule.guide_weight(number))
            outcome = language(self.model, batch, self.dtype, weights, stage == "C")
        outcome.loss.backward()
        sums = self._reduce(outcome.sums, balance=schedule.balance_step(number))
        self.optimizer.step(schedule.rate(number), schedule.indexer_rate(number))
        self.model.zero_grad(set_to_none=True)
        self.step_number += 1
        return sums

    @torch.no_grad()
    def _reduce(self, sums: Tensor, balance: float) -> Tensor:
        """Averages gradients over the processes in one message with loads and sums, clips, balances the experts."""
        learning = [p for p in self.model.parameters() if p.grad is not None]
        layers = self.model.moe_layers() if balance else []
        loads = [layer.load.float() for layer in layers]
        flat = torch.cat([*(p.grad.flatten() for p in learning), *loads, sums])
        if self.plan.processes > 1:
            dist.all_reduce(flat)
        *parts, sums = flat.split([*(p.numel() for p in learning), *(load.numel() for load in loads), sums.numel()])
        gradients = flat[: sum(p.numel() for p in learning)]
        gradients /= self.plan.processes
        norm = gradients.norm()
        gradients *= (1.0 / (norm + 1e-6)).clamp(max=1.0)
        for p, part in zip(learning, parts, strict=False):
            p.grad = part.view_as(p)
        for layer, load in zip(layers, parts[len(learning) :], strict=True):
            layer.balance(balance, load)
        return sums.clone()

    def run(self, out: Path, stop_after: float | None, log_every: int, save_every: int) -> bool:
        """Trains to the end or for `stop_after` seconds; True when all steps are done. Rank 0 writes."""
        began = last = time.monotonic()
        total, steps = None, 0
        while self.step_number < self.plan.steps:
            sums = self.step()
            total, steps = sums if total is None else total + sums, steps + 1
            now = time.monotonic()
            done = self.step_number
            if done % log_every == 0 or done == self.plan.steps:
                if self.rank == 0:
                    self._log(out, summary(total), steps / (now - last))
                last, total, steps = now, None, 0
            # All processes must leave at the same step: the clock of the first decides, at a step all know.
            stop = done % 5 == 0 and stop_after is not None and self._agree(now - began > stop_after)
            if self.rank == 0 and (stop or done % save_every == 0 or done == self.plan.steps):
                states.save(out / "state.pt", self.model, self.optimizer, done, vars(self.plan))
            if stop:
                break
        return self.step_number >= self.plan.steps

    def _agree(self, mine: bool) -> bool:
        if self.plan.processes == 1:
            return mine
        flag = torch.tensor(float(mine))
        dist.broadcast(flag, 0)
        return bool(flag)

    def _log(self, out: Path, means: dict[str, float], pace: float) -> None:
        number = self.step_number
        row = {
            "step": number,
            "stage": self.schedule.stage(number - 1),
            "lr": self.schedule.rate(number - 1),
            "tokens_per_second": round(pace * self.plan.tokens * self.plan.processes, 1),
            **means,
        }
        with (out / "log.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
