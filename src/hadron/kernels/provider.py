"""The functions of one provider, operation by operation, as layers receive them.

`Provider()` takes every operation from `kernels/reference`; another provider replaces
operations by name and keeps the signatures. Nothing is imported until it is looked up.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hadron.kernels.ops import OPERATIONS


class Provider:
    """Looks functions up once, when a layer is built. `providers` maps operations to provider names;
    an operation that is not named comes from `reference`. threads: of native kernels."""

    def __init__(self, providers: Mapping[str, str] | None = None, *, threads: int = 1) -> None:
        self.threads = threads
        self._providers = dict(providers or {})
        unknown = sorted(set(self._providers) - set(OPERATIONS))
        if unknown:
            raise ValueError(f"not operations: {', '.join(unknown)}")

    def provider(self, operation: str) -> str:
        """Whose functions of `operation` are given."""
        return self._providers.get(operation, "reference")

    def function(self, operation: str, name: str) -> Callable[..., Any]:
        """The function `name` of `operation`, e.g. `function("norm", "rms_norm")`.

        A native function takes `threads` and `level` (of instructions) as keywords; they are bound here,
        once, so that layers call every provider alike.
        """
        if operation not in OPERATIONS:
            raise ValueError(f"{operation!r} is not an operation")
        provider = self.provider(operation)
        module = importlib.import_module(f"hadron.kernels.{provider}.{operation}")
        function: Callable[..., Any] = getattr(module, name)
        parameters = inspect.signature(function).parameters
        bound: dict[str, Any] = {}
        if "threads" in parameters:
            bound["threads"] = self.threads
        if "level" in parameters:
            bound["level"] = importlib.import_module(f"hadron.kernels.{provider}.native").level()
        return partial(function, **bound) if bound else function
