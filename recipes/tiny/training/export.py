"""Writes a model as a published checkpoint: hub names, bfloat16, float32 where releases have it."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from .config import TinyConfig, hub_config
from .model import TinyModel

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
STOPS = ("<|endoftext|>", "<|user|>", "<|observation|>")
KEPT_WIDE = ("e_score_correction_bias", "A_log", "dt_bias", "_base", "_scale")


def _split(name: str, value: Tensor, config: TinyConfig) -> dict[str, Tensor]:
    """What transformers keeps stacked, as published files store it."""
    prefix, _, leaf = name.rpartition(".")
    if leaf == "gate_up_proj":
        inner = config.moe_intermediate_size
        return {
            f"{prefix}.{e}.{part}.weight": half
            for e, both in enumerate(value)
            for part, half in zip(("gate_proj", "up_proj"), both.split(inner), strict=True)
        }
    if name.endswith("experts.down_proj"):
        return {f"{prefix}.{e}.down_proj.weight": one for e, one in enumerate(value)}
    if name.endswith("conv1d.weight"):
        return {
            f"{prefix.removesuffix('conv1d')}{part}_conv1d.weight": third
            for part, third in zip("qkv", value.chunk(3), strict=True)
        }
    for inside, outside in (
        ("forget_gate.", ""),
        ("attn_hc.", "hc_attn_"),
        ("ffn_hc.", "hc_ffn_"),
    ):
        name = name.replace(inside, outside)
    return {name: value}


def hub_tensors(model: TinyModel) -> dict[str, Tensor]:
    """Every tensor of `model` under its published name, in its published dtype."""
    config = model.config
    body = "model.language_model." if config.family == "glm5_next" else "model."
    mtp = f"layers.{config.num_layers}."
    out: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if name.startswith("mtp."):
            inner = name.removeprefix("mtp.")
            inner = "shared_head.norm.weight" if inner == "norm.weight" else inner.removeprefix("block.")
            name = mtp + inner
        full = name if name.startswith("lm_head") else body + name
        for key, part in _split(full, value, config).items():
            wide = key.endswith(KEPT_WIDE)
            out[key] = part.detach().to(torch.float32 if wide else torch.bfloat16).contiguous().clone()
    return out


def export(model: TinyModel, data: Path, out: Path) -> None:
    """Checkpoint folder `out`: tensors, configurations, and the tokenizer files of `data`."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = json.loads((data / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    stops, pad = [ids[token] for token in STOPS], ids["<|endoftext|>"]
    config = hub_config(model.config, stops, pad)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"do_sample": False, "eos_token_id": stops, "pad_token_id": pad}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    for name in TOKENIZER_FILES:
        if (data / name).exists():
            shutil.copyfile(data / name, out / name)
    save_file(hub_tensors(model), str(out / "model.safetensors"), metadata={"format": "pt"})
