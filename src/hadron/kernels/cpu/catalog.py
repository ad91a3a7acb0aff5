"""Native kernels for the CPU: none in this build."""

from __future__ import annotations

from hadron.kernels.catalog import Catalog

CATALOG = Catalog("cpu", absent="this build has no native CPU kernels")
