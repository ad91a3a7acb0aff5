"""Triton kernels for GPUs: none in this build."""

from __future__ import annotations

from hadron.kernels.catalog import Catalog

CATALOG = Catalog("triton", absent="this build has no Triton kernels")
