"""The vision tower of GLM-5.3-Flash, as far as planning goes: sizes and inventory. It is claimed and
reported, not run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hadron.layers.dimensions import MlpDimensions
from hadron.models import sites
from hadron.models.hf_config import MAX_LAYERS, ConfigReader
from hadron.models.inventory import ModuleKind, ModuleSpec, Section, Stored
from hadron.problems import Problem


@dataclass(frozen=True, slots=True)
class VisionDimensions:
    """Sizes of the tower; `out` is the text tower's hidden size."""

    depth: int
    hidden: int
    intermediate: int
    heads: int
    channels: int
    patch: int
    temporal_patch: int
    merge: int
    out: int
    projection: int
    bias: bool


def read(raw: Mapping[str, Any], problems: list[Problem]) -> VisionDimensions | None:
    """The sizes in `vision_config`, or None with its problems noted."""
    r = ConfigReader(raw, "config.json: vision_config", problems)
    sizes = VisionDimensions(
        depth=r.required("depth", int, minimum=1, maximum=MAX_LAYERS),
        hidden=r.required("hidden_size", int, minimum=1),
        intermediate=r.required("intermediate_size", int, minimum=1),
        heads=r.required("num_heads", int, minimum=1),
        channels=r.default("in_channels", int, 3, minimum=1),
        patch=r.required("patch_size", int, minimum=1),
        temporal_patch=r.default("temporal_patch_size", int, 2, minimum=1),
        merge=r.default("spatial_merge_size", int, 2, minimum=1),
        out=r.required("out_hidden_size", int, minimum=1),
        projection=r.default("projection_intermediate_size", int, 10240, minimum=1),
        bias=r.default("attention_bias", bool, True),
    )
    return sizes if r.ok else None


def inventory(d: VisionDimensions, stored: Stored) -> Iterator[ModuleSpec]:
    """The modules under `model.visual.` or `visual.`; none where the file has no vision tower."""
    kind = ModuleKind.VISION
    prefix = next((p for p in ("model.visual.", "visual.") if f"{p}patch_embed.proj" in stored.modules), None)
    if prefix is None:
        return
    tower = sites.Place(prefix, "visual.", Section.VISION, stored)
    patches = (d.hidden, d.channels, d.temporal_patch, d.patch, d.patch)
    yield from tower.one("patch_embed.proj", kind, patches, bias=True)
    for b in range(d.depth):
        block = tower.below(f"blocks.{b}.")
        yield from block.norm("norm1", d.hidden)
        yield from block.norm("norm2", d.hidden)
        yield from block.one("attn.qkv", kind, (3 * d.hidden, d.hidden), bias=d.bias)
        yield from block.norm("attn.q_norm", d.hidden // d.heads)
        yield from block.norm("attn.k_norm", d.hidden // d.heads)
        yield from block.one("attn.proj", kind, (d.hidden, d.hidden), bias=d.bias)
        yield from sites.mlp(block.below("mlp."), kind, MlpDimensions(d.hidden, d.intermediate, None), bias=d.bias)
    yield from tower.norm("post_layernorm", d.hidden)
    yield from tower.one("downsample", kind, (d.out, d.hidden, d.merge, d.merge), bias=True)
    merger = tower.below("merger.")
    yield from merger.one("proj", kind, (d.out, d.out))
    yield from merger.norm("post_projection_norm", d.out, bias=True)
    yield from sites.mlp(merger, kind, MlpDimensions(d.out, d.projection, None))
