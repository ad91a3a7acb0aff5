"""Reading the parts of `config.json` that both families spell alike: layer schedules, experts, stop ids."""

from __future__ import annotations

from collections.abc import Sequence

from hadron.layers.dimensions import MoeDimensions
from hadron.models.hf_config import MAX_EXPERTS, ConfigReader

_INDEXER = {"full": "full", "shared": "shared"}
_MLP = {"dense": "dense", "sparse": "sparse"}


def indexer_types(r: ConfigReader, attention: Sequence[str]) -> tuple[str, ...]:
    """`full` or `shared` for each layer: listed, else a pattern of F and S, else frequency and offset.

    attention: kind of every layer. The first `mla` layer must be full: there is nothing to share before.
    """
    listed = _listed_indexers(r, len(attention))
    first = next((i for i, kind in enumerate(attention) if kind == "mla"), None)
    if first is not None and listed[first] != "full":
        r.invalid(
            f"indexer_types[{first}]", found=listed[first], accepted="full, for the first sparse layer",
            hint="compare with the config.json of the original release",
        )  # fmt: skip
    return listed


def _listed_indexers(r: ConfigReader, count: int) -> tuple[str, ...]:
    listed = r.schedule("indexer_types", count, _INDEXER)
    if listed is None and (pattern := r.values.get("index_topk_pattern")) is not None:
        if isinstance(pattern, list):
            listed = r.schedule("index_topk_pattern", count, {**_INDEXER, "F": "full", "S": "shared"})
        elif not isinstance(pattern, str) or len(pattern) < count or set(pattern) - {"F", "S"}:
            r.invalid(
                "index_topk_pattern", found=repr(pattern)[:80], accepted=f"{count} letters, F (full) or S (shared)",
                hint="compare with the config.json of the original release",
            )  # fmt: skip
        else:
            listed = tuple("full" if letter == "F" else "shared" for letter in pattern[:count])
    if listed is None:
        every = max(r.default("index_topk_freq", int, 1), 1)
        offset = r.default("index_skip_topk_offset", int, 2)
        listed = tuple("shared" if max(i - offset + 1, 0) % every else "full" for i in range(count))
    return listed


def mlp_types(r: ConfigReader, count: int, dense: int) -> tuple[str, ...]:
    """`dense` or `sparse` for each layer: listed, else the first `dense` layers are dense."""
    listed = r.schedule("mlp_layer_types", count, _MLP)
    if listed is not None:
        return listed
    r.must_equal("moe_layer_freq", (1,), "every layer after the dense ones has experts")
    return tuple("dense" if i < dense else "sparse" for i in range(count))


def read_moe(r: ConfigReader, hidden: int, limit: float | None) -> MoeDimensions:
    """Router and experts; values of the published configurations that are not implemented are refused."""
    r.must_equal("scoring_func", ("sigmoid",), "the router scores with a sigmoid")
    r.must_equal("topk_method", ("noaux_tc",), "experts are picked with a correction bias")
    experts = r.required("n_routed_experts", int, minimum=1, maximum=MAX_EXPERTS)
    intermediate = r.required("moe_intermediate_size", int, minimum=1)
    top_k = r.required("num_experts_per_tok", int, minimum=1)
    groups = r.default("n_group", int, 1, minimum=1)
    topk_groups = r.default("topk_group", int, 1, minimum=1)
    hint = "compare with the config.json of the original release"
    if top_k > experts:
        r.invalid("num_experts_per_tok", found=str(top_k), accepted=f"at most n_routed_experts ({experts})", hint=hint)
    if experts % groups or (groups > 1 and experts // groups < 2):
        r.invalid("n_group", found=str(groups), accepted=f"a divisor of n_routed_experts ({experts})", hint=hint)
    if topk_groups > groups:
        r.invalid("topk_group", found=str(topk_groups), accepted=f"at most n_group ({groups})", hint=hint)
    elif groups > 1 and top_k > topk_groups * (experts // groups):
        r.invalid("topk_group", found=str(topk_groups), accepted=f"groups that hold {top_k} experts or more", hint=hint)
    return MoeDimensions(
        hidden=hidden,
        experts=experts,
        top_k=top_k,
        intermediate=intermediate,
        shared_intermediate=intermediate * r.default("n_shared_experts", int, 1, minimum=0),
        groups=groups,
        topk_groups=topk_groups,
        normalize=r.default("norm_topk_prob", bool, True),
        scaling=r.default("routed_scaling_factor", float, 1.0),
        limit=limit,
    )


def eos_ids(r: ConfigReader) -> tuple[int, ...]:
    """`eos_token_id`, one or a list, as a tuple."""
    value = r.values.get("eos_token_id")
    if value is None:
        return ()
    listed = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in listed):
        r.invalid(
            "eos_token_id", found=repr(value)[:80], accepted="a token id or a list of them",
            hint="compare with the config.json of the original release",
        )  # fmt: skip
        return ()
    return tuple(listed)
