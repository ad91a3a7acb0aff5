"""GLM-5, 5.1, 5.2, 5.3: configuration, layer schedule and inventory.

All versions share one architecture name. 5.2 and later give `indexer_types` (or a pattern, or a
frequency): a `shared` layer stores no indexer and reuses the selection of the last `full` one.
Source: transformers 5.23 `glm_moe_dsa`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hadron.kernels.catalog import Sizes
from hadron.layers.dimensions import (
    IndexerDimensions,
    LayerSchedule,
    MlaDimensions,
    MlpDimensions,
    MoeDimensions,
)
from hadron.models import sites
from hadron.models.hf_config import MAX_LAYERS, ConfigReader
from hadron.models.inventory import ModuleKind, ModuleSpec, Section, Stored
from hadron.models.schedule import eos_ids, indexer_types, mlp_types, read_moe
from hadron.problems import Problem


@dataclass(frozen=True, slots=True)
class GlmMoeDsaConfig:
    """A GLM-5-family text model."""

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
    mlp: MlpDimensions
    moe: MoeDimensions
    mtp_shares_selection: bool

    @property
    def sizes(self) -> Mapping[str, Sizes]:
        """By operation, those that kernels may limit."""
        return {"router": (("groups", self.moe.groups),)}


def read(raw: Mapping[str, Any], problems: list[Problem]) -> GlmMoeDsaConfig | None:
    """The configuration in `config.json`, or None with its problems noted."""
    r = ConfigReader(raw, "config.json", problems)
    count = r.required("num_hidden_layers", int, minimum=1, maximum=MAX_LAYERS)
    hidden = r.required("hidden_size", int, minimum=1)
    r.must_equal("hidden_act", ("silu",), "only the SiLU-gated MLP is implemented")
    q_rank = r.required("q_lora_rank", int, minimum=1)
    rope = r.required("qk_rope_head_dim", int, minimum=0)
    heads = r.required("num_attention_heads", int, minimum=1)
    theta = _rope_theta(r)
    mla = MlaDimensions(
        hidden=hidden,
        heads=heads,
        q_rank=q_rank,
        kv_rank=r.required("kv_lora_rank", int, minimum=1),
        nope=r.required("qk_nope_head_dim", int, minimum=1),
        rope=rope,
        v=r.required("v_head_dim", int, minimum=1),
        latent_norm_eps=1e-6,  # transformers builds these two norms with their default eps
        rope_theta=theta,
        rope_interleave=r.default("rope_interleave", bool, True),
        bias=r.default("attention_bias", bool, False),
    )
    index_head_dim = r.default("index_head_dim", int, 128, minimum=1)
    if rope % 2 or rope > index_head_dim:
        r.invalid(
            "qk_rope_head_dim", found=str(rope), accepted=f"an even number up to index_head_dim ({index_head_dim})",
            hint="compare with the config.json of the original release",
        )  # fmt: skip
    indexer = IndexerDimensions(
        hidden=hidden,
        q_rank=q_rank,
        heads=r.default("index_n_heads", int, 32, minimum=1),
        head_dim=index_head_dim,
        topk=r.default("index_topk", int, 2048, minimum=1),
        rope=rope,
        rope_theta=theta,
        rope_interleave=r.default("indexer_rope_interleave", bool, True),
    )
    norm_eps = r.default("rms_norm_eps", float, 1e-5, minimum=0)
    intermediate = r.required("intermediate_size", int, minimum=1)
    moe = read_moe(r, hidden, None)
    mlps = mlp_types(r, count, r.default("first_k_dense_replace", int, 3, minimum=0))
    indexers = indexer_types(r, ("mla",) * count)
    r.schedule("layer_types", count, {"indexed_attention": "mla", "deepseek_sparse_attention": "mla"})
    if not r.ok:
        return None
    return GlmMoeDsaConfig(
        hidden=hidden,
        vocabulary=r.required("vocab_size", int, minimum=1),
        layers=tuple(LayerSchedule("mla", indexers[i], mlps[i]) for i in range(count)),
        mtp_layers=r.default("num_nextn_predict_layers", int, 0, minimum=0),
        max_position=r.default("max_position_embeddings", int, 202752, minimum=1),
        norm_eps=norm_eps,
        eos=eos_ids(r),
        tied=r.default("tie_word_embeddings", bool, False),
        mla=mla,
        indexer=indexer,
        mlp=MlpDimensions(hidden, intermediate, None),
        moe=moe,
        mtp_shares_selection=r.default("index_share_for_mtp_iteration", bool, False),
    )


def _rope_theta(r: ConfigReader) -> float:
    """`rope_theta`, nested in `rope_parameters` (new) or beside `rope_scaling` (old); other types refused."""
    theta = r.default("rope_theta", float, 1e6, minimum=1)
    for key in ("rope_scaling", "rope_parameters"):
        n = ConfigReader(r.default(key, dict, {}), f"{r.path}: {key}", r.problems)
        kind = n.values.get("rope_type", n.values.get("type", "default"))
        if kind != "default":
            n.unsupported(
                "rope_type", kind, ("default",),
                "the released models use the default rotary embedding; scaled ones are not implemented",
            )  # fmt: skip
        n.must_equal("partial_rotary_factor", (1.0,), "the whole rotary part is rotated")
        for name in set(n.values) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}:
            # Per-layer parameters and factors of scaled types: each would change the angles.
            if n.values[name] is not None:
                n.unsupported(
                    name, n.values[name], ("nothing",), "only one rotary embedding for all layers is implemented"
                )
        if (other := n.values.get("rope_theta")) is not None and "rope_theta" in r.values and other != theta:
            n.invalid("rope_theta", found=repr(other)[:40], accepted=f"{theta:g}, as beside it", hint="state it once")
        theta = n.default("rope_theta", float, theta, minimum=1)
        r.ok = r.ok and n.ok
    return float(theta)


def inventory(config: GlmMoeDsaConfig, stored: Stored) -> Iterator[ModuleSpec]:
    """Every module a checkpoint of this configuration holds, in checkpoint names."""
    prefix, head_prefix = sites.text_tower(stored, "model.")
    text = sites.Place(prefix, "", Section.TEXT, stored)
    yield from text.one("embed_tokens", ModuleKind.EMBEDDING, (config.vocabulary, config.hidden))
    for i, schedule in enumerate(config.layers):
        yield from _layer(text.below(f"layers.{i}."), config, schedule)
    yield from text.norm("norm", config.hidden)
    head = sites.Place(head_prefix, "", Section.TEXT, stored)
    if not config.tied or head.at + "lm_head" in stored.modules:
        yield from head.one("lm_head", ModuleKind.LM_HEAD, (config.vocabulary, config.hidden))
    for i in sites.stored_mtp_layers(prefix, len(config.layers), config.mtp_layers, stored):
        layer = sites.Place(f"{prefix}layers.{i}.", f"layers.{i}.", Section.MTP, stored)
        yield from sites.mtp_extras(layer, config.hidden, config.vocabulary)
        indexer = "full" if layer.at + "self_attn.indexer.wk" in stored.modules else "shared"
        yield from _layer(layer, config, LayerSchedule("mla", indexer, "sparse"))


def _layer(layer: sites.Place, config: GlmMoeDsaConfig, schedule: LayerSchedule) -> Iterator[ModuleSpec]:
    yield from layer.norm("input_layernorm", config.hidden)
    yield from sites.mla(layer, config.mla)
    if schedule.indexer == "full":
        yield from sites.indexer(layer, config.indexer)
    yield from layer.norm("post_attention_layernorm", config.hidden)
    if schedule.mlp == "sparse":
        yield from sites.moe(layer, config.moe)
    else:
        yield from sites.mlp(layer.below("mlp."), ModuleKind.MLP, config.mlp)
