"""Tensors of latent rows and indexer keys, in pages shared by every layer's block numbers.

A slot is `block * page_size + offset`; an indexer row of a pool lies at the slot of its tokens divided
by the pool size. Block and slot numbers outside the cache raise, negative ones too: torch would wrap
them around. FP8 rows are bytes here: who writes and reads them (`attention`) knows how they are made up.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from hadron.cache.spec import FP8, CacheSpec


def written_blocks(
    tables: Sequence[array[int]], starts: Sequence[int], ends: Sequence[int], page_size: int, blocks: int
) -> list[int]:
    """The blocks of positions starts[i] .. ends[i]-1 of every sequence i, one after another; `IndexError` for a
    position outside its table and for a block outside the cache."""
    written: list[int] = []
    for table, start, end in zip(tables, starts, ends, strict=True):
        if not 0 <= start < end <= len(table) * page_size:
            raise IndexError(
                f"positions {start} to {end - 1} lie outside a table of {len(table)} pages of {page_size} tokens"
            )
        first, last = start // page_size, (end - 1) // page_size
        if first == last:
            written.append(table[first])
        else:
            written += table[first : last + 1]
    if min(written) < 0 or max(written) >= blocks:
        wrong = next(block for block in written if not 0 <= block < blocks)
        raise IndexError(f"a table holds block {wrong}: the cache has {blocks} blocks")
    return written


def load_rows(targets: Sequence[torch.Tensor], data: bytes) -> None:
    """Copy bytes into tensors, one after another; `ValueError`, and nothing is written, for another length."""
    sizes = [target.nbytes for target in targets]
    if sum(sizes) != len(data):
        raise ValueError(f"{len(data)} bytes for {sum(sizes)}")
    start = 0
    for target, size in zip(targets, sizes, strict=True):
        part = torch.frombuffer(bytearray(data[start : start + size]), dtype=target.dtype)
        target.copy_(part.view(target.shape))
        start += size


class Pages:
    """`blocks` pages for each layer of `spec`, on `device`.

    latents[layer]: [blocks, page_size, latent_width] in the dtype of the spec's latents, for FP8 uint8 [blocks,
    page_size, bytes of a row]; index_keys[layer]: [blocks, page_size / pool, index_width] in the spec's dtype.
    None where a layer keeps none.
    """

    def __init__(self, spec: CacheSpec, blocks: int, device: torch.device | str = "cpu") -> None:
        self.spec = spec
        self.blocks = blocks
        self.page_size = spec.page_size
        self.pool = spec.pool
        self.device = torch.device(device)
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        fp8 = spec.latents == FP8
        kept: torch.dtype = torch.uint8 if fp8 else getattr(torch, spec.latents)

        def rows(per_page: int, width: int, dtype: torch.dtype) -> torch.Tensor | None:
            # Not zeroed: a page that was never written must not cost memory.
            return torch.empty(blocks, per_page, width, dtype=dtype, device=device) if width else None

        self.latents = [
            rows(spec.page_size, spec.latent_bytes(layer) if fp8 else layer.latent_width, kept) for layer in spec.layers
        ]
        self.index_keys = [rows(spec.page_size // spec.pool, layer.index_width, self.dtype) for layer in spec.layers]

    def latent_rows(self, layer: int) -> torch.Tensor:
        """[slots, latent_width], or bytes of FP8 rows; a view."""
        return self._flat(self.latents[layer], layer)

    def index_rows(self, layer: int) -> torch.Tensor:
        """[slots / pool, index_width], a view."""
        return self._flat(self.index_keys[layer], layer)

    def write_latents(self, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> int:
        """rows [n, latent_width], or bytes of FP8 rows, into slots int64 [n]; returns n."""
        return self._write(self.latent_rows(layer), slots, rows)

    def write_index_keys(self, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> int:
        """rows [n, index_width] into pool slots int64 [n] (token slot // pool); returns n."""
        return self._write(self.index_rows(layer), slots, rows)

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page in all layers."""
        if not (0 <= source < self.blocks and 0 <= target < self.blocks):
            raise IndexError(f"page {source} to {target} of {self.blocks}")
        for tensor in self._tensors():
            tensor[target] = tensor[source]

    def dump(self, block: int) -> bytes:
        """What a page holds in all layers, as bytes in this machine's order."""
        parts = [tensor[block].contiguous().view(torch.uint8) for tensor in self._tensors()]
        return b"".join(part.cpu().numpy().tobytes() for part in parts)

    def load(self, block: int, data: bytes) -> None:
        """Fill a page with what `dump` of an equal layout gave; `ValueError` for another length."""
        load_rows([tensor[block] for tensor in self._tensors()], data)

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for tensor in (*self.latents, *self.index_keys) if tensor is not None]

    @staticmethod
    def _flat(tensor: torch.Tensor | None, layer: int) -> torch.Tensor:
        assert tensor is not None, f"layer {layer} keeps no such rows"
        return tensor.view(-1, tensor.shape[-1])

    @staticmethod
    def _write(target: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> int:
        if slots.shape[0] != rows.shape[0] or rows.shape[1:] != target.shape[1:]:
            raise ValueError(f"{tuple(rows.shape)} rows for {tuple(slots.shape)} slots of {tuple(target.shape)}")
        if not slots.numel():
            return 0
        low, high = int(slots.min()), int(slots.max())
        if low < 0 or high >= target.shape[0]:
            raise IndexError(f"slots {low} to {high}: the cache has 0 to {target.shape[0] - 1}")
        target[slots] = rows.to(target.dtype)
        return slots.shape[0]
