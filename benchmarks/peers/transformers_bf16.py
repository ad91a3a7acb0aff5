"""transformers in bfloat16 on the shapes of a checkpoint: tokens a second of decoding and of a prompt.

    python benchmarks/peers/transformers_bf16.py FOLDER [--prompt 128] [--tokens 16]

Takes the configuration of FOLDER (see `full_width.py`), without its quantization, and random weights, which
must fit into memory as bfloat16.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM


def build(folder: Path) -> torch.nn.Module:
    """The model with weights of one block of random numbers."""
    values = json.loads((folder / "config.json").read_text())
    values.pop("quantization_config", None)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    need = sum(p.numel() * p.element_size() for p in model.parameters())
    if need > 0.8 * psutil.virtual_memory().available:
        raise SystemExit(f"{folder}: {need / 1e9:.1f} GB as bfloat16 do not fit into this memory: not measured")
    model = model.to_empty(device="cpu").eval()
    block = torch.randn(1 << 20)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" in name:
            continue
        scale = 1 / tensor.shape[-1] ** 0.5 if tensor.dim() > 1 else 0.0
        flat = tensor.data.view(-1)
        for start in range(0, len(flat), len(block)):
            part = flat[start : start + len(block)]
            part.copy_(block[: len(part)] * scale + (1.0 if tensor.dim() == 1 and "norm" in name else 0.0))
    rope = model.model.rotary_emb
    fresh = type(rope)(config=config)
    rope.inv_freq = fresh.inv_freq
    return model


def main() -> None:
    """Build, time, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = build(options.folder)
    ids = torch.randint(1, 1000, (1, options.prompt))
    with torch.inference_mode():
        model(ids, logits_to_keep=1)
        begin = time.perf_counter()
        out = model(ids, use_cache=True, logits_to_keep=1)
        prompt = time.perf_counter() - begin
        seconds = []
        for _ in range(options.tokens):
            begin = time.perf_counter()
            out = model(ids[:, :1], past_key_values=out.past_key_values, use_cache=True)
            seconds.append(time.perf_counter() - begin)
    median = sorted(seconds)[len(seconds) // 2]
    print(
        f"transformers bf16, {options.threads} threads: decode {1 / median:.1f} tokens/s behind {options.prompt}, "
        f"prompt of {options.prompt} {options.prompt / prompt:.0f} tokens/s"
    )


if __name__ == "__main__":
    main()
