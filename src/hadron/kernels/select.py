"""operation + scheme + provider -> `KernelChoice`, or every reason why not.

Catalogues are data (`kernels/<provider>/catalog.py`); no kernel is imported to choose one.
"""

from __future__ import annotations

from msgspec import Struct


class KernelChoice(Struct, frozen=True):
    """The kernel that will run a module. path: dotted path of its function.

    refused: why providers that were asked first cannot, one sentence each.
    """

    operation: str
    provider: str
    path: str
    refused: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As printed, e.g. `reference.linear`."""
        return f"{self.provider}.{self.operation}"
