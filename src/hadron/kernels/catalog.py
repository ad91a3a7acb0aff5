"""What a provider can run, as data: the rows of `kernels/<provider>/catalog.py`."""

from __future__ import annotations

from msgspec import Struct

from hadron.quantization.dtypes import Element
from hadron.quantization.scheme import Granularity, QuantizationScheme

EVERY_ELEMENT = tuple(Element)
PLAIN_ELEMENTS = (Element.F32, Element.F16, Element.BF16)


class Kernel(Struct, frozen=True):
    """One row. path: dotted path of the implementation. elements, granularities: of the weights it
    reads, in any storage: what cannot be read in place is rewritten before a kernel sees it."""

    operation: str
    path: str
    elements: tuple[Element, ...] = EVERY_ELEMENT
    granularities: tuple[Granularity, ...] = tuple(Granularity)

    def refusal(self, scheme: QuantizationScheme) -> str | None:
        """Why it cannot read such a weight, or None."""
        if scheme.element not in self.elements or scheme.granularity not in self.granularities:
            return f"{self.path} does not read {scheme.name}"
        return None


class Catalog(Struct, frozen=True):
    """All rows of one provider. absent: why it has none, where it has none. completed_by: the provider
    that runs what this one has no row for, even where the user names this one."""

    provider: str
    kernels: tuple[Kernel, ...] = ()
    absent: str | None = None
    completed_by: str | None = None
