"""Native `quantize`: emulated activation quantization, bit for bit as defined, at every level.

One pass where a scale belongs to a token or a group, two where all tokens share it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hadron.kernels.cpu.native import extension
from hadron.kernels.cpu.native import level as current_level
from hadron.quantization.scheme import ActivationScheme, Granularity

_WHOLE_ROW, _ALL_ROWS = 0, -1


def bind(
    scheme: ActivationScheme, input_scale: torch.Tensor | None, *, threads: int = 1, level: Any = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """x [tokens, columns] of any float dtype -> float32 of the same shape, on the scheme's grid.

    input_scale: float32 [], the file's, where the scheme is static (for NVFP4 the global scale).
    """
    if scheme.element is None:
        return torch.Tensor.float
    assert scheme.dynamic or input_scale is not None or scheme.scale == "e8m0", scheme.name
    kind = "stored" if scheme.scale == "float" and not scheme.dynamic else scheme.scale
    given = input_scale if kind in ("stored", "e4m3") else None
    columns = {Granularity.TENSOR: _ALL_ROWS, Granularity.CHANNEL: _WHOLE_ROW}.get(scheme.granularity, scheme.columns)
    activation = extension().activation(
        element=str(scheme.element),
        scale=kind,
        columns=columns,
        mode=scheme.mx_mode,
        reciprocal=scheme.reciprocal,
        stored=None if given is None else float(given),
    )
    used = current_level() if level is None else level
    call = extension().quantize

    def quantize(x: torch.Tensor) -> torch.Tensor:
        wide = x.float().contiguous()
        y = torch.empty_like(wide)
        call(used, activation, wide.data_ptr(), wide.shape[0], wide.shape[1], y.data_ptr(), threads)
        return y

    return quantize
