"""The native extension, and which instruction-set level of it is used.

A level is a value that whoever binds a weight keeps; nothing is read while a step runs. `HADRON_ISA`
names one for tests; without it the widest that this processor runs is taken.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from hadron.errors import UnsupportedError, UsageError

_native: Any
try:
    _native = import_module("hadron.kernels.cpu._native")
except ModuleNotFoundError:  # built with HADRON_SKIP_NATIVE
    _native = None

ENVIRONMENT = "HADRON_ISA"


def extension() -> Any:
    """The extension module; `UnsupportedError` where this build has none."""
    if _native is None:
        raise UnsupportedError(
            "This build has no native CPU kernels",
            where="hadron.kernels.cpu._native",
            found="no such extension module",
            accepted="an installation made with a C++20 compiler",
            hint="install again with a compiler and without HADRON_SKIP_NATIVE, or use --kernels reference",
        )
    return _native


def levels() -> tuple[str, ...]:
    """Levels this processor runs, narrowest first; none without the extension."""
    return tuple(_native.levels()) if _native is not None else ()


def level_name() -> str:
    """The level in use; `UsageError` when `HADRON_ISA` names one that does not run here."""
    available: tuple[str, ...] = tuple(extension().levels())
    asked = os.environ.get(ENVIRONMENT)
    if not asked:
        return available[-1]
    if asked not in available:
        raise UsageError(
            "This instruction-set level cannot be used",
            where=ENVIRONMENT,
            found=repr(asked),
            accepted=", ".join(available),
            hint=f"unset {ENVIRONMENT} to use the widest",
        )
    return asked


def level() -> Any:
    """The level in use, as the extension's calls take it."""
    return extension().level(level_name())
