"""GLM-5.3-Flash: configuration, layer schedule and inventory.

Three KDA layers to one rope-free MLA layer with a pooled indexer, hyper-connections, clamped SwiGLU,
a vision tower. Published files put the text tower under `model.language_model.`; a text-only re-save
drops that part. Sources: transformers 5.23 `glm5_next`; published configurations, which spell some
keys differently (`linear_attn_config`, `deepseek_sparse_attention`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hadron.kernels.catalog import Sizes
from hadron.layers.dimensions import (
    HyperConnectionDimensions,
    IndexerDimensions,
    KdaDimensions,
    LayerSchedule,
    MlaDimensions,
    MlpDimensions,
    MoeDimensions,
)
from hadron.models import sites
from hadron.models.glm5_next import vision
from hadron.models.hf_config import MAX_LAYERS, ConfigReader
from hadron.models.inventory import ModuleKind, ModuleSpec, Section, Stored
from hadron.models.schedule import eos_ids, indexer_types, mlp_types, read_moe
from hadron.problems import Problem


@dataclass(frozen=True, slots=True)
class Glm5NextConfig:
    """A GLM-5.3-Flash model."""

    hidden: int
    vocabulary: int
    layers: tuple[LayerSchedule, ...]
    mtp_layers: int
    max_position: int
    norm_eps: float
    eos: tuple[int, ...]
    tied: bool
    mla: MlaDimensions
    indexer: IndexerDimensions
    kda: KdaDimensions
    hyper_connection: HyperConnectionDimensions
    mlp: MlpDimensions
    moe: MoeDimensions
    mtp_shares_selection: bool
    vision: vision.VisionDimensions | None

    @property
    def sizes(self) -> Mapping[str, Sizes]:
        """By operation, those that kernels may limit."""
        return {
            "router": (("groups", self.moe.groups),),
            "kda": (("conv_kernel", self.kda.conv_kernel),),
            "hyper_connection": (("streams", self.hyper_connection.streams),),
        }


_LAYER_TYPES = {
    "linear_attention": "kda",
    "indexed_attention": "mla",
    "deepseek_sparse_attention": "mla",
    "full_attention": "mla",
}


def read(raw: Mapping[str, Any], problems: list[Problem]) -> Glm5NextConfig | None:
    """The configuration in `config.json` (nested in `text_config` or flat), or None with its problems."""
    nested = raw.get("text_config")
    if isinstance(nested, Mapping):
        r = ConfigReader(nested, "config.json: text_config", problems)
    else:
        r = ConfigReader(raw, "config.json", problems)
    count = r.required("num_hidden_layers", int, minimum=1, maximum=MAX_LAYERS)
    hidden = r.required("hidden_size", int, minimum=1)
    r.must_equal("hidden_act", ("silu",), "only the SiLU-gated MLP is implemented")
    r.must_equal("qk_rope_head_dim", (0,), "the text tower has no rotary part")
    r.must_equal("mla_use_nope", (True,), "the text tower has no rotary part")
    r.must_equal("mhc", (True,), "hyper-connections are part of this family")
    r.must_equal("index_kpool_compress", (True,), "indexer keys are pooled with a learned gate")
    norm_eps = r.default("rms_norm_eps", float, 1e-5, minimum=0)
    limit = r.default("swiglu_limit", float, 10.0, minimum=0)
    q_rank = r.required("q_lora_rank", int, minimum=1)
    mla = MlaDimensions(
        hidden=hidden,
        heads=r.required("num_attention_heads", int, minimum=1),
        q_rank=q_rank,
        kv_rank=r.required("kv_lora_rank", int, minimum=1),
        nope=r.required("qk_nope_head_dim", int, minimum=1),
        rope=0,
        v=r.required("v_head_dim", int, minimum=1),
        latent_norm_eps=norm_eps,  # transformers gives these two norms rms_norm_eps here, unlike glm_moe_dsa
        rope_theta=1.0,
        rope_interleave=True,
        bias=r.default("attention_bias", bool, False),
    )
    topk = r.default("index_topk", int, 2048, minimum=1)
    pool = r.default("index_kpool", int, 16, minimum=1)
    if topk % pool:
        r.invalid(
            "index_topk", found=str(topk), accepted=f"a multiple of index_kpool ({pool})",
            hint="compare with the config.json of the original release",
        )  # fmt: skip
    indexer = IndexerDimensions(
        hidden=hidden,
        q_rank=q_rank,
        heads=r.default("index_n_heads", int, 32, minimum=1),
        head_dim=r.default("index_head_dim", int, 128, minimum=1),
        topk=topk,
        rope=0,
        rope_theta=1.0,
        rope_interleave=True,
        pool=pool,
        pooled=True,
        always_select_tail=r.default("index_kpool_always_select_tail", bool, True),
    )
    intermediate = r.required("intermediate_size", int, minimum=1)
    moe = read_moe(r, hidden, limit)
    attention = _attention_types(r, count)
    indexers = indexer_types(r, attention)
    mlps = mlp_types(r, count, min(3, count))
    tower = _vision(raw, problems)
    kda = _kda(r, hidden, norm_eps)
    streams = HyperConnectionDimensions(
        hidden=hidden,
        streams=r.default("hc_mult", int, 4, minimum=1),
        sinkhorn_iterations=r.default("hc_sinkhorn_iters", int, 20, minimum=1),
        eps=r.default("hc_eps", float, 1e-6, minimum=0),
        norm_eps=norm_eps,
    )
    vocabulary = r.required("vocab_size", int, minimum=1)
    if not r.ok:
        return None
    return Glm5NextConfig(
        hidden=hidden,
        vocabulary=vocabulary,
        layers=tuple(
            LayerSchedule(attention[i], indexers[i] if attention[i] == "mla" else None, mlps[i]) for i in range(count)
        ),
        mtp_layers=r.default("num_nextn_predict_layers", int, 0, minimum=0),
        max_position=r.default("max_position_embeddings", int, 1048576, minimum=1),
        norm_eps=norm_eps,
        eos=eos_ids(r) or eos_ids(ConfigReader(raw, "config.json", problems)),
        tied=bool(r.default("tie_word_embeddings", bool, False) or raw.get("tie_word_embeddings")),
        mla=mla,
        indexer=indexer,
        kda=kda,
        hyper_connection=streams,
        mlp=MlpDimensions(hidden, intermediate, limit),
        moe=moe,
        mtp_shares_selection=r.default("index_share_for_mtp_iteration", bool, False),
        vision=tower,
    )


def _attention_types(r: ConfigReader, count: int) -> tuple[str, ...]:
    listed = r.schedule("layer_types", count, _LAYER_TYPES)
    if listed is not None:
        return listed
    kda_layers = r.default("linear_attn_config", dict, {}).get("kda_layers")
    if isinstance(kda_layers, list):
        return tuple("kda" if i in kda_layers else "mla" for i in range(count))
    return tuple("mla" if i % 4 == 3 else "kda" for i in range(count))


def _kda(r: ConfigReader, hidden: int, norm_eps: float) -> KdaDimensions:
    """Sizes from `linear_attn_config` (published) or from `linear_*` keys (transformers)."""
    nested = r.default("linear_attn_config", dict, {})
    n = ConfigReader(nested, f"{r.path}: linear_attn_config", r.problems)
    heads = n.default("num_heads", int, r.default("linear_num_heads", int, 64, minimum=1), minimum=1)
    head_dim = n.default("head_dim", int, r.default("linear_head_dim", int, 128, minimum=1), minimum=1)
    kernel = n.default("short_conv_kernel_size", int, r.default("linear_conv_kernel_dim", int, 4, minimum=1), minimum=1)
    bound: float | None
    if "gate_lower_bound" in nested or "linear_lower_bound" in r.values:
        published = "gate_lower_bound" in nested
        reader, key = (n, "gate_lower_bound") if published else (r, "linear_lower_bound")
        bound = reader.default(key, float, None)
        if bound is None and nested and nested.get("safe_gate", True):
            bound = -5.0
    else:
        bound = -5.0
    r.ok = r.ok and n.ok
    return KdaDimensions(hidden, heads, head_dim, kernel, bound, norm_eps)


def _vision(raw: Mapping[str, Any], problems: list[Problem]) -> vision.VisionDimensions | None:
    """A tower of depth 0 is none: a text-only file of the class that has a tower says so in this way."""
    nested = raw.get("vision_config")
    if isinstance(nested, Mapping) and nested.get("depth") == 0:
        return None
    return vision.read(nested, problems) if isinstance(nested, Mapping) else None


def inventory(config: Glm5NextConfig, stored: Stored) -> Iterator[ModuleSpec]:
    """Every module a checkpoint of this configuration holds, in checkpoint names."""
    prefix, head_prefix = sites.text_tower(stored, "model.language_model.")
    text = sites.Place(prefix, "", Section.TEXT, stored)
    yield from text.one("embed_tokens", ModuleKind.EMBEDDING, (config.vocabulary, config.hidden))
    for i, schedule in enumerate(config.layers):
        layer = text.below(f"layers.{i}.")
        for part in ("attn", "ffn"):
            yield from _hyper_connection(layer, part, config.hyper_connection)
        yield from _layer(layer, config, schedule)
    yield from text.norm("norm", config.hidden)
    head = sites.Place(head_prefix, "", Section.TEXT, stored)
    if not config.tied or head.at + "lm_head" in stored.modules:
        yield from head.one("lm_head", ModuleKind.LM_HEAD, (config.vocabulary, config.hidden))
    for i in sites.stored_mtp_layers(prefix, len(config.layers), config.mtp_layers, stored):
        layer = sites.Place(f"{prefix}layers.{i}.", f"layers.{i}.", Section.MTP, stored)
        yield from sites.mtp_extras(layer, config.hidden, config.vocabulary)
        indexer = "full" if layer.at + "self_attn.indexer.wk" in stored.modules else "shared"
        yield from _layer(layer, config, LayerSchedule("mla", indexer, "sparse"))
    if config.vision is not None:
        yield from vision.inventory(config.vision, stored)


def _layer(layer: sites.Place, config: Glm5NextConfig, schedule: LayerSchedule) -> Iterator[ModuleSpec]:
    yield from layer.norm("input_layernorm", config.hidden)
    if schedule.attention == "kda":
        yield from _kda_sites(layer.below("self_attn."), config.kda)
    else:
        yield from sites.mla(layer, config.mla)
    if schedule.indexer == "full":
        yield from sites.indexer(layer, config.indexer)
    yield from layer.norm("post_attention_layernorm", config.hidden)
    if schedule.mlp == "sparse":
        yield from sites.moe(layer, config.moe)
    else:
        yield from sites.mlp(layer.below("mlp."), ModuleKind.MLP, config.mlp)


def _hyper_connection(layer: sites.Place, part: str, d: HyperConnectionDimensions) -> Iterator[ModuleSpec]:
    shapes = {"fn": (d.mixes, d.streams * d.hidden), "base": (d.mixes,), "scale": (3,)}
    for name, shape in shapes.items():
        yield from layer.one(
            f"hc_{part}_{name}", ModuleKind.HYPER_CONNECTION, shape, bare=True,
            keep_float32=name != "fn", others=(f"{part}_hc.{name}",),
        )  # fmt: skip


def _kda_sites(p: sites.Place, d: KdaDimensions) -> Iterator[ModuleSpec]:
    kind = ModuleKind.KDA
    for name in ("q_proj", "k_proj", "v_proj"):
        yield from p.one(name, kind, (d.width, d.hidden))
    yield from sites.kda_convolution(p, d)
    for name, shape in (("f_a_proj", (d.head_dim, d.hidden)), ("f_b_proj", (d.width, d.head_dim))):
        yield from p.one(name, kind, shape, others=(f"forget_gate.{name}",))
    for name, size in (("A_log", d.heads), ("dt_bias", d.width)):
        yield from p.one(
            name, ModuleKind.PARAMETER, (size,), bare=True, keep_float32=True, others=(f"forget_gate.{name}",)
        )
    yield from p.one("b_proj", kind, (d.heads, d.hidden))
    yield from p.one("g_a_proj", kind, (d.head_dim, d.hidden))
    yield from p.one("g_b_proj", kind, (d.width, d.head_dim))
    yield from p.norm("o_norm", d.head_dim)
    yield from p.one("o_proj", kind, (d.hidden, d.width))
