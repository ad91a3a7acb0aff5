"""The tensors and configurations of GLM-5.2 and GLM-5.3-Flash as released, for `fake_checkpoints`.

Written from the released configurations, on purpose without anything of the package under test.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Entry = tuple[str, tuple[int, ...]]
VOCABULARY = 154880


@dataclass
class Fake:
    """Tensors and configuration of one checkpoint; `linear` asks `scheme_of` what each module gets."""

    scheme_of: Callable[[str], str]
    config: dict[str, Any] = field(default_factory=dict)
    side_files: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Entry] = field(default_factory=dict)
    schemes: dict[str, str] = field(default_factory=dict)
    inv: bool = False

    def plain(self, name: str, *shape: int, dtype: str = "BF16") -> None:
        """A parameter that no tool quantizes."""
        self.tensors[name] = (dtype, shape)

    def linear(self, module: str, out: int, into: int) -> None:
        """A linear weight, with the companions of its scheme."""
        scheme = self.schemes[module] = self.scheme_of(module)
        weight = f"{module}.weight"
        if scheme == "bf16":
            self.tensors[weight] = ("BF16", (out, into))
        elif scheme == "fp8_block":
            self.tensors[weight] = ("F8_E4M3", (out, into))
            scale = (math.ceil(out / 128), math.ceil(into / 128))
            self.tensors[weight + ("_scale_inv" if self.inv else "_scale")] = ("F32", scale)
        elif scheme == "mxfp4":
            self.tensors[weight] = ("U8", (out, into // 2))
            self.tensors[weight + "_scale"] = ("U8", (out, into // 32))
        elif scheme == "nvfp4":
            self.tensors[weight] = ("U8", (out, into // 2))
            self.tensors[weight + "_scale"] = ("F8_E4M3", (out, into // 16))
            self.tensors[weight + "_scale_2"] = ("F32", ())
            self.tensors[f"{module}.input_scale"] = ("F32", ())
        else:
            raise ValueError(scheme)


def mla(fake: Fake, at: str, hidden: int, q: int, nope: int, rope: int, indexer: bool, pooled: bool) -> None:
    """Latent attention: 64 heads, latents of 512, values of 256; indexer of 32 x 128."""
    fake.linear(f"{at}.q_a_proj", q, hidden)
    fake.plain(f"{at}.q_a_layernorm.weight", q)
    fake.linear(f"{at}.q_b_proj", 64 * (nope + rope), q)
    fake.linear(f"{at}.kv_a_proj_with_mqa", 512 + rope, hidden)
    fake.plain(f"{at}.kv_a_layernorm.weight", 512)
    fake.linear(f"{at}.kv_b_proj", 64 * (nope + 256), 512)
    fake.linear(f"{at}.o_proj", hidden, 64 * 256)
    if indexer:
        fake.linear(f"{at}.indexer.wq_b", 32 * 128, q)
        fake.linear(f"{at}.indexer.wk", 128, hidden)
        fake.plain(f"{at}.indexer.k_norm.weight", 128)
        fake.plain(f"{at}.indexer.k_norm.bias", 128)
        fake.linear(f"{at}.indexer.weights_proj", 32, hidden)
        if pooled:
            fake.plain(f"{at}.indexer.index_kpool_compress_ape", 4, 128)
            fake.plain(f"{at}.indexer.index_kpool_compress_gate", 128, hidden)


def kda(fake: Fake, at: str, hidden: int) -> None:
    """Delta attention of 64 x 128."""
    for part in "qkv":
        fake.linear(f"{at}.{part}_proj", 8192, hidden)
        fake.plain(f"{at}.{part}_conv1d.weight", 8192, 1, 4)
    for part in "fg":
        fake.linear(f"{at}.{part}_a_proj", 128, hidden)
        fake.linear(f"{at}.{part}_b_proj", 8192, 128)
    fake.linear(f"{at}.b_proj", 64, hidden)
    fake.plain(f"{at}.A_log", 64, dtype="F32")
    fake.plain(f"{at}.dt_bias", 8192, dtype="F32")
    fake.plain(f"{at}.o_norm.weight", 128)
    fake.linear(f"{at}.o_proj", hidden, 8192)


def gated(fake: Fake, at: str, hidden: int, inner: int) -> None:
    """gate, up and down."""
    fake.linear(f"{at}.gate_proj", inner, hidden)
    fake.linear(f"{at}.up_proj", inner, hidden)
    fake.linear(f"{at}.down_proj", hidden, inner)


def moe(fake: Fake, at: str, hidden: int, experts: int) -> None:
    """Router, routed experts of 2048 and one shared expert."""
    fake.linear(f"{at}.gate", experts, hidden)
    fake.plain(f"{at}.gate.e_score_correction_bias", experts, dtype="F32")
    for expert in range(experts):
        gated(fake, f"{at}.experts.{expert}", hidden, 2048)
    gated(fake, f"{at}.shared_experts", hidden, 2048)


def norms(fake: Fake, at: str, hidden: int) -> None:
    """The two norms of a block."""
    fake.plain(f"{at}.input_layernorm.weight", hidden)
    fake.plain(f"{at}.post_attention_layernorm.weight", hidden)


def mtp_head(fake: Fake, at: str, hidden: int) -> None:
    """What a multi-token-prediction layer has beside its block."""
    fake.linear(f"{at}.eh_proj", hidden, 2 * hidden)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        fake.plain(f"{at}.{norm}.weight", hidden)


def glm52(fake: Fake, layers: int, experts: int, mtp: bool) -> None:
    """GLM-5.2: all MLA, an indexer in 21 of 78 layers, three dense layers first."""
    hidden, dense = 6144, min(3, layers)
    full = [max(layer - 2, 0) % 4 == 0 for layer in range(layers)]
    fake.plain("model.embed_tokens.weight", VOCABULARY, hidden)
    for layer in range(layers + mtp):
        at = f"model.layers.{layer}"
        norms(fake, at, hidden)
        mla(fake, f"{at}.self_attn", hidden, 2048, 192, 64, layer == layers or full[layer], pooled=False)
        if layer < dense:
            gated(fake, f"{at}.mlp", hidden, 12288)
        else:
            moe(fake, f"{at}.mlp", hidden, experts)
    if mtp:
        mtp_head(fake, f"model.layers.{layers}", hidden)
    fake.plain("model.norm.weight", hidden)
    fake.linear("lm_head", VOCABULARY, hidden)
    fake.config = {
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "dtype": "bfloat16",
        "attention_bias": False, "first_k_dense_replace": dense, "hidden_act": "silu", "hidden_size": hidden,
        "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048, "indexer_rope_interleave": True,
        "indexer_types": ["full" if it else "shared" for it in full], "index_share_for_mtp_iteration": True,
        "intermediate_size": 12288, "kv_lora_rank": 512, "max_position_embeddings": 202752,
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense), "moe_intermediate_size": 2048,
        "n_group": 1, "n_routed_experts": experts, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": layers,
        "num_key_value_heads": 64, "num_nextn_predict_layers": 1, "q_lora_rank": 2048, "qk_head_dim": 256,
        "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_interleave": True,
        "rope_parameters": {"rope_theta": 8000000.0, "rope_type": "default"}, "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc",
        "v_head_dim": 256, "vocab_size": VOCABULARY, "eos_token_id": [154820, 154827, 154829],
    }  # fmt: skip


def flash(fake: Fake, layers: int, experts: int) -> None:
    """GLM-5.3-Flash: three KDA layers to one MLA, hyper-connections, vision, an MTP layer."""
    hidden, dense = 4096, min(3, layers)
    top = "model.language_model"
    sparse = [layer % 4 == 3 for layer in range(layers)]
    fake.plain(f"{top}.embed_tokens.weight", VOCABULARY, hidden)
    for layer in range(layers + 1):
        at = f"{top}.layers.{layer}"
        norms(fake, at, hidden)
        if layer < layers:
            for site in ("attn", "ffn"):
                fake.plain(f"{at}.hc_{site}_fn", 24, 4 * hidden)
                fake.plain(f"{at}.hc_{site}_base", 24, dtype="F32")
                fake.plain(f"{at}.hc_{site}_scale", 3, dtype="F32")
        if layer == layers or sparse[layer]:
            mla(fake, f"{at}.self_attn", hidden, 1536, 256, 0, indexer=True, pooled=True)
        else:
            kda(fake, f"{at}.self_attn", hidden)
        if layer < dense:
            gated(fake, f"{at}.mlp", hidden, 12288)
        else:
            moe(fake, f"{at}.mlp", hidden, experts)
    mtp_head(fake, f"{top}.layers.{layers}", hidden)
    fake.plain(f"{top}.norm.weight", hidden)
    fake.linear("lm_head", VOCABULARY, hidden)
    vision_config = vision(fake, hidden)
    text = {
        "model_type": "glm5_next_text", "dtype": "bfloat16", "attention_bias": False, "first_k_dense_replace": dense,
        "hc_eps": 1e-06, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hidden_act": "silu", "hidden_size": hidden,
        "index_head_dim": 128, "index_kpool": 4, "index_kpool_always_select_tail": True,
        "index_kpool_compress": True, "index_n_heads": 32, "index_share_for_mtp_iteration": True,
        "index_topk": 2048, "indexer_rope_interleave": True, "intermediate_size": 12288, "kv_lora_rank": 512,
        "layer_types": ["deepseek_sparse_attention" if it else "linear_attention" for it in sparse],
        "linear_attn_config": {
            "kda_layers": [i for i, it in enumerate(sparse) if not it],
            "full_attn_layers": [i for i, it in enumerate(sparse) if it],
            "num_heads": 64, "head_dim": 128, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0,
        },
        "max_position_embeddings": 1048576, "mhc": True, "mla_use_nope": True,
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense), "moe_intermediate_size": 2048,
        "moe_router_dtype": "float32", "n_group": 1, "n_routed_experts": experts, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": layers,
        "num_key_value_heads": 64, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_head_dim": 256,
        "qk_nope_head_dim": 256, "qk_rope_head_dim": 0, "rms_norm_eps": 1e-05, "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid", "swiglu_limit": 10.0, "tie_word_embeddings": False, "topk_group": 1,
        "topk_method": "noaux_tc", "v_head_dim": 256, "vocab_size": VOCABULARY,
    }  # fmt: skip
    fake.config = {
        "architectures": ["Glm5NextForConditionalGeneration"], "model_type": "glm5_next", "dtype": "bfloat16",
        "tie_word_embeddings": False, "text_config": text, "vision_config": vision_config,
    }  # fmt: skip


def vision(fake: Fake, out: int) -> dict[str, Any]:
    """The vision tower, 24 blocks."""
    at, hv, iv, pv = "model.visual", 1024, 4096, 10240
    fake.plain(f"{at}.patch_embed.proj.weight", hv, 3, 2, 14, 14)
    fake.plain(f"{at}.patch_embed.proj.bias", hv)
    for block in range(24):
        b = f"{at}.blocks.{block}"
        for norm, width in (("norm1", hv), ("norm2", hv), ("attn.q_norm", 64), ("attn.k_norm", 64)):
            fake.plain(f"{b}.{norm}.weight", width)
        shapes = {"attn.qkv": (3 * hv, hv), "attn.proj": (hv, hv), "mlp.gate_proj": (iv, hv), "mlp.up_proj": (iv, hv)}
        for name, (rows, columns) in {**shapes, "mlp.down_proj": (hv, iv)}.items():
            fake.linear(f"{b}.{name}", rows, columns)
            fake.plain(f"{b}.{name}.bias", rows)
    fake.plain(f"{at}.post_layernorm.weight", hv)
    fake.plain(f"{at}.downsample.weight", out, hv, 2, 2)
    fake.plain(f"{at}.downsample.bias", out)
    fake.linear(f"{at}.merger.proj", out, out)
    fake.plain(f"{at}.merger.post_projection_norm.weight", out)
    fake.plain(f"{at}.merger.post_projection_norm.bias", out)
    for name, shape in {"gate_proj": (pv, out), "up_proj": (pv, out), "down_proj": (out, pv)}.items():
        fake.linear(f"{at}.merger.{name}", *shape)
    return {
        "model_type": "glm5_next_vision", "attention_bias": True, "depth": 24, "hidden_act": "silu",
        "hidden_size": hv, "image_size": 336, "in_channels": 3, "intermediate_size": iv, "num_heads": 16,
        "out_hidden_size": out, "patch_size": 14, "projection_intermediate_size": pv, "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "axial"}, "spatial_merge_size": 2,
        "swiglu_limit": 10.0, "temporal_patch_size": 2,
    }  # fmt: skip
