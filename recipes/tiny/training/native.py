"""Builds `native.cpp` on first use; without a compiler, or where TINY_NATIVE=0, the callers take their plain forms."""

import os
from functools import cache
from pathlib import Path
from typing import Any


@cache
def native() -> Any:
    """The compiled module, or None where it cannot be built."""
    if os.environ.get("TINY_NATIVE", "1") == "0":
        return None
    from torch.utils.cpp_extension import load

    try:
        return load(
            "tiny_native",
            [str(Path(__file__).with_name("native.cpp"))],
            extra_cflags=["-O3", "-march=native", "-mprefer-vector-width=512", "-ffast-math", "-std=c++20"],
        )
    except (RuntimeError, OSError):
        return None
