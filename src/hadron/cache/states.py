"""Tensors of what a sequence keeps beside its pages: KDA matrices, convolution windows, the open pool.

A slot holds one sequence's state in all layers, with the number of tokens it has seen. Snapshots are
slots too. KDA matrices and the open pool's keys and gates are float32 whatever the model's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hadron.cache.pages import load_rows
from hadron.cache.spec import CacheSpec


class States:
    """`slots` states for each layer of `spec`, on `device`.

    kda[layer]: float32 [slots, heads, head_dim (key), head_dim (value)]. conv[layer]: [slots, channels,
    kernel - 1], the last inputs of q, k and v in that order, oldest first. tails[layer]: float32
    [slots, 2, pool - 1, index_width], keys then gates of the open pool, row = position modulo pool.
    None where a layer keeps none.
    """

    def __init__(self, spec: CacheSpec, slots: int, device: torch.device | str = "cpu") -> None:
        self.spec = spec
        self.slots = slots
        dtype: torch.dtype = getattr(torch, spec.dtype)
        zeros = torch.zeros
        self.kda = [
            zeros(slots, layer.kda[0], layer.kda[1], layer.kda[1], device=device) if layer.kda else None
            for layer in spec.layers
        ]
        self.conv = [
            zeros(slots, *layer.conv, dtype=dtype, device=device) if layer.conv else None for layer in spec.layers
        ]
        self.tails = [
            zeros(slots, 2, layer.tail_rows, layer.index_width, device=device) if layer.tail_rows else None
            for layer in spec.layers
        ]
        self._stamps = [0] * slots

    def stamp(self, slot: int) -> int:
        """Tokens the state in `slot` has seen."""
        return self._stamps[self._checked(slot)]

    def stamps(self, slots: Sequence[int]) -> tuple[int, ...]:
        """`stamp` of each."""
        self._check(slots)
        return tuple([self._stamps[slot] for slot in slots])

    def advance(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Stamp each slot with the tokens its sequence has now; called once a forward pass, at its end."""
        self._check(slots)
        for slot, count in zip(slots, tokens, strict=True):
            self._stamps[slot] = count

    def reset(self, slot: int, tokens: int) -> None:
        """Zero the state in `slot` and stamp it."""
        self._checked(slot)
        for tensor in self._tensors():
            tensor[slot] = 0
        self._stamps[slot] = tokens

    def copy(self, source: int, target: int) -> None:
        """Copy state and stamp."""
        self._checked(source)
        self._checked(target)
        for tensor in self._tensors():
            tensor[target] = tensor[source]
        self._stamps[target] = self._stamps[source]

    def dump(self, slot: int) -> bytes:
        """The state in `slot` in all layers, as bytes in this machine's order; the stamp is not among them."""
        parts = [tensor[self._checked(slot)].contiguous().view(torch.uint8) for tensor in self._tensors()]
        return b"".join(part.cpu().numpy().tobytes() for part in parts)

    def load(self, slot: int, data: bytes, tokens: int) -> None:
        """Fill `slot` with what `dump` of an equal layout gave, and stamp it; `ValueError` for another length."""
        load_rows([tensor[self._checked(slot)] for tensor in self._tensors()], data)
        self._stamps[slot] = tokens

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for tensor in (*self.kda, *self.conv, *self.tails) if tensor is not None]

    def _check(self, slots: Sequence[int]) -> None:
        if slots:
            self._checked(min(slots))
            self._checked(max(slots))

    def _checked(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise IndexError(f"state slot {slot} is not one of {self.slots}")
        return slot
