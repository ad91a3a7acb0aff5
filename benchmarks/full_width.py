"""Writes checkpoints of full width with random weights: real layer shapes, names and configuration.

    python benchmarks/full_width.py amd-flash-mxfp4 FOLDER               as many layers as fit in 12 GB
    python benchmarks/full_width.py amd-flash-mxfp4 FOLDER --experts 64  fewer experts, and so more layers
    python benchmarks/full_width.py small-mxfp4 FOLDER                   the model of 1.5 G parameters

Kinds are those of `fake_checkpoints`, and `small-mxfp4`: GLM-5.2's blocks at hidden 2048, 5 layers, 64
experts of 1024 in Quark MXFP4, attention and head in bf16. Codes are random and valid; scales make the rows
of a product about as large as its input, so that logits are finite. What does not run (the
multi-token-prediction layer, the vision tower) is there, as holes of zeros. A block of random numbers is
used again and again: time does not depend on it.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import BinaryIO

import numpy as np

import fake_checkpoints
import fake_models
from fake_checkpoints import BYTES, KINDS
from fake_models import Entry, Fake, gated, mla, norms

BUDGET = 12 * 10**9
BLOCK = 1 << 24
SMALL = "small-mxfp4"
SMALL_SIZES = (2048, 32000, 1024)  # hidden, vocabulary, inner width of an expert
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def small(fake: Fake, layers: int = 5, experts: int = 64) -> None:
    """1.5 G parameters: 16 heads of 192 + 64, two dense layers, top 8."""
    fake_models.glm52(fake, layers=1, experts=1, mtp=False)  # its configuration
    fake.tensors.clear()
    fake.schemes.clear()
    (hidden, vocabulary, inner), dense, heads = SMALL_SIZES, 2, 16
    full = [max(layer - 2, 0) % 4 == 0 for layer in range(layers)]
    fake.plain("model.embed_tokens.weight", vocabulary, hidden)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        norms(fake, at, hidden)
        mla(fake, f"{at}.self_attn", hidden, 1024, 192, 64, full[layer], pooled=False)
        for name, shape in {"q_b_proj": (heads * 256, 1024), "kv_b_proj": (heads * 448, 512),
                            "o_proj": (hidden, heads * 256)}.items():  # fmt: skip
            fake.linear(f"{at}.self_attn.{name}", *shape)
        if layer < dense:
            gated(fake, f"{at}.mlp", hidden, 3 * hidden)
            continue
        fake.linear(f"{at}.mlp.gate", experts, hidden)
        fake.plain(f"{at}.mlp.gate.e_score_correction_bias", experts, dtype="F32")
        for expert in [*(f"experts.{e}" for e in range(experts)), "shared_experts"]:
            gated(fake, f"{at}.mlp.{expert}", hidden, inner)
    fake.plain("model.norm.weight", hidden)
    fake.linear("lm_head", vocabulary, hidden)
    fake.config |= {
        "first_k_dense_replace": dense, "hidden_size": hidden, "intermediate_size": 3 * hidden,
        "indexer_types": ["full" if it else "shared" for it in full], "moe_intermediate_size": inner,
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense), "n_routed_experts": experts,
        "num_attention_heads": heads, "num_key_value_heads": heads, "num_hidden_layers": layers,
        "num_nextn_predict_layers": 0, "q_lora_rank": 1024, "vocab_size": vocabulary, "eos_token_id": [0],
    }  # fmt: skip


def build(kind: str, layers: int | None, experts: int | None) -> Fake:
    """The checkpoint of that kind, in memory."""
    if kind != SMALL:
        return fake_checkpoints.build(kind, layers, experts)
    fake = Fake(lambda module: "mxfp4" if ".experts." in module or ".shared_experts." in module else "bf16")
    small(fake, layers or 5, experts or 64)
    fake.config["quantization_config"] = fake_checkpoints.quark(fake)
    return fake


def runs(name: str, fake: Fake) -> bool:
    """Whether a tensor belongs to what is run."""
    layers = fake.config.get("text_config", fake.config)["num_hidden_layers"]
    return ".visual." not in name and f".layers.{layers}." not in name


def size(fake: Fake) -> int:
    """Bytes of what is run."""
    return sum(BYTES[d] * math.prod(shape) for name, (d, shape) in fake.tensors.items() if runs(name, fake))


def fitting(kind: str, experts: int | None, budget: int) -> int | None:
    """The most layers within the budget; None where the kind has its own number."""
    if kind == SMALL:
        return None
    layers = 4  # three dense and a sparse one, latent attention among them
    while size(build(kind, layers + 1, experts)) <= budget:
        layers += 1
    return layers


class Values:
    """Random bytes for tensors, by what they are."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self._raw = random.integers(0, 256, BLOCK, dtype=np.uint8)
        words = random.integers(0, 1 << 16, BLOCK // 2, dtype=np.uint16)
        self._bf16 = words & np.uint16(0x80FF)  # sign, lowest bit of the exponent, mantissa
        self._normal = random.standard_normal(1 << 20, dtype=np.float32)

    def block(self, name: str, entry: Entry) -> Bytes:
        """Bytes to repeat through a tensor."""
        dtype, shape = entry
        columns = shape[-1] if len(shape) > 1 else 1
        leaf = name.rpartition(".")[2]
        if dtype == "U8":  # E8M0: random FP4 has a root mean square of about 3
            e8m0 = 127 - round(math.log2(3 * math.sqrt(columns * 32)))
            return self._raw if leaf == "weight" else (self._raw & 1) + np.uint8(e8m0)
        if dtype == "F8_E4M3":
            if leaf == "weight":  # 0.25 to 1.9, both signs
                return (self._raw & 0x9F) | np.uint8(0x20)
            return (self._raw & 0x07) | np.uint8(0x38)  # 1 to 1.9
        if dtype == "BF16":
            return self._plain(name, leaf, columns).view(np.uint8)
        return self._float(name, leaf, columns).view(np.uint8)

    def _plain(self, name: str, leaf: str, columns: int) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
        if "norm" in name and leaf == "weight":
            return np.full(BLOCK // 2, 0x3F80, np.uint16)  # 1
        scale = 0.3 if "conv1d" in name else 1 / math.sqrt(columns if columns > 1 else 1024)
        exponent = (127 + round(math.log2(scale))) & ~1
        return self._bf16 | np.uint16(exponent << 7)

    def _float(self, name: str, leaf: str, columns: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        if leaf in ("weight_scale", "weight_scale_inv"):  # of blocks of 128 x 128
            return np.full(1 << 16, 1 / math.sqrt(columns * 128), np.float32)
        if leaf == "weight_scale_2":
            return np.full(1, 0.005, np.float32)
        if leaf == "input_scale":
            return np.full(1, 0.01, np.float32)
        return self._normal * np.float32(0.1)


def fill(path: Path, fake: Fake, values: Values) -> None:
    """Write the data of a shard's tensors that run."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__" and runs(name, fake):
                begin, end = entry["data_offsets"]
                file.seek(8 + length + begin)
                block = values.block(name, (entry["dtype"], tuple(entry["shape"])))
                _repeat(file, block, end - begin, begin // 8)


def _repeat(file: BinaryIO, block: Bytes, count: int, start: int) -> None:
    """`count` bytes of a block, from another place of it for every tensor."""
    at = start % len(block) // 4 * 4
    while count:
        piece = block[at : at + count]
        file.write(piece.tobytes())
        count -= len(piece)
        at = 0


def write(kind: str, folder: Path, layers: int | None = None, experts: int | None = None) -> Fake:
    """Write the checkpoint into `folder`."""
    fake = build(kind, layers, experts)
    fake_checkpoints.write_files(fake, folder)
    values = Values()
    for path in sorted(folder.glob("*.safetensors")):
        fill(path, fake, values)
    return fake


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=(*KINDS, SMALL))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="instead of as many as fit")
    parser.add_argument("--experts", type=int)
    parser.add_argument("--budget", type=float, default=BUDGET / 1e9, help="GB of weights that run")
    options = parser.parse_args()
    layers = options.layers or fitting(options.kind, options.experts, int(options.budget * 1e9))
    fake = write(options.kind, options.folder, layers, options.experts)
    text = fake.config.get("text_config", fake.config)
    print(f"{options.folder}: {text['num_hidden_layers']} layers, {size(fake) / 1e9:.2f} GB that run")


if __name__ == "__main__":
    main()
