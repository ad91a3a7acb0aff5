"""Muon: momentum whose update is made orthogonal, for the matrices inside the layers.

Every singular value of an update becomes about one, so that directions which gradients seldom take are learned as fast
as common ones (Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024). torch.optim.Muon takes
one matrix at a time and no stacks of experts; here those of one shape are done together, by each process a part.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

#: Coefficients of the quintic iteration: they send singular values from 0.01 to 1 to about 0.7 to 1.2 in five rounds.
_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonal(x: Tensor, dtype: torch.dtype = torch.bfloat16, rounds: int = 5) -> Tensor:
    """Matrices [N, rows, columns] with the singular vectors of `x` and all singular values about 1, in `dtype`."""
    tall = x.shape[1] > x.shape[2]
    y = (x.transpose(1, 2) if tall else x).to(dtype)
    y = y / (y.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(rounds):
        square = torch.bmm(y, y.transpose(1, 2))
        y = torch.baddbmm(y, torch.baddbmm(square, square, square, beta=_B, alpha=_C), y, beta=_A)
    return y.transpose(1, 2) if tall else y


class Muon(torch.optim.Optimizer):
    """Steps of spectral norm `lr` (tall matrices: times the root of rows over columns) along the momentum.

    Every parameter must have a gradient at every step, or none of them, the same in all processes.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        dtype: torch.dtype = torch.bfloat16,  # of the arithmetic
        momentum: float = 0.95,
        weight_decay: float = 0.01,
    ):
        super().__init__(params, {"lr": 0.0, "momentum": momentum, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            shapes: dict[tuple[int, ...], list[nn.Parameter]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(tuple(p.shape[-2:]), []).append(p)
            stacks = [
                torch.cat([self._momentum(p, group["momentum"]).reshape(-1, *shape) for p in alike])
                for shape, alike in shapes.items()
            ]
            for alike, updates in zip(shapes.values(), shared(stacks, self.dtype), strict=True):
                rows, columns = updates.shape[1:]
                size = group["lr"] * max(1.0, rows / columns) ** 0.5
                for p, update in zip(alike, updates.split([p.numel() // (rows * columns) for p in alike]), strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update.view_as(p), alpha=size)

    def _momentum(self, p: nn.Parameter, beta: float) -> Tensor:
        """Nesterov's look ahead along the running mean of gradients."""
        state = self.state[p]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(p)
        mean: Tensor = state["momentum"].lerp_(p.grad, 1 - beta)
        return p.grad.lerp(mean, beta)


def shared(stacks: list[Tensor], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """`orthogonal` of each stack; with several processes each does a part of it, and they exchange them."""
    if not stacks or not dist.is_initialized():
        return [orthogonal(stack, dtype) for stack in stacks]
    rank, processes = dist.get_rank(), dist.get_world_size()
    results = [torch.zeros_like(stack, dtype=dtype) for stack in stacks]
    for stack, result in zip(stacks, results, strict=True):
        if rank < len(stack):
            result[rank::processes] = orthogonal(stack[rank::processes], dtype)
    flat = torch.cat([result.flatten() for result in results])
    dist.all_reduce(flat)
    parts = flat.split([result.numel() for result in results])
    return [part.view_as(result) for part, result in zip(parts, results, strict=True)]
