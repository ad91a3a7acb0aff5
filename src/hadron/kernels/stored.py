"""`StoredWeight`: one matrix [out, in] as kernels of every provider receive it.

Views of the checkpoint in the storage of its dialect, brought to one convention: scales multiply and
have explicit axes. Scales of which there are few (a tensor, a row, a block each) become float32;
group scales stay the bytes they are, for there is one to every 16 or 32 codes. Only INT4 that lies
transposed, interleaved or in two's complement is rewritten, once, as `Packing.INT4_ROWS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from hadron.errors import CheckpointError
from hadron.kernels.repack import pack_rows, unpack_columns, unpack_rows
from hadron.quantization.dtypes import Element
from hadron.quantization.scheme import Granularity, Packing, QuantizationScheme, Storage


@dataclass(frozen=True, slots=True, eq=False)
class StoredWeight:
    """A weight [out, in], or a range of its rows.

    packing: ROW_MAJOR ([out, in], or [out, in*bits/8] bytes below 8 bits) or INT4_ROWS.
    scale: [] (tensor), [out, 1] (channel), [row blocks, column blocks] (block), all float32;
    [out, groups] as stored (group: uint8 is E8M0). global_scale: float32 [], multiplies.
    zero_point: int32 [ceil(out/8), groups or 1], packed along rows, plus 8.
    first_row: of this range within its first block of scale rows (or word of zero points).
    """

    scheme: QuantizationScheme
    packing: Packing
    shape: tuple[int, int]
    weight: torch.Tensor
    scale: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None
    zero_point: torch.Tensor | None = None
    first_row: int = 0

    def rows(self, start: int, stop: int) -> StoredWeight:
        """Rows start..stop as views; exact also where a block of scales straddles the cut."""
        out, columns = self.shape
        if (start, stop) == (0, out):
            return self
        assert 0 <= start < stop <= out, (start, stop, out)
        unit = self._rows_together
        first, last = self.first_row + start, self.first_row + stop
        shared = slice(first // unit, -(-last // unit))
        scale, granularity = self.scale, self.scheme.granularity
        if scale is not None and granularity is not Granularity.TENSOR:
            scale = scale[shared] if granularity is Granularity.BLOCK else scale[start:stop]
        zero_point = None if self.zero_point is None else self.zero_point[shared]
        return replace(
            self,
            shape=(stop - start, columns),
            weight=self.weight[start:stop],
            scale=scale,
            zero_point=zero_point,
            first_row=first % unit,
        )

    @property
    def _rows_together(self) -> int:
        """Rows that share a row of block scales, or a word of zero points."""
        if self.scheme.granularity is Granularity.BLOCK:
            return self.scheme.rows
        return 1 if self.zero_point is None else 8

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Every tensor it is made of."""
        return tuple(t for t in (self.weight, self.scale, self.global_scale, self.zero_point) if t is not None)

    def to(self, device: torch.device) -> StoredWeight:
        """A copy on `device`; itself when it is there."""
        if self.weight.device == device:
            return self

        def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(device)

        return replace(
            self,
            weight=self.weight.to(device),
            scale=moved(self.scale),
            global_scale=moved(self.global_scale),
            zero_point=moved(self.zero_point),
        )


def stored_weight(
    name: str,
    scheme: QuantizationScheme,
    storage: Storage,
    shape: tuple[int, int],
    tensors: Mapping[str, torch.Tensor],
) -> StoredWeight:
    """Bring one module's tensors (role -> tensor as in the file) to the common convention.

    name is for messages. A shape that its role cannot have is refused by name: broadcasting would
    read a [N] scale of a square weight along the wrong axis.
    """
    weight, scale, zero_point = tensors["weight"], tensors.get("scale"), tensors.get("zero_point")
    assert zero_point is not None or not scheme.zero_point, f"{name}: {scheme.name} without zero points"
    packing = storage.packing
    if zero_point is not None and not scheme.zero_point:
        _expect_zeros(name, zero_point, packing)
        zero_point = None
    if storage.converts:
        weight, scale, zero_point = _to_rows(name, scheme, packing, shape, weight, scale, zero_point)
        packing = Packing.INT4_ROWS
    _expect(name, "weight", weight, _weight_shape(scheme, packing, shape))
    global_scale = tensors.get("global_scale")
    if global_scale is not None:
        global_scale = scalar(name, "global_scale", global_scale)
        if storage.global_scale_divides:
            global_scale = global_scale.reciprocal()
    if zero_point is not None:
        groups = 1 if scheme.granularity is Granularity.CHANNEL else -(-shape[1] // scheme.columns)
        words = -(-shape[0] // 8)
        if groups == 1 and zero_point.shape == (words,):
            zero_point = zero_point.view(words, 1)
        _expect(name, "zero_point", zero_point, (words, groups))
    return StoredWeight(
        scheme, packing, shape, weight, _scale(name, scheme, shape, scale), global_scale, zero_point
    )  # fmt: skip


def scalar(name: str, role: str, tensor: torch.Tensor) -> torch.Tensor:
    """A stored scalar ([], [1] or [1, 1]) as float32 []; widened from its own dtype, never recomputed."""
    if tensor.numel() != 1:
        raise _refused(name, role, tensor, "one value")
    return tensor.reshape(()).float()


def _scale(
    name: str, scheme: QuantizationScheme, shape: tuple[int, int], scale: torch.Tensor | None
) -> torch.Tensor | None:
    out, columns = shape
    if scheme.granularity is Granularity.NONE:
        return None
    assert scale is not None, f"{name}: {scheme.name} without a scale"
    if scheme.granularity is Granularity.TENSOR:
        return scalar(name, "scale", scale)
    if scheme.granularity is Granularity.CHANNEL:
        if scale.shape not in ((out,), (out, 1)):
            raise _refused(name, "scale", scale, f"[{out}] or [{out}, 1]")
        return scale.reshape(out, 1).float()
    if scheme.granularity is Granularity.BLOCK:
        _expect(name, "scale", scale, (-(-out // scheme.rows), -(-columns // scheme.columns)))
        return scale.float()
    _expect(name, "scale", scale, (out, -(-columns // scheme.columns)))
    return scale


def _weight_shape(scheme: QuantizationScheme, packing: Packing, shape: tuple[int, int]) -> tuple[int, int]:
    out, columns = shape
    if packing is Packing.INT4_ROWS:
        return out, -(-columns // 8)
    return out, -(-columns * scheme.bits // 8) if scheme.bits < 8 else columns


def _to_rows(
    name: str,
    scheme: QuantizationScheme,
    packing: Packing,
    shape: tuple[int, int],
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Rewrite signed INT4 as INT4_ROWS; its transposed scales and zero points with it."""
    assert scheme.element is Element.INT4, scheme
    interleaved = packing in (Packing.INT4_COLUMNS_INTERLEAVED, Packing.INT4_ROWS_INTERLEAVED)
    out, columns = shape
    if packing in (Packing.INT4_COLUMNS, Packing.INT4_COLUMNS_INTERLEAVED):
        _expect(name, "weight", weight, (columns, -(-out // 8)))
        codes = unpack_columns(weight, out, interleaved=interleaved)
        if packing is Packing.INT4_COLUMNS_INTERLEAVED and scale is not None and scale.dim() == 2:
            groups = -(-columns // scheme.columns) if scheme.columns else 1
            _expect(name, "scale", scale, (groups, out))
            scale = scale.T.contiguous()
    else:
        _expect(name, "weight", weight, (out, -(-columns // 8)))
        codes = unpack_rows(weight, columns, interleaved=interleaved)
    rows = pack_rows(codes)
    if zero_point is None:
        return rows, scale, None
    # [groups, out/8], or [out/8] where a row has one: packed along the rows of the weight
    assert zero_point.dim() in (1, 2), name
    zeros = unpack_columns(zero_point.reshape(-1, zero_point.shape[-1]), out, interleaved=interleaved)
    return rows, scale, pack_rows(zeros.T).T.contiguous()


def _expect_zeros(name: str, zero_point: torch.Tensor, packing: Packing) -> None:
    """Zero points that a symmetric scheme leaves out must be zeros: eights where codes are stored plus 8."""
    zero = -0x77777778 if packing is Packing.INT4_ROWS else 0
    if count := int((zero_point != zero).sum()):
        raise CheckpointError(
            "zero points were taken for zeros and are not",
            where=f"{name}, role zero_point",
            found=f"{count} of {zero_point.numel()} words that are not",
            accepted="zeros only, for the scheme is symmetric",
            hint="the file and its configuration disagree: quantize again, or correct `symmetric` in config.json",
        )


def _expect(name: str, role: str, tensor: torch.Tensor, shape: tuple[int, int]) -> None:
    if tuple(tensor.shape) != shape:
        raise _refused(name, role, tensor, str(list(shape)))


def _refused(name: str, role: str, tensor: torch.Tensor, accepted: str) -> CheckpointError:
    return CheckpointError(
        "a tensor has a shape that its role cannot have",
        where=f"{name}, role {role}",
        found=str(list(tensor.shape)),
        accepted=accepted,
        hint="run `hadron check` on the checkpoint; the plan names the tensor and what decided its scheme",
    )
