"""What a model keeps, in bytes, from the published configurations."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hadron.cache.pages import Pages
from hadron.cache.spec import CacheSpec, LayerCache, cache_spec, latent_dtype
from hadron.cache.states import States
from hadron.errors import UnsupportedError
from hadron.layers.dimensions import IndexerDimensions, KdaDimensions, LayerSchedule, MlaDimensions


@dataclasses.dataclass
class Full:
    """GLM-5.2: 78 MLA layers of which 21 have an indexer."""

    layers = tuple(LayerSchedule("mla", "full" if i < 21 else "shared", "sparse") for i in range(78))
    mla = MlaDimensions(6144, 64, 2048, 512, 192, 64, 256, 1e-6, 8e6, True, False)
    indexer = IndexerDimensions(6144, 2048, 32, 128, 2048, 64, 8e6, True)


@dataclasses.dataclass
class Flash:
    """GLM-5.3-Flash: 34 KDA layers, 11 MLA layers, each with an indexer over pools of 4."""

    layers = tuple(
        LayerSchedule("mla", "full", "sparse") if i % 4 == 3 else LayerSchedule("kda", None, "sparse")
        for i in range(45)
    )
    mla = MlaDimensions(4096, 64, 1536, 512, 256, 0, 256, 1e-5, 1.0, True, False)
    indexer = IndexerDimensions(4096, 1536, 32, 128, 2048, 0, 1.0, True, 4, True, True)
    kda = KdaDimensions(4096, 64, 128, 4, -5.0, 1e-5)


def test_glm_5_2() -> None:
    spec = cache_spec(Full(), dtype="bfloat16")
    assert spec.bytes_per_token == 2 * (78 * 576 + 21 * 128)
    assert spec.bytes_per_page == 64 * spec.bytes_per_token
    assert spec.bytes_per_sequence == 0
    assert not spec.has_state


def test_flash() -> None:
    spec = cache_spec(Flash(), dtype="bfloat16")
    assert spec.bytes_per_token == 2 * 11 * (512 + 128 // 4)
    assert spec.has_state
    matrices = 34 * 64 * 128 * 128 * 4
    windows = 34 * 3 * 8192 * 3 * 2
    tails = 11 * 2 * 3 * 128 * 4
    assert spec.bytes_per_sequence == matrices + windows + tails


def test_bytes_equal_the_tensors() -> None:
    small = KdaDimensions(32, 2, 8, 4, -5.0, 1e-5)
    config = Flash()
    config.kda = small
    spec = cache_spec(config, dtype="float32", page_size=8)
    pages, states = Pages(spec, 3), States(spec, 5)

    def size(*tensors: torch.Tensor | None) -> int:
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    assert size(*pages.latents, *pages.index_keys) == 3 * spec.bytes_per_page
    assert size(*states.kda, *states.conv, *states.tails) == 5 * spec.bytes_per_sequence


def test_br56_rows_are_as_wide_as_the_configuration_says() -> None:
    """512 where there is no rotary part, 576 where there is; no padding, no scale."""
    flash, full = (cache_spec(c, dtype="bfloat16") for c in (Flash(), Full()))
    assert {layer.latent_width for layer in flash.layers} == {0, 512}
    assert {layer.latent_width for layer in full.layers} == {576}
    pages = Pages(CacheSpec(flash.layers[3:4], 4, "bfloat16", 64, "bfloat16"), 1)
    assert pages.latent_rows(0).shape == (64, 512)
    with pytest.raises(ValueError, match="576"):
        pages.write_latents(0, torch.tensor([0]), torch.zeros(1, 576))


def test_br56_latent_and_rotary_part_share_no_scale() -> None:
    """A latent of 0.05 beside a rotary part of 1 in bfloat16: each keeps its own precision."""
    pages = Pages(CacheSpec((LayerCache(latent_width=576),), 1, "bfloat16", 64, "bfloat16"), 1)
    row = torch.cat([torch.full((1, 512), 0.05), torch.ones(1, 64)], dim=-1)
    pages.write_latents(0, torch.tensor([7]), row)
    found = pages.latent_rows(0)[7].float()
    assert float((found / row[0] - 1).abs().max()) < 2**-8


def test_br56_an_fp8_row_has_a_scale_of_its_own_and_a_rotary_part_that_has_none() -> None:
    """GLM-5.2: 512 codes, a float32 scale, 64 bfloat16; Flash: 512 codes and a scale. The rest is bfloat16."""
    full, flash = (cache_spec(c, dtype="bfloat16", latents="fp8_e4m3") for c in (Full(), Flash()))
    assert full.bytes_per_token == 78 * (512 + 4 + 2 * 64) + 21 * 128 * 2
    assert flash.bytes_per_token == 11 * (512 + 4 + 128 // 4 * 2)
    assert flash.bytes_per_sequence == cache_spec(Flash(), dtype="bfloat16").bytes_per_sequence
    for spec, width in ((full, 644), (flash, 516)):
        pages = Pages(CacheSpec(spec.layers[3:4], 4, "bfloat16", 64, spec.latents), 2)
        assert pages.latent_rows(0).shape == (128, width)
        held = [t for t in (*pages.latents, *pages.index_keys) if t is not None]
        assert sum(t.numel() * t.element_size() for t in held) == 2 * pages.spec.bytes_per_page


@pytest.mark.parametrize(
    ("asked", "dtype", "latents", "size"),
    [("auto", "bfloat16", "bfloat16", 2), ("auto", "float32", "float32", 4), ("bf16", "float32", "bfloat16", 2),
     ("fp32", "bfloat16", "float32", 4)],
)  # fmt: skip
def test_latents_are_kept_as_asked_and_all_else_as_activations(asked: str, dtype: str, latents: str, size: int) -> None:
    spec = cache_spec(Full(), dtype=dtype, latents=latent_dtype(asked, dtype))
    assert spec.latents == latents
    assert spec.bytes_per_token == 78 * 576 * size + 21 * 128 * {"bfloat16": 2, "float32": 4}[dtype]


def test_dtypes_that_a_cache_cannot_have_are_refused() -> None:
    with pytest.raises(UnsupportedError) as error:
        cache_spec(Full(), dtype="fp8_e4m3")
    assert (error.value.where, error.value.accepted) == ("cache dtype", "float32 or bfloat16")
    assert error.value.hint == "indexer keys and windows keep the dtype of activations; only latents can be FP8"
    with pytest.raises(UnsupportedError) as error:
        cache_spec(Full(), dtype="bfloat16", latents="int8")
    assert (error.value.where, error.value.found) == ("latents", "'int8'")
    assert error.value.accepted == "float32 or bfloat16 or fp8_e4m3"
    with pytest.raises(UnsupportedError) as error:
        latent_dtype("fp8", "bfloat16")
    assert (error.value.where, error.value.found) == ("--kv-cache-dtype", "'fp8'")
    assert error.value.accepted == "auto, bf16, fp32, fp8_e4m3"


def test_a_pool_that_straddles_pages_is_refused() -> None:
    config = Flash()
    config.indexer = dataclasses.replace(config.indexer, pool=5)
    with pytest.raises(UnsupportedError) as error:
        cache_spec(config, dtype="bfloat16")
    assert error.value.where == "config.json: index_kpool"
    assert error.value.accepted == "a divisor of the page size (64)"
