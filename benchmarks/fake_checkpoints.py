"""Writes header-only fakes of published checkpoints: real names, dtypes, shapes and configuration.

    python benchmarks/fake_checkpoints.py amd-flash-mxfp4 /tmp/fake

The files are sparse: hundreds of gigabytes long, a few megabytes on disk, all weights zero. Shapes are
the released ones; what is quantized follows the model cards. `--layers` and `--experts` make smaller
ones. The kinds:

    amd-glm52-mxfp4      Quark file-to-file, MXFP4 routed and shared experts, no MTP tensors
    nvidia-glm52-nvfp4   ModelOpt, NVFP4 routed experts, MTP layer in bf16
    amd-flash-mxfp4      Quark from block FP8: MXFP4 experts, 924 layers kept in block FP8
    zai-glm52-fp8        DeepSeek-style block FP8
    zai-flash-fp8        the same of GLM-5.3-Flash
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fake_models import Entry, Fake, flash, glm52

BYTES = {"F32": 4, "BF16": 2, "U8": 1, "F8_E4M3": 1}
SHARD_BYTES = 5 * 10**9


def spec(dtype: str, scheme: str, dynamic: bool, **rest: Any) -> dict[str, Any]:
    """One tensor's entry in a Quark configuration."""
    base: dict[str, Any] = {"dtype": dtype, "is_dynamic": dynamic, "qscheme": scheme, "ch_axis": None}
    return {**base, "group_size": None, "block_size": None, "symmetric": True, "scale_format": None, **rest}


def quark(fake: Fake) -> dict[str, Any]:
    """What Quark's file-to-file quantizer writes: exact names for everything that is not MXFP4."""
    group = {"ch_axis": -1, "group_size": 32, "scale_format": "e8m0", "scale_calculation_mode": "even"}
    mxfp4 = {
        "input_tensors": spec("fp4", "per_group", True, **group),
        "weight": spec("fp4", "per_group", False, **group),
    }
    kept = {
        "input_tensors": spec("fp8_e4m3", "per_group", True, ch_axis=-1, group_size=128),
        "weight": spec("fp8_e4m3", "per_block", False, block_size=[128, 128]),
    }

    def by_scheme(scheme: str) -> list[str]:
        return sorted(name for name, it in fake.schemes.items() if it == scheme)

    ends = {"output_tensors": None, "bias": None, "target_device": None}
    return {
        "quant_method": "quark",
        "global_quant_config": {**mxfp4, **ends},
        "layer_type_quant_config": {},
        "layer_quant_config": {name: {**kept, **ends} for name in by_scheme("fp8_block")},
        "exclude": by_scheme("bf16"),
        "algo_config": None, "softmax_quant_spec": None, "kv_cache_quant_config": {}, "kv_cache_post_rope": False,
        "quant_mode": "eager_mode", "version": "0.13",
        "export": {"kv_cache_group": [], "min_kv_scale": 0.0, "pack_method": "reorder",
                   "weight_format": "real_quantized", "weight_merge_groups": None},
    }  # fmt: skip


def is_routed(module: str) -> bool:
    """Whether a module is a projection of a routed expert."""
    return ".experts." in module


def block_fp8(module: str, flash_model: bool) -> str:
    """What the zai-org FP8 releases store in block FP8."""
    leaf = module.rpartition(".")[2]
    if ".visual." in module or leaf in ("gate", "eh_proj", "weights_proj", "lm_head"):
        return "bf16"
    if ".mlp." in module:
        return "fp8_block"
    attention = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"} | (set() if flash_model else {"kv_b_proj", "wq_b", "wk"})
    return "fp8_block" if leaf in attention else "bf16"


def build(kind: str, layers: int | None = None, experts: int | None = None) -> Fake:
    """The fake of that kind, in memory."""
    is_flash = "flash" in kind
    layers = layers or (45 if is_flash else 78)
    experts = experts or (288 if is_flash else 256)
    mtp_at = f".layers.{layers}."

    def scheme_of(module: str) -> str:
        sparse = is_flash and ".self_attn.o_proj" in module and int(module.split(".")[3]) % 4 == 3
        attention_out = module.endswith("self_attn.o_proj") and (not is_flash or sparse or mtp_at in module)
        source = "fp8_block" if attention_out else block_fp8(module, is_flash)
        if kind.startswith("zai"):
            return source
        if kind.startswith("nvidia"):
            return "nvfp4" if is_routed(module) and mtp_at not in module else "bf16"
        experts_of_it = (is_routed(module) or ".shared_experts." in module) and mtp_at not in module
        return "mxfp4" if experts_of_it else (source if is_flash else "bf16")

    fake = Fake(scheme_of, inv=kind.startswith("zai"))
    if is_flash:
        flash(fake, layers, experts)
    else:
        glm52(fake, layers, experts, mtp=not kind.startswith("amd"))
    not_quantized = sorted(name for name, it in fake.schemes.items() if it == "bf16")
    if kind.startswith("zai"):
        fake.config["quantization_config"] = {
            "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
            "modules_to_not_convert": not_quantized,
        }  # fmt: skip
    elif kind.startswith("nvidia"):
        _modelopt(fake, layers)
    else:
        fake.config["quantization_config"] = quark(fake)
    return fake


def _modelopt(fake: Fake, layers: int) -> None:
    patterns = ["lm_head", "model.embed_tokens"]
    for layer in range(layers):
        at = f"model.layers.{layer}"
        patterns.append(f"{at}.self_attn*")
        patterns += [f"{at}.mlp.gate", f"{at}.mlp.shared_experts*"] if layer >= 3 else [f"{at}.mlp*"]
    producer = {"name": "modelopt", "version": "0.47.0"}
    four_bits = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    fake.config["quantization_config"] = {
        "quant_method": "modelopt", "quant_algo": "NVFP4", "producer": producer, "ignore": patterns,
        "config_groups": {
            "group_0": {"input_activations": four_bits, "weights": four_bits, "targets": ["Linear"]},
        },
    }  # fmt: skip
    fake.side_files["hf_quant_config.json"] = {
        "producer": producer,
        "quantization": {
            "quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": patterns,
        },
    }  # fmt: skip


def shards(tensors: dict[str, Entry]) -> Iterator[dict[str, Entry]]:
    """Tensors in runs of about `SHARD_BYTES`."""
    run: dict[str, Entry] = {}
    size = 0
    for name, (dtype, shape) in tensors.items():
        if size > SHARD_BYTES:
            yield run
            run, size = {}, 0
        run[name] = (dtype, shape)
        size += BYTES[dtype] * math.prod(shape)
    if run:
        yield run


def write_shard(path: Path, tensors: dict[str, Entry]) -> int:
    """A sparse safetensors file, in the order that the safetensors library writes; its data's length."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    cursor = 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: (-BYTES[item[1][0]], item[0])):
        end = cursor + BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [cursor, end]}
        cursor = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + cursor)
    return cursor


def write(kind: str, folder: Path, layers: int | None = None, experts: int | None = None) -> Fake:
    """Write the fake of that kind into `folder`; `layers` and `experts` make it smaller."""
    fake = build(kind, layers, experts)
    write_files(fake, folder)
    return fake


def write_files(fake: Fake, folder: Path) -> None:
    """Write shards of zeros, index, configuration and side files."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = list(shards(fake.tensors))
    weight_map = {}
    total = 0
    for number, run in enumerate(runs, 1):
        name = f"model-{number:05d}-of-{len(runs):05d}.safetensors"
        total += write_shard(folder / name, run)
        weight_map.update(dict.fromkeys(run, name))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    for name, content in {"config.json": fake.config, **fake.side_files}.items():
        (folder / name).write_text(json.dumps(content, indent=2))


KINDS = ("amd-glm52-mxfp4", "nvidia-glm52-nvfp4", "amd-flash-mxfp4", "zai-glm52-fp8", "zai-flash-fp8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--experts", type=int)
    options = parser.parse_args()
    fake = write(options.kind, options.folder, options.layers, options.experts)
    print(f"{options.folder}: {len(fake.tensors)} tensors")


if __name__ == "__main__":
    main()
