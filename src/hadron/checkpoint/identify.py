"""What a weight is, from the tensors that lie side by side: dtypes, shapes and companions, no labels.

The configuration's claim only settles what bytes cannot tell: E2M3 from E3M2, a block size where
several fit, whether stored INT4 zero points count. Shapes decide between conventions that share a
name, square weights included: see `_int4`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from msgspec import Struct

from hadron.checkpoint.facts import Tensor
from hadron.quantization import scheme as s
from hadron.quantization.dtypes import PLAIN, Element
from hadron.quantization.scheme import PLAIN_STORAGE, Granularity, Packing, QuantizationScheme, Storage

#: suffix -> role, for everything that may lie beside a weight
ROLES: dict[str, str] = {
    "weight": "weight", "weight_packed": "weight",
    "weight_scale": "scale", "weight_scale_inv": "scale",
    "weight_scale_2": "global_scale", "weight_global_scale": "global_scale",
    "weight_zero_point": "zero_point", "weight_shape": "shape",
    "input_scale": "input_scale", "input_scale_2": "input_scale", "input_global_scale": "input_scale",
    "bias": "bias",
}  # fmt: skip
_FLOAT = ("F32", "BF16", "F16")
_E8M0 = ("U8", "F8_E8M0")
_BLOCKS = (128, 64, 32, 256, 16, 512)


class Fault(Struct, frozen=True):
    """Why a module cannot be used: a problem code, and found against accepted."""

    code: str
    found: str
    accepted: str


class Identity(Struct, frozen=True):
    """A module's scheme and storage, and the suffix that plays each role; or the fault.

    leftovers: suffixes beside the weight that the scheme has no use for. nbytes: of the tensors with a role,
    in the file.
    """

    scheme: QuantizationScheme | None
    storage: Storage
    roles: tuple[tuple[str, str], ...]
    leftovers: tuple[str, ...]
    fault: Fault | None = None
    nbytes: int = 0


class _RefusedError(Exception):
    """Leaves the decision tree with a fault."""

    def __init__(self, code: str, found: str, accepted: str) -> None:
        self.fault = Fault(code, found, accepted)
        super().__init__(code)


def ceil_div(a: int, b: int) -> int:
    """Blocks of b that cover a; the last may be partial."""
    return -(-a // b)


def show(tensor: Tensor) -> str:
    """`F8_E4M3 [256, 128]`."""
    return f"{tensor.dtype} {list(tensor.shape)}"


def identify(shape: tuple[int, ...], beside: Mapping[str, Tensor], hint: QuantizationScheme | None) -> Identity:
    """Identify the weight of `shape` from the tensors `beside` each other (suffix -> tensor).

    hint: the scheme the configuration claims, if any.
    """
    suffixes = {}
    leftovers = []
    for suffix in beside:
        role = ROLES.get(suffix)
        if role is None or role in suffixes:
            leftovers.append(suffix)
        else:
            suffixes[role] = suffix
    tensors = {role: beside[suffix] for role, suffix in suffixes.items()}
    try:
        if "weight" not in tensors:
            raise _RefusedError("HC301", f"only {', '.join(beside)}", "a tensor named weight or weight_packed")
        scheme, storage, used = _scheme(shape, tensors, suffixes, hint)
        _companions(shape, tensors, scheme, storage)
    except _RefusedError as refusal:
        return Identity(None, PLAIN_STORAGE, tuple(suffixes.items()), tuple(leftovers), refusal.fault)
    if scheme.fp8_stage:  # Quark numbers the stages in the order they were applied; ours are named for what they do
        suffixes["scale"], suffixes["global_scale"] = suffixes["global_scale"], suffixes["scale"]
    used |= {"weight", "bias"} | ({"input_scale"} if scheme.quantized else set())
    leftovers += [suffix for role, suffix in suffixes.items() if role not in used]
    roles = tuple((role, suffix) for role, suffix in suffixes.items() if role in used)
    nbytes = sum(beside[suffix].nbytes for _, suffix in roles)
    return Identity(scheme, storage, roles, tuple(leftovers), nbytes=nbytes)


def _companions(
    shape: tuple[int, ...], tensors: Mapping[str, Tensor], scheme: QuantizationScheme, storage: Storage
) -> None:
    """Refuse a bias, zero points, an input scale or a stored shape that no kernel could read as meant."""
    bias = tensors.get("bias")
    if bias is not None and (bias.dtype not in _FLOAT or bias.shape != shape[:1]):
        raise _RefusedError("HC303", f"a bias {show(bias)}", f"F32, F16 or BF16 [{shape[0]}]")
    if not scheme.quantized:
        return
    inputs = tensors.get("input_scale")
    if inputs is not None and (inputs.dtype not in _FLOAT or prod(inputs.shape) != 1):
        raise _RefusedError("HC404", f"an input scale {show(inputs)}", "one F32, F16 or BF16")
    stored = tensors.get("shape")
    if stored is not None and (stored.dtype not in ("I64", "I32") or stored.shape != (2,)):
        raise _RefusedError("HC404", f"weight_shape {show(stored)}", "I64 [2]")
    zeros = tensors.get("zero_point")
    if zeros is not None and scheme.element is Element.INT4:
        rows, columns = shape
        words = ceil_div(rows, 8)
        groups = 1 if scheme.granularity is Granularity.CHANNEL else ceil_div(columns, scheme.columns)
        transposed = storage.packing is Packing.INT4_COLUMNS_INTERLEAVED
        accepted = [(groups, words) if transposed else (words, groups)] + ([(words,)] if groups == 1 else [])
        if zeros.dtype != "I32" or zeros.shape not in accepted:
            raise _RefusedError("HC404", f"zero points {show(zeros)}", f"I32 {list(accepted[0])}")


_Found = tuple[QuantizationScheme, Storage, set[str]]


def _scheme(
    shape: tuple[int, ...], tensors: Mapping[str, Tensor], suffixes: Mapping[str, str], hint: QuantizationScheme | None
) -> _Found:
    weight = tensors["weight"]
    if weight.dtype in PLAIN:
        _expect_shape(weight, shape)
        return s.parse_scheme(PLAIN[weight.dtype]), PLAIN_STORAGE, set()
    if len(shape) != 2:
        raise _RefusedError("HC405", show(weight), "F32, F16 or BF16 for a parameter that is not a matrix")
    rows, columns = shape
    match weight.dtype:
        case "F8_E4M3":
            _expect_shape(weight, shape)
            return _fp8(rows, columns, _scale(tensors, weight), hint), PLAIN_STORAGE, {"scale"}
        case "U8":
            return _packed_float(rows, columns, tensors, suffixes, hint)
        case "I8":
            _expect_shape(weight, shape)
            if "zero_point" in tensors:
                raise _RefusedError("HC404", "INT8 with zero points", "symmetric INT8")
            return _int8(rows, _scale(tensors, weight)), PLAIN_STORAGE, {"scale"}
        case "I32":
            return _int4(rows, columns, tensors, suffixes, hint)
    raise _RefusedError("HC404", show(weight), "F32, F16, BF16, F8_E4M3, U8 (FP4, FP6), I8 or I32 (INT4)")


def _expect_shape(weight: Tensor, shape: tuple[int, ...]) -> None:
    if weight.shape != shape:
        raise _RefusedError("HC303", show(weight), f"shape {list(shape)}")


def _scale(tensors: Mapping[str, Tensor], weight: Tensor) -> Tensor:
    if "scale" not in tensors:
        raise _RefusedError("HC304", f"{show(weight)} without a scale", "weight_scale or weight_scale_inv beside it")
    return tensors["scale"]


def _fp8(rows: int, columns: int, scale: Tensor, hint: QuantizationScheme | None) -> QuantizationScheme:
    if scale.dtype in _E8M0 and scale.shape == (rows, ceil_div(columns, 32)):
        return s.MXFP8
    if scale.dtype in _FLOAT:
        if scale.shape in ((), (1,)) and not (scale.shape == (rows,) == (1,) and hint == s.FP8_CHANNEL):
            return s.FP8_TENSOR
        if len(scale.shape) == 2 and (block := _block(rows, columns, scale.shape, hint)):
            return block
        if scale.shape in ((rows,), (rows, 1)):
            return s.FP8_CHANNEL
        if prod(scale.shape) == 1:
            return s.FP8_TENSOR
    raise _RefusedError(
        "HC404", f"F8_E4M3 [{rows}, {columns}] with scale {show(scale)}",
        f"a float scale [], [{rows}], [{rows}, 1] or [{ceil_div(rows, 128)}, {ceil_div(columns, 128)}], "
        f"or U8 [{rows}, {ceil_div(columns, 32)}]",
    )  # fmt: skip


def _block(
    rows: int, columns: int, scale: tuple[int, ...], hint: QuantizationScheme | None
) -> QuantizationScheme | None:
    """The block size that a two-dimensional scale has: the claimed one where it fits, else 128 x 128, else others."""

    def fits(r: int, c: int) -> bool:
        return scale == (ceil_div(rows, r), ceil_div(columns, c))

    claimed = hint is not None and hint.granularity is Granularity.BLOCK
    if hint is not None and claimed and fits(hint.rows, hint.columns):
        return hint
    if hint == s.FP8_CHANNEL and scale == (rows, 1):
        return None
    if fits(128, 128):
        return s.fp8_block(128, 128)
    if scale == (1, 1) and hint is not None and claimed:  # one number for many blocks: not what any quantizer writes
        raise _RefusedError(
            "HC404", f"a scale [1, 1] for F8_E4M3 [{rows}, {columns}]", f"one for each block ({hint.name})"
        )
    if scale in ((rows, 1), (1, 1)):
        return None
    # Only square blocks are guessed: a row of scales too few would pass for an oblong block.
    square = next((b for b in _BLOCKS if fits(b, b)), None)
    return None if square is None else s.fp8_block(square, square)


def _int8(rows: int, scale: Tensor) -> QuantizationScheme:
    if scale.dtype in _FLOAT:
        if scale.shape in ((rows,), (rows, 1)) and rows > 1:
            return s.INT8_CHANNEL
        if prod(scale.shape) == 1:
            return s.INT8_TENSOR
    raise _RefusedError("HC404", f"INT8 with scale {show(scale)}", f"a float scale [], [{rows}] or [{rows}, 1]")


def _packed_float(
    rows: int,
    columns: int,
    tensors: Mapping[str, Tensor],
    suffixes: Mapping[str, str],
    hint: QuantizationScheme | None,
) -> _Found:
    weight = tensors["weight"]
    scale = _scale(tensors, weight)
    groups32 = (rows, ceil_div(columns, 32))
    if weight.shape == (rows, ceil_div(columns, 2)):
        if scale.dtype in _E8M0 and scale.shape == groups32:
            return s.MXFP4, PLAIN_STORAGE, {"scale"}
        if scale.dtype == "F8_E4M3" and scale.shape == (rows, ceil_div(columns, 16)):
            if "global_scale" not in tensors:
                raise _RefusedError(
                    "HC304", "FP4 with E4M3 scales and no global scale", "weight_scale_2 or weight_global_scale"
                )
            if prod(tensors["global_scale"].shape) != 1 or tensors["global_scale"].dtype not in _FLOAT:
                raise _RefusedError("HC404", f"global scale {show(tensors['global_scale'])}", "one float")
            divides = suffixes["global_scale"] == "weight_global_scale"
            return s.NVFP4, Storage(global_scale_divides=divides), {"scale", "global_scale"}
    elif weight.shape == (rows, ceil_div(columns * 6, 8)) and scale.dtype in _E8M0 and scale.shape == groups32:
        if hint in (s.MXFP6_E2M3, s.MXFP6_E3M2):
            return hint, PLAIN_STORAGE, {"scale"}
        raise _RefusedError(
            "HC404", "6-bit codes, and a configuration that does not say which",
            "fp6_e2m3 or fp6_e3m2 in the configuration: both are stored alike",
        )  # fmt: skip
    if prod(weight.shape) != 0 and weight.shape[0] != rows:
        raise _RefusedError("HC303", show(weight), f"{rows} rows for a weight [{rows}, {columns}]")
    raise _RefusedError(
        "HC404", f"U8 {list(weight.shape)} with scale {show(scale)} for [{rows}, {columns}]",
        f"U8 [{rows}, {ceil_div(columns, 2)}] (FP4) or [{rows}, {ceil_div(columns * 6, 8)}] (FP6) with "
        f"U8 {list(groups32)}, or FP4 with F8_E4M3 [{rows}, {ceil_div(columns, 16)}]",
    )  # fmt: skip


def _int4(
    rows: int,
    columns: int,
    tensors: Mapping[str, Tensor],
    suffixes: Mapping[str, str],
    hint: QuantizationScheme | None,
) -> _Found:
    """INT4 in I32 words. `weight_packed` is compressed-tensors; `weight` is Quark, transposed when grouped.

    Quark's in-memory export always stores zero points (they count when the configuration says
    asymmetric) and interleaves; file-to-file stores none and does not, except in two stages.
    """
    weight = tensors["weight"]
    scale = _scale(tensors, weight)
    stored_zeros = "zero_point" in tensors
    used = {"scale"} | ({"zero_point"} if stored_zeros else set())
    by_rows, by_columns = (rows, ceil_div(columns, 8)), (columns, ceil_div(rows, 8))
    if scale.dtype in _FLOAT:
        if suffixes["weight"] == "weight_packed":
            if weight.shape == by_rows and scale.shape[:1] == (rows,) and len(scale.shape) <= 2:
                scheme = _grouped(columns, scale.shape[1] if len(scale.shape) == 2 else 1, stored_zeros, hint)
                return scheme, Storage(Packing.INT4_ROWS), used | {"shape"}
        else:
            zeros = stored_zeros and (hint is None or hint.zero_point)
            second = tensors.get("global_scale")
            if second is not None and weight.shape == by_rows and prod(scale.shape) == 1:
                if second.shape in ((rows,), (rows, 1)):
                    return s.INT4_CHANNEL_FP8, Storage(Packing.INT4_ROWS_INTERLEAVED), {"scale", "global_scale"}
            elif weight.shape == by_rows and scale.shape in ((rows,), (rows, 1)) and second is None:
                packing = Packing.INT4_ROWS_INTERLEAVED if stored_zeros else Packing.INT4_ROWS_SIGNED
                return s.int4_channel(zeros), Storage(packing), used
            elif weight.shape == by_columns and len(scale.shape) == 2 and second is None:
                interleaved = stored_zeros or scale.shape[0] != rows
                groups, width = scale.shape if interleaved else reversed(scale.shape)
                if width == rows:
                    packing = Packing.INT4_COLUMNS_INTERLEAVED if interleaved else Packing.INT4_COLUMNS
                    return _grouped(columns, groups, zeros, hint), Storage(packing), used
    raise _RefusedError(
        "HC404", f"I32 {list(weight.shape)} with scale {show(scale)} for [{rows}, {columns}]",
        f"4-bit codes, I32 {list(by_rows)} or transposed {list(by_columns)}, with one float scale a row or a group",
    )  # fmt: skip


def _grouped(columns: int, groups: int, zeros: bool, hint: QuantizationScheme | None) -> QuantizationScheme:
    """INT4 with `groups` scales a row."""
    if hint is not None and hint.element is Element.INT4:
        if hint.granularity is Granularity.CHANNEL and groups == 1:
            return s.int4_channel(zeros)
        if hint.granularity is Granularity.GROUP and groups == ceil_div(columns, hint.columns):
            return s.int4_group(hint.columns, zeros)
    if groups == 1:
        return s.int4_channel(zeros)
    if columns % groups:
        raise _RefusedError("HC404", f"{groups} scales for {columns} columns", "a group size that divides the columns")
    return s.int4_group(columns // groups, zeros)
