"""The table of platforms. To add one: a file beside this, and a row here."""

from __future__ import annotations

from collections.abc import Callable

from hadron.errors import UsageError
from hadron.platforms import cpu, cuda, rocm
from hadron.platforms.base import Platform

#: device as the user names it -> the platforms it may mean, first found wins
DETECT: dict[str, tuple[Callable[[], Platform | None], ...]] = {
    "cpu": (cpu.detect,),
    "cuda": (cuda.detect, rocm.detect),  # torch calls both kinds of GPU `cuda`
}


def detect(device: str) -> Platform:
    """The platform for `--device`; `UsageError` when the machine has no such device."""
    for candidate in DETECT.get(device, ()):
        if (platform := candidate()) is not None:
            return platform
    raise UsageError(
        "this device is not available",
        where="--device",
        found=device,
        accepted=", ".join(name for name, found in DETECT.items() if any(f() for f in found)),
        hint="use --device cpu, or install the GPU's driver",
    )
