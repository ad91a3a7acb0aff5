"""What the bits in a cache depend on, as values: for naming what is kept beyond the life of a process."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from hadron.cache.spec import CacheSpec
from hadron.checkpoint.facts import Shard
from hadron.engine.config import EngineConfig
from hadron.kernels.cpu import native
from hadron.preflight.plan import LoadPlan

#: Of each shard, so many pieces of so many bytes are read beside its header: weights of equal shape differ.
SAMPLES, SAMPLE = 32, 4096


def fingerprint(plan: LoadPlan, config: EngineConfig, spec: CacheSpec) -> dict[str, Any]:
    """The model, the kernels, and the options that change bits; not those that do not, such as threads.

    Weights are sampled, not read: a file whose header and samples are equal counts as equal.
    """
    return {
        "model": [(shard.name, shard.size, _sampled(shard)) for shard in plan.facts.shards],
        "config": hashlib.sha256(json.dumps(plan.facts.config, sort_keys=True).encode()).hexdigest(),
        "kernels": sorted({m.kernel.provider for m in plan.modules if m.kernel is not None}),
        "attention": [plan.attention.backend, plan.attention.prefill_path],
        "level": native.level_name() if native.levels() else None,
        "build": _build(),
        "torch": torch.__version__,
        "dtype": config.dtype,
        "device": config.device,
        "activation_quantization": config.activation_quantization,
        "cache": json.loads(json.dumps(asdict(spec))),
    }


def _build() -> str:
    """The version, and the bytes of the native kernels where there are any."""
    path = getattr(native.extension(), "__file__", None) if native.levels() else None
    if path is None:
        return version("hadron-llm")
    with Path(path).open("rb") as file:
        return version("hadron-llm") + " " + hashlib.file_digest(file, "sha256").hexdigest()


def _sampled(shard: Shard) -> str:
    digest = hashlib.sha256()
    assert shard.path is not None
    with shard.path.open("rb") as file:
        digest.update(file.read(shard.data_start))
        for i in range(SAMPLES):
            file.seek(shard.data_start + i * max(0, shard.size - shard.data_start - SAMPLE) // (SAMPLES - 1))
            digest.update(file.read(SAMPLE))
    return digest.hexdigest()
