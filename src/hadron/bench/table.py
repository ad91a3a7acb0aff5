"""Aligned columns for reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hadron.preflight.report import Line, Role


def table(head: Sequence[str], align: str, rows: Sequence[Sequence[str]]) -> Iterator[Line]:
    """Columns two spaces apart, as wide as they need; `align` holds `<` or `>` a column."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for number, row in enumerate((head, *rows)):
        cells = (f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True))
        yield Line("  ".join(cells).rstrip(), Role.PLAIN if number else Role.HEAD)
