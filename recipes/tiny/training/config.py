"""Dimensions of the two tiny models, and the `config.json` that says them.

One dataclass serves both families. What only Flash has (KDA, hyper-connections, pools, clamp) is zero or None in
5.2-style, what only 5.2 has (rotary part, shared indexers) is zero or absent in Flash-style.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class TinyConfig:
    """Dimensions of one model; names follow the checkpoint's `config.json`, `None` or 0 where a family lacks a part."""

    family: str  # "glm5_next" or "glm_moe_dsa"
    vocab_size: int
    hidden_size: int
    layer_types: tuple[str, ...]  # "kda" or "mla", one a layer
    mlp_types: tuple[str, ...]  # "dense" or "sparse"
    indexer_types: tuple[str, ...]  # "full" or "shared"; of no meaning on KDA layers
    num_heads: int = 4
    q_lora_rank: int = 128
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 0
    v_head_dim: int = 32
    rope_theta: float = 10_000.0
    index_n_heads: int = 4
    index_head_dim: int = 32
    index_topk: int = 64
    index_kpool: int = 1
    intermediate_size: int = 384
    moe_intermediate_size: int = 64
    n_routed_experts: int = 16
    num_experts_per_tok: int = 4
    n_shared_experts: int = 1
    routed_scaling_factor: float = 2.5
    swiglu_limit: float | None = None
    kda_heads: int = 0
    kda_head_dim: int = 32
    kda_conv: int = 4
    kda_lower_bound: float = -5.0
    hc_mult: int = 0
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 4096

    @property
    def num_layers(self) -> int:
        """Layers of the trunk, the MTP layer not counted."""
        return len(self.layer_types)

    @property
    def latent_norm_eps(self) -> float:
        """Epsilon of `q_a_layernorm` and `kv_a_layernorm`: transformers leaves its default in 5.2-style."""
        return self.rms_norm_eps if self.family == "glm5_next" else 1e-6


FLASH = TinyConfig(
    family="glm5_next",
    vocab_size=1024,
    hidden_size=192,
    layer_types=("kda", "kda", "kda", "mla") * 2,
    mlp_types=("dense",) * 2 + ("sparse",) * 6,
    indexer_types=("full",) * 8,
    index_kpool=4,
    swiglu_limit=2.0,
    kda_heads=4,
    hc_mult=4,
)

GLM52 = TinyConfig(
    family="glm_moe_dsa",
    vocab_size=1024,
    hidden_size=192,
    layer_types=("mla",) * 6,
    mlp_types=("dense",) + ("sparse",) * 5,
    indexer_types=("full", "full", "shared", "shared", "full", "shared"),
    qk_rope_head_dim=32,
    v_head_dim=64,
)

MODELS = {"flash": FLASH, "glm52": GLM52}


def with_vocabulary(config: TinyConfig, tokens: int) -> TinyConfig:
    """`config` with a vocabulary of at least `tokens`, rounded up to a multiple of 128."""
    return replace(config, vocab_size=-(-tokens // 128) * 128)


def as_dict(config: TinyConfig) -> dict[str, Any]:
    """Plain values, for the state file."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(config).items()}


def from_dict(values: dict[str, Any]) -> TinyConfig:
    """The inverse of `as_dict`."""
    return TinyConfig(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})


def _common(config: TinyConfig) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "first_k_dense_replace": config.mlp_types.index("sparse"),
        "head_dim": config.qk_rope_head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "index_head_dim": config.index_head_dim,
        "index_n_heads": config.index_n_heads,
        "index_share_for_mtp_iteration": True,
        "index_topk": config.index_topk,
        "indexer_rope_interleave": True,
        "indexer_types": list(config.indexer_types),
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "kv_lora_rank": config.kv_lora_rank,
        "max_position_embeddings": config.max_position_embeddings,
        "mlp_layer_types": list(config.mlp_types),
        "moe_intermediate_size": config.moe_intermediate_size,
        "n_group": 1,
        "n_routed_experts": config.n_routed_experts,
        "n_shared_experts": config.n_shared_experts,
        "norm_topk_prob": True,
        "num_attention_heads": config.num_heads,
        "num_experts_per_tok": config.num_experts_per_tok,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_heads,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": config.q_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "routed_scaling_factor": config.routed_scaling_factor,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_cache": True,
        "v_head_dim": config.v_head_dim,
        "vocab_size": config.vocab_size,
    }


def hub_config(config: TinyConfig, eos_token_id: list[int], pad_token_id: int) -> dict[str, Any]:
    """The `config.json` of a checkpoint of `config`, spelled as published ones are."""
    text = _common(config) | {"eos_token_id": eos_token_id, "pad_token_id": pad_token_id, "dtype": "bfloat16"}
    if config.family == "glm_moe_dsa":
        return text | {
            "architectures": ["GlmMoeDsaForCausalLM"],
            "layer_types": ["indexed_attention"] * config.num_layers,
            "mlp_bias": False,
            "model_type": "glm_moe_dsa",
            "moe_layer_freq": 1,
            "rope_interleave": True,
            "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
            "transformers_version": "5.23.0",
        }
    kda = [i for i, kind in enumerate(config.layer_types) if kind == "kda"]
    text |= {
        "hc_eps": config.hc_eps,
        "hc_mult": config.hc_mult,
        "hc_sinkhorn_iters": config.hc_sinkhorn_iters,
        "index_kpool": config.index_kpool,
        "index_kpool_always_select_tail": True,
        "index_kpool_compress": True,
        "layer_types": [
            "linear_attention" if kind == "kda" else "deepseek_sparse_attention" for kind in config.layer_types
        ],
        "linear_attn_config": {
            "kda_layers": kda,
            "full_attn_layers": [i for i in range(config.num_layers) if i not in kda],
            "num_heads": config.kda_heads,
            "head_dim": config.kda_head_dim,
            "short_conv_kernel_size": config.kda_conv,
            "gate_lower_bound": config.kda_lower_bound,
        },
        "mhc": True,
        "mla_use_nope": True,
        "model_type": "glm5_next_text",
        "moe_router_dtype": "float32",
        "swiglu_limit": config.swiglu_limit,
    }
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "dtype": "bfloat16",
        "model_type": "glm5_next",
        "text_config": text,
        "tie_word_embeddings": False,
        "transformers_version": "5.23.0",
        # The files hold no vision tower, which depth 0 says. Without sizes, transformers builds one of 24 layers.
        "vision_config": {
            "depth": 0,
            "hidden_size": 32,
            "image_size": 16,
            "in_channels": 3,
            "intermediate_size": 64,
            "model_type": "glm5_next_vision",
            "num_heads": 2,
            "out_hidden_size": config.hidden_size,
            "patch_size": 4,
            "projection_intermediate_size": 64,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }
