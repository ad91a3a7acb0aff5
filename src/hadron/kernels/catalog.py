"""What a provider can run, as data: the rows of `kernels/<provider>/catalog.py`."""

from __future__ import annotations

from msgspec import Struct

from hadron.quantization.dtypes import Element
from hadron.quantization.scheme import Granularity, QuantizationScheme

EVERY_ELEMENT = tuple(Element)
Sizes = tuple[tuple[str, int], ...]
"""Sizes of a block by their names in `kernels/sizes.py`: those that some provider limits."""
PLAIN_ELEMENTS = (Element.F32, Element.F16, Element.BF16)


class Kernel(Struct, frozen=True):
    """One row. path: dotted path of the implementation. elements, granularities: of the weights it
    reads, in any storage: what cannot be read in place is rewritten before a kernel sees it. most: the largest value
    of each size that it limits."""

    operation: str
    path: str
    elements: tuple[Element, ...] = EVERY_ELEMENT
    granularities: tuple[Granularity, ...] = tuple(Granularity)
    most: Sizes = ()

    def refusal(self, scheme: QuantizationScheme, sizes: Sizes = ()) -> str | None:
        """Why it cannot run a block of such sizes on such a weight, or None."""
        if scheme.element not in self.elements or scheme.granularity not in self.granularities:
            return f"{self.path} does not read {scheme.name}"
        have = dict(sizes)
        for name, most in self.most:
            if have.get(name, most) > most:
                return f"{self.path} runs {name} up to {most}, not {have[name]}"
        return None


class Catalog(Struct, frozen=True):
    """All rows of one provider. absent: why it has none, where it has none. completed_by: the provider
    that runs what this one has no row for, even where the user names this one."""

    provider: str
    kernels: tuple[Kernel, ...] = ()
    absent: str | None = None
    completed_by: str | None = None
