"""Pausing the cyclic garbage collector while hundreds of thousands of objects are made.

Reading 230,000 tensors allocates nothing cyclic, yet every collection walks all of it again.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_gc() -> Iterator[None]:
    """Run the body without cyclic collections; nests, and leaves the collector as it was."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
