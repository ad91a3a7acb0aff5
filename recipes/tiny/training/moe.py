"""Routed experts as one padded batched product.

Every expert gets the same number of slots, as many as the busiest needs; moving tokens to slots and back are gathers in
both directions, forward and backward, since each (token, choice) owns one slot. Padding tokens of a batch are spread
over the experts in turn, so that equal tokens do not fill one expert, and are not counted for the balance.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import TinyConfig
from .layers import MLP, swiglu_c


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, token_of_slot, slot_of_token):
        ctx.save_for_backward(slot_of_token)
        return x.index_select(0, token_of_slot)

    @staticmethod
    def backward(ctx, grad):
        (slots,) = ctx.saved_tensors
        return grad.index_select(0, slots.flatten()).view(*slots.shape, -1).sum(1), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, weights, token_of_slot, slot_of_token):
        rows = y.index_select(0, slot_of_token.flatten()).view(*slot_of_token.shape, -1)
        ctx.save_for_backward(rows, weights, token_of_slot, slot_of_token)
        return (rows * weights.to(y.dtype).unsqueeze(2)).sum(1)

    @staticmethod
    def backward(ctx, grad):
        rows, weights, token_of_slot, slot_of_token = ctx.saved_tensors
        grad = grad.contiguous()
        weight_of_slot = weights.new_zeros(token_of_slot.shape[0])
        weight_of_slot[slot_of_token.flatten()] = weights.flatten()
        grad_y = grad.index_select(0, token_of_slot).mul_(weight_of_slot.to(grad.dtype).unsqueeze(1))
        grad_weights = (rows * grad.unsqueeze(1)).sum(2, dtype=weights.dtype)
        return grad_y, grad_weights, None, None


class Router(nn.Module):
    """Sigmoid scores; the correction bias picks, the plain scores weigh."""

    def __init__(self, config: TinyConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(config.n_routed_experts, config.hidden_size) * config.hidden_size**-0.5)
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))
        self.top_k = config.num_experts_per_tok
        self.scale = config.routed_scaling_factor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Experts [T, k] and their weights [T, k] in float32."""
        scores = F.linear(x.float(), self.weight).sigmoid()
        chosen = (scores.detach() + self.e_score_correction_bias).topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, chosen)
        return chosen, weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.scale


class Experts(nn.Module):
    """Weights of all experts of a layer, gate and up stacked."""

    def __init__(self, config: TinyConfig):
        super().__init__()
        experts, hidden, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * inner, hidden) * hidden**-0.5)
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, inner) * inner**-0.5 / config.routed_scaling_factor)
        self.limit = config.swiglu_limit

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """`x` [T, H], experts and weights [T, k], tokens an expert [E]; the weighted sum [T, H]."""
        experts = self.gate_up_proj.shape[0]
        capacity = -(-int(counts.max()) // 32) * 32
        order = chosen.flatten().argsort(stable=True)
        first = counts.cumsum(0) - counts
        expert = chosen.flatten()[order]
        slot = expert * capacity + torch.arange(order.numel()) - first[expert]
        slot_of_token = torch.empty_like(order)
        slot_of_token[order] = slot
        token_of_slot = torch.zeros(experts * capacity, dtype=torch.long)
        token_of_slot[slot] = order // chosen.shape[1]
        slot_of_token = slot_of_token.view_as(chosen)

        rows = _Dispatch.apply(x, token_of_slot, slot_of_token).view(experts, capacity, -1)
        inner = swiglu_c(torch.bmm(rows, self.gate_up_proj.to(x.dtype).transpose(1, 2)), self.limit)
        out = torch.bmm(inner, self.down_proj.to(x.dtype).transpose(1, 2)).flatten(0, 1)
        return _Combine.apply(out, weights, token_of_slot, slot_of_token)


class MoE(nn.Module):
    """Routed and shared experts of a layer; counts what each expert was given for the balance."""

    def __init__(self, config: TinyConfig):
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_experts = MLP(
            config.hidden_size, config.moe_intermediate_size * config.n_shared_experts, config.swiglu_limit
        )
        self.load: Tensor | None = None

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """[T, H] to [T, H]; `padding` [T] marks rows whose result nobody reads."""
        chosen, weights = self.gate(x)
        experts = self.experts.gate_up_proj.shape[0]
        if padding is None:
            counts = self.load = torch.bincount(chosen.flatten(), minlength=experts)
        else:
            self.load = torch.bincount(chosen[~padding].flatten(), minlength=experts)
            turn = torch.arange(chosen.numel()).view_as(chosen) % experts
            chosen = torch.where(padding.unsqueeze(1), turn, chosen)
            counts = torch.bincount(chosen.flatten(), minlength=experts)
        return self.experts(x, chosen, weights, counts) + self.shared_experts(x)

    @torch.no_grad()
    def balance(self, step: float, load: Tensor) -> None:
        """Moves the correction bias by `step` towards experts that got less than the mean of `load` [E]."""
        self.gate.e_score_correction_bias += step * torch.sign(load.float().mean() - load.float())
