"""Block FP8 as the models' vendor publishes it: 128x128 blocks, `weight_scale_inv`, for both families.

There is no tool to run: the definition is a few lines of torch. The last block of a row or column may be smaller; its
scale comes from the elements there are.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint import copy_companions, folders, read_config, read_tensors, write

BLOCK = 128
E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max

MLPS = re.compile(r"\.mlp\.((experts\.\d+|shared_experts)\.)?(gate|up|down)_proj\.weight$")
# Flash keeps kv_b_proj and the indexer in BF16, 5.2 only the part of its indexer that weighs the heads.
FLASH_ATTENTION = re.compile(r"\.self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|o_proj)\.weight$")
GLM52_ATTENTION = re.compile(
    r"\.self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj|indexer\.wq_b|indexer\.wk)\.weight$"
)


def _by_block(scale: Tensor, rows: int, columns: int) -> Tensor:
    return scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes [O, I] and float32 scales [ceil(O/128), ceil(I/128)]: the weight is code times its block's scale."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scale = blocks.abs().amax((1, 3)) / E4M3_MAX
    scale[scale == 0] = 1.0  # a block of zeros
    return (weight.float() / _by_block(scale, rows, columns)).to(torch.float8_e4m3fn), scale


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """The weight [O, I] in float32."""
    return codes.float() * _by_block(scale, *codes.shape)


def quantize_checkpoint(source: Path, out: Path) -> None:
    """Writes the block-FP8 variant of the BF16 checkpoint `source` to `out`."""
    config, tensors = read_config(source), read_tensors(source)
    flash = config["model_type"].startswith("glm5_next")
    sparse = {name.removesuffix("q_a_proj.weight") for name in tensors if name.endswith(".q_a_proj.weight")}

    def chosen(name: str) -> bool:
        if flash:  # a KDA layer has an o_proj too, which stays as it is
            inside = name[: name.find(".self_attn.") + len(".self_attn.")] in sparse
            return bool(MLPS.search(name) or (inside and FLASH_ATTENTION.search(name)))
        return bool(MLPS.search(name) or GLM52_ATTENTION.search(name))

    written: dict[str, Tensor] = {}
    kept = []
    for name, tensor in tensors.items():
        if chosen(name):
            written[name], written[name + "_scale_inv"] = quantize(tensor)
        else:
            written[name] = tensor
            if name.endswith(".weight") and tensor.dim() > 1:
                kept.append(name.removesuffix(".weight"))
    settings: dict[str, Any] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": kept,
    }
    write(out, config | {"quantization_config": settings}, written)
    copy_companions(source, out)


if __name__ == "__main__":
    quantize_checkpoint(*folders(__doc__))
