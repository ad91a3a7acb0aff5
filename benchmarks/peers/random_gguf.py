"""Writes a GGUF of random weights, of the sizes in a checkpoint's configuration, that llama.cpp can load.

For `GlmMoeDsaForCausalLM` (llama.cpp's `glm-dsa`): experts and shared experts in MXFP4, everything else in one
type, norms and the router in F32 as llama.cpp's own conversion has them. Codes are random and scales keep the
rows of a product about as large as its input. No vocabulary but its size: nothing can be written with it, and
time does not depend on it. Needs the `gguf` package.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from hadron.errors import ConfigError, UnsupportedError

ARCHITECTURE = "glm-dsa"
MODEL_TYPE = "glm_moe_dsa"
SIGMOID = 2
#: Elements of one random block, which a tensor repeats.
BLOCK = 1 << 20
#: type -> elements and bytes of its block
TYPES = {"F32": (1, 4), "BF16": (1, 2), "Q8_0": (32, 34), "MXFP4": (32, 17)}

Tensors = dict[str, tuple[str, tuple[int, ...]]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def package() -> ModuleType:
    """The `gguf` package; `UnsupportedError` where it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise UnsupportedError(
            "a GGUF cannot be written",
            where="the Python package gguf",
            found=f"it is not installed: {error}",
            accepted="gguf 0.17 or later",
            hint="pip install gguf, or give a GGUF that is there already",
        ) from error
    return gguf  # type: ignore[no-any-return]


def metadata(config: dict[str, Any]) -> dict[str, int | float | bool | str | list[bool]]:
    """Keys and values of the GGUF, without those of the container; `ConfigError` for another model type."""
    if config.get("model_type") != MODEL_TYPE:
        raise ConfigError(
            "a GGUF cannot be written for this model",
            where="config.json, model_type",
            found=repr(config.get("model_type")),
            accepted=repr(MODEL_TYPE),
            hint="write a checkpoint with `python benchmarks/full_width.py small-mxfp4 FOLDER`",
        )
    latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "leading_dense_block_count": config["first_k_dense_replace"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": 1,  # absorbed: one latent for all heads
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": latent,
        "attention.key_length": latent + rope,
        "attention.value_length": latent,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rope,
        "attention.value_length_mla": config["v_head_dim"],
        "attention.indexer.head_count": config["index_n_heads"],
        "attention.indexer.key_length": config["index_head_dim"],
        "attention.indexer.top_k": config["index_topk"],
        "attention.indexer.types": _full(config),
        "rope.dimension_count": rope,
        "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": bool(config["norm_topk_prob"]),
        "expert_gating_func": SIGMOID,
    }
    return {f"{ARCHITECTURE}.{key}": value for key, value in values.items()} | {"tokenizer.ggml.model": "no_vocab"}


def _full(config: dict[str, Any]) -> list[bool]:
    return [kind == "full" for kind in config["indexer_types"][: config["num_hidden_layers"]]]


def tensors(config: dict[str, Any], rest: str) -> Tensors:
    """name -> type and shape (rows before columns). rest: the type of what is neither an expert nor in F32."""
    hidden, heads, q = config["hidden_size"], config["num_attention_heads"], config["q_lora_rank"]
    latent, rope, nope = config["kv_lora_rank"], config["qk_rope_head_dim"], config["qk_nope_head_dim"]
    value, experts = config["v_head_dim"], config["n_routed_experts"]
    index_heads, index = config["index_n_heads"], config["index_head_dim"]
    inner, shared = config["moe_intermediate_size"], config["n_shared_experts"] * config["moe_intermediate_size"]
    found: Tensors = {
        "token_embd.weight": (rest, (config["vocab_size"], hidden)),
        "output_norm.weight": ("F32", (hidden,)),
        "output.weight": (rest, (config["vocab_size"], hidden)),
    }

    def gated(at: str, suffix: str, dtype: str, width: int, *first: int) -> None:
        for part in ("gate", "up"):
            found[f"{at}.ffn_{part}{suffix}.weight"] = (dtype, (*first, width, hidden))
        found[f"{at}.ffn_down{suffix}.weight"] = (dtype, (*first, hidden, width))

    for layer, full in enumerate(_full(config)):
        at = f"blk.{layer}"
        found |= {
            f"{at}.attn_norm.weight": ("F32", (hidden,)),
            f"{at}.attn_q_a.weight": (rest, (q, hidden)),
            f"{at}.attn_q_a_norm.weight": ("F32", (q,)),
            f"{at}.attn_q_b.weight": (rest, (heads * (nope + rope), q)),
            f"{at}.attn_kv_a_mqa.weight": (rest, (latent + rope, hidden)),
            f"{at}.attn_kv_a_norm.weight": ("F32", (latent,)),
            f"{at}.attn_k_b.weight": (rest, (heads, latent, nope)),
            f"{at}.attn_v_b.weight": (rest, (heads, value, latent)),
            f"{at}.attn_output.weight": (rest, (hidden, heads * value)),
            f"{at}.ffn_norm.weight": ("F32", (hidden,)),
        }
        if full:
            found |= {
                f"{at}.indexer.attn_q_b.weight": (rest, (index_heads * index, q)),
                f"{at}.indexer.attn_k.weight": (rest, (index, hidden)),
                f"{at}.indexer.k_norm.weight": ("F32", (index,)),
                f"{at}.indexer.k_norm.bias": ("F32", (index,)),
                f"{at}.indexer.proj.weight": (rest, (index_heads, hidden)),
            }
        if layer < config["first_k_dense_replace"]:
            gated(at, "", rest, config["intermediate_size"])
            continue
        found[f"{at}.ffn_gate_inp.weight"] = ("F32", (experts, hidden))
        found[f"{at}.exp_probs_b.bias"] = ("F32", (experts,))
        gated(at, "_exps", "MXFP4", inner, experts)
        gated(at, "_shexp", "MXFP4", shared)
    return found


def values(name: str, dtype: str, shape: tuple[int, ...], random: np.random.Generator) -> Bytes:
    """Bytes of a tensor, uint8 [..., bytes of a row]."""
    elements, size = TYPES[dtype]
    columns = shape[-1]
    count = max(1, min(BLOCK, math.prod(shape)) // elements)
    deviation = 1 / math.sqrt(columns)
    if dtype == "F32":
        block = np.ones(count) if "norm.weight" in name else random.standard_normal(count) * deviation
        raw = block.astype(np.float32).view(np.uint8)
    elif dtype == "BF16":
        normal = (random.standard_normal(count) * deviation).astype(np.float32)
        raw = (normal.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    else:
        blocks = random.integers(0, 256, (count, size), dtype=np.uint8)
        if dtype == "MXFP4":  # random codes have a root mean square of about 3
            blocks[:, 0] = 127 + round(math.log2(deviation / 3)) + random.integers(0, 2, count)
        else:  # and random int8 one of 74
            blocks[:, :2] = np.full(1, deviation / 74, np.float16).view(np.uint8)
        raw = blocks.reshape(-1)
    return np.resize(raw, (*shape[:-1], columns // elements * size))


def write(config: dict[str, Any], path: Path, rest: str = "BF16") -> None:
    """Write the GGUF of a configuration (config.json as read) to `path`. rest: as for `tensors`."""
    gguf = package()
    pairs = metadata(config)
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    for key, value in pairs.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    wanted = tensors(config, rest)
    for name, (dtype, shape) in wanted.items():
        elements, size = TYPES[dtype]
        row = shape[-1] // elements * size
        writer.add_tensor_info(
            name, (*shape[:-1], row), np.dtype(np.uint8), math.prod(shape[:-1]) * row,
            raw_dtype=gguf.GGMLQuantizationType[dtype],
        )  # fmt: skip
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.default_rng(0)
    for name, (dtype, shape) in wanted.items():
        writer.write_tensor_data(values(name, dtype, shape, random))
    writer.close()
