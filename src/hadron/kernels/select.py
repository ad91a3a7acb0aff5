"""operation + scheme + provider -> `KernelChoice`, or every reason why not.

Catalogues are data (`kernels/<provider>/catalog.py`); no kernel is imported to choose one.
"""

from __future__ import annotations

from functools import cache

from msgspec import Struct

from hadron.errors import UsageError
from hadron.kernels.catalog import Catalog, Sizes
from hadron.kernels.cpu.catalog import CATALOG as CPU
from hadron.kernels.ops import OPERATIONS
from hadron.kernels.reference.catalog import CATALOG as REFERENCE
from hadron.kernels.triton.catalog import CATALOG as TRITON
from hadron.quantization.scheme import BF16, QuantizationScheme

CATALOGS: dict[str, Catalog] = {catalog.provider: catalog for catalog in (CPU, TRITON, REFERENCE)}


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


class Refusal(Struct, frozen=True):
    """No provider that was asked can run a module; one sentence each."""

    reasons: tuple[str, ...]


def providers(asked: str, preferred: tuple[str, ...]) -> tuple[str, ...]:
    """Providers to ask, in order. asked: `auto`, or one provider, and then no other is
    tried but the one that completes it.

    preferred: the platform's own order (`Platform.providers`).
    """
    if asked == "auto":
        return preferred
    if asked not in CATALOGS:
        raise UsageError(
            "There is no such kernel provider",
            where="--kernels",
            found=repr(asked),
            accepted=", ".join(("auto", *CATALOGS)),
            hint="leave it out to let the platform choose",
        )
    rest = CATALOGS[asked].completed_by
    return (asked,) if rest is None else (asked, rest)


@cache
def select(
    operation: str,
    scheme: QuantizationScheme = BF16,
    sizes: Sizes = (),
    *,
    providers: tuple[str, ...] = ("reference",),
) -> KernelChoice | Refusal:
    """The first provider's kernel that runs `operation` of those sizes on weights of `scheme`, or every reason why
    none does."""
    assert operation in OPERATIONS, operation
    refused: list[str] = []
    for provider in providers:
        catalog = CATALOGS[provider]
        rows = [kernel for kernel in catalog.kernels if kernel.operation == operation]
        if not rows:
            refused.append(f"{provider}: {catalog.absent or f'has no {operation}'}")
        for kernel in rows:
            reason = kernel.refusal(scheme, sizes)
            if reason is None:
                return KernelChoice(operation, provider, kernel.path, tuple(refused))
            refused.append(f"{provider}: {reason}")
    return Refusal(tuple(refused))
