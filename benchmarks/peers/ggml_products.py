"""ggml's products in MXFP4 through ctypes: the same values, shapes and threads as a case of `hadron bench`.

Loads the libggml that lies with llama.cpp's programs. Weights lie in one of ggml's buffer types: its plain one,
where they are as a GGUF has them (`as mapped`), or the first of the CPU's extra ones that takes such a product,
which rearranges them when they are set (`repacked`, what llama.cpp does by default). ggml quantizes activations
to int8, so its results differ from Hadron's by about a hundredth; `difference` says by how much.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, POINTER, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hadron.errors import UnsupportedError
from hadron.kernels.stored import StoredWeight

F32, I32, MXFP4 = 0, 26, 39  # of enum ggml_type, which files hold too
CPU = 0  # of enum ggml_backend_dev_type
GROUP, GROUP_BYTES = 32, 17
TENSORS = 4096  # of one context

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


_P = c_void_p
#: Takes the log, which has a line for every weight that is repacked.
_SILENT = CFUNCTYPE(None, c_int, c_char_p, c_void_p)(lambda level, text, data: None)
#: function -> result and arguments
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_add": (_P, (_P, _P, _P)),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_P, (_P, _P)),
    "ggml_backend_buffer_free": (None, (_P,)),
    "ggml_backend_buft_name": (c_char_p, (_P,)),
    "ggml_backend_cpu_buffer_type": (_P, ()),
    "ggml_backend_dev_backend_reg": (_P, (_P,)),
    "ggml_backend_dev_by_type": (_P, (c_int,)),
    "ggml_backend_dev_init": (_P, (_P, c_char_p)),
    "ggml_backend_dev_supports_op": (c_bool, (_P, _P)),
    "ggml_backend_graph_compute": (c_int, (_P, _P)),
    "ggml_backend_load_all_from_path": (None, (c_char_p,)),
    "ggml_backend_reg_get_proc_address": (_P, (_P, c_char_p)),
    "ggml_backend_tensor_get": (None, (_P, _P, c_size_t, c_size_t)),
    "ggml_backend_tensor_set": (None, (_P, _P, c_size_t, c_size_t)),
    "ggml_build_forward_expand": (None, (_P, _P)),
    "ggml_free": (None, (_P,)),
    "ggml_graph_overhead": (c_size_t, ()),
    "ggml_init": (_P, (_InitParams,)),
    "ggml_log_set": (None, (_P, _P)),
    "ggml_mul": (_P, (_P, _P, _P)),
    "ggml_mul_mat": (_P, (_P, _P, _P)),
    "ggml_mul_mat_id": (_P, (_P, _P, _P, _P)),
    "ggml_nbytes": (c_size_t, (_P,)),
    "ggml_new_graph": (_P, (_P,)),
    "ggml_new_tensor_3d": (_P, (_P, c_int, c_int64, c_int64, c_int64)),
    "ggml_swiglu_split": (_P, (_P, _P, _P)),
    "ggml_tensor_overhead": (c_size_t, ()),
    "ggml_view_2d": (_P, (_P, _P, c_int64, c_int64, c_size_t, c_size_t)),
}


def library(folder: Path) -> Path:
    """The shared libggml of the programs in `folder`; `UnsupportedError` where there is none."""
    folders = (folder, folder.parent / "lib", folder.parent / "lib64")
    for path in (place / name for place in folders for name in ("libggml.so", "libggml.dylib")):
        if path.exists():
            return path
    raise UnsupportedError(
        "ggml's products cannot be measured",
        where=str(folder),
        found="no libggml beside the programs nor in ../lib",
        accepted="a build of llama.cpp with shared libraries",
        hint="build with cmake -DBUILD_SHARED_LIBS=ON, or leave them out with --only model",
    )


def blocks(weight: StoredWeight) -> Bytes:
    """An MXFP4 weight [n, k] as ggml's blocks, uint8 [n, k / 32, 17]: the scale, then codes j and j + 16 in a byte."""
    n, k = weight.shape
    assert weight.scale is not None
    stored = weight.weight.numpy().reshape(n, k // GROUP, GROUP // 2)
    codes = np.stack((stored & 15, stored >> 4), axis=-1).reshape(n, k // GROUP, GROUP)
    out = np.empty((n, k // GROUP, GROUP_BYTES), np.uint8)
    out[..., 0] = weight.scale.numpy()
    out[..., 1:] = codes[..., :16] | codes[..., 16:] << 4
    return out


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference over that of what is expected."""
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())


class Ggml:
    """A CPU backend of one libggml with a number of threads."""

    def __init__(self, path: Path, threads: int) -> None:
        self.lib = _load(path)
        device = self.lib.ggml_backend_dev_by_type(CPU)
        if not device:  # backends are files of their own
            self.lib.ggml_backend_load_all_from_path(str(path.parent).encode())
            device = self.lib.ggml_backend_dev_by_type(CPU)
        if not device:
            raise _unusable(path, "it has no CPU backend")
        self._device = device
        self._registry = self.lib.ggml_backend_dev_backend_reg(device)
        self._backend = self.lib.ggml_backend_dev_init(device, None)
        set_threads = self._optional("ggml_backend_set_n_threads", CFUNCTYPE(None, c_void_p, c_int))
        if set_threads is None:
            raise _unusable(path, "its CPU backend takes no number of threads")
        set_threads(self._backend, threads)
        self.plain = int(self.lib.ggml_backend_cpu_buffer_type())

    def repacking(self) -> tuple[int, str] | None:
        """The extra buffer type that takes MXFP4 products, as llama.cpp would choose it, and its name."""
        extra = self._optional("ggml_backend_dev_get_extra_bufts", CFUNCTYPE(POINTER(c_void_p), c_void_p))
        kinds = extra(self._device) if extra is not None else None
        for i in range(64) if kinds else ():
            if not kinds[i]:
                break
            with Context(self, kinds[i]) as weights, Context(self, self.plain) as rest:
                w = weights.tensor(MXFP4, 256, 256)
                if weights.allocate(required=False):
                    y = self.lib.ggml_mul_mat(rest.pointer, w, rest.tensor(F32, 256, 1))
                    if self.lib.ggml_backend_dev_supports_op(self._device, y):
                        return kinds[i], self.lib.ggml_backend_buft_name(kinds[i]).decode()
        return None

    def compute(self, graph: int) -> None:
        """Run a graph and wait for it."""
        status = self.lib.ggml_backend_graph_compute(self._backend, graph)
        assert status == 0, status

    def _optional(self, name: str, kind: Any) -> Any:
        address = self.lib.ggml_backend_reg_get_proc_address(self._registry, name.encode())
        return kind(address) if address else None


def _load(path: Path) -> ctypes.CDLL:
    try:
        lib = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
        lib.ggml_log_set(ctypes.cast(_SILENT, c_void_p), None)
    except (OSError, AttributeError) as error:
        raise _unusable(path, str(error)) from error
    return lib


def _unusable(path: Path, found: str) -> UnsupportedError:
    return UnsupportedError(
        "ggml's products cannot be measured",
        where=str(path),
        found=found[:300],
        accepted="libggml of llama.cpp from September 2025 or later, with its CPU backend",
        hint="give another build with --bin FOLDER, or leave them out with --only model",
    )


class Context:
    """Tensors that one buffer holds; freed at the end of the block."""

    def __init__(self, ggml: Ggml, buffer_type: int) -> None:
        lib = ggml.lib
        size = TENSORS * lib.ggml_tensor_overhead() + 64 * lib.ggml_graph_overhead()
        self._ggml, self._type = ggml, buffer_type
        self.pointer = lib.ggml_init(_InitParams(size, None, True))
        self._buffer: int | None = None

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        if self._buffer:
            self._ggml.lib.ggml_backend_buffer_free(self._buffer)
        self._ggml.lib.ggml_free(self.pointer)

    def tensor(self, dtype: int, columns: int, rows: int, first: int = 1) -> int:
        """A new one; [first, rows, columns] in torch's order."""
        return int(self._ggml.lib.ggml_new_tensor_3d(self.pointer, dtype, columns, rows, first))

    def graph(self, result: int) -> int:
        """What computes a tensor."""
        graph = self._ggml.lib.ggml_new_graph(self.pointer)
        self._ggml.lib.ggml_build_forward_expand(graph, result)
        return int(graph)

    def allocate(self, *, required: bool = True) -> bool:
        """Give all tensors memory."""
        self._buffer = self._ggml.lib.ggml_backend_alloc_ctx_tensors_from_buft(self.pointer, self._type)
        assert self._buffer or not required, "no memory for ggml's tensors"
        return bool(self._buffer)

    def fill(self, tensor: int, data: Bytes | torch.Tensor) -> None:
        """Set all bytes of a tensor."""
        array = data.contiguous().numpy() if isinstance(data, torch.Tensor) else np.ascontiguousarray(data)
        assert array.nbytes == self._ggml.lib.ggml_nbytes(tensor)
        self._ggml.lib.ggml_backend_tensor_set(tensor, array.ctypes.data, 0, array.nbytes)

    def read(self, tensor: int, rows: int, columns: int) -> torch.Tensor:
        """float32 [rows, columns]."""
        out = torch.empty(rows, columns)
        self._ggml.lib.ggml_backend_tensor_get(tensor, out.data_ptr(), 0, out.numel() * out.element_size())
        return out


class Linear:
    """y = x @ w.T by several copies of a weight."""

    def __init__(self, ggml: Ggml, buffer_type: int, weight: StoredWeight, copies: int) -> None:
        self._ggml, self.context = ggml, Context(ggml, buffer_type)
        n, k = weight.shape
        self._weights = [self.context.tensor(MXFP4, k, n) for _ in range(copies)]
        self.context.allocate()
        data = blocks(weight)
        for w in self._weights:
            self.context.fill(w, data)
        self._shape = n

    def bind(self, rest: Context, x: torch.Tensor) -> tuple[Callable[[int], None], Callable[[], torch.Tensor]]:
        """A call by the number of the copy, and what reads the result of copy 0. x: float32 [m, k]."""
        m, k = x.shape
        copies = self._weights if m == 1 else self._weights[:1]
        into = rest.tensor(F32, k, m)
        results = [self._ggml.lib.ggml_mul_mat(rest.pointer, w, into) for w in copies]
        graphs = [rest.graph(y) for y in results]
        rest.allocate()
        rest.fill(into, x)
        return lambda turn: self._ggml.compute(graphs[turn % len(graphs)]), lambda: rest.read(
            results[0], m, self._shape
        )


class Experts:
    """A layer of experts: `gate` is gate and up [inner, hidden] of all of them, `down` [hidden, inner]."""

    def __init__(self, ggml: Ggml, buffer_type: int, gate: StoredWeight, down: StoredWeight, experts: int) -> None:
        self._ggml, self.context = ggml, Context(ggml, buffer_type)
        (inner, hidden), stack = gate.shape, self.context.tensor
        self._gate, self._up = (stack(MXFP4, hidden, inner, experts) for _ in range(2))
        self._down = stack(MXFP4, inner, hidden, experts)
        self.context.allocate()
        for tensor, weight in ((self._gate, gate), (self._up, gate), (self._down, down)):
            one = blocks(weight)
            self.context.fill(tensor, np.broadcast_to(one, (experts, *one.shape)))

    def bind(
        self, rest: Context, x: torch.Tensor, choices: Sequence[torch.Tensor], weights: torch.Tensor
    ) -> tuple[Callable[[int], None], Callable[[], torch.Tensor]]:
        """A call by the number of the choice, and what reads its result.

        x: float32 [m, hidden]; a choice: ids [m, top]; weights: float32 [m, top].
        """
        lib, at, (m, hidden), top = self._ggml.lib, rest.pointer, x.shape, weights.shape[1]
        into, ids, scale = rest.tensor(F32, hidden, 1, m), rest.tensor(I32, top, m), rest.tensor(F32, 1, top, m)
        gate, up = (lib.ggml_mul_mat_id(at, w, into, ids) for w in (self._gate, self._up))
        out = lib.ggml_mul_mat_id(at, self._down, lib.ggml_swiglu_split(at, gate, up), ids)
        out, row = lib.ggml_mul(at, out, scale), 4 * hidden
        parts = [lib.ggml_view_2d(at, out, hidden, m, row * top, row * i) for i in range(top)]
        total = parts[0]
        for part in parts[1:]:
            total = lib.ggml_add(at, total, part)
        graph = rest.graph(total)
        rest.allocate()
        rest.fill(into, x)
        rest.fill(scale, weights)
        arrays = [choice.to(torch.int32) for choice in choices]

        def call(turn: int) -> None:
            rest.fill(ids, arrays[turn % len(arrays)])
            self._ggml.compute(graph)

        return call, lambda: rest.read(total, m, hidden)
