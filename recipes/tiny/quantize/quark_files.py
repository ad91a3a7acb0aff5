"""Runs Quark from file to file on a CPU: what both of its variants share."""

from __future__ import annotations

from pathlib import Path

from fp8_block import dequantize
from quark.torch import ModelQuantizer
from quark.torch.quantization import file2file_quantization
from quark.torch.quantization.config.config import QConfig
from quark.torch.quantization.config.template import MXFP4Scheme, PTPCFP8Scheme


class _Cpu(str):
    """The device "cpu", which Quark's guard takes for CUDA.

    From a block-FP8 source Quark asks for CUDA, for the sake of one Triton kernel; that kernel is replaced below.
    """

    def __str__(self) -> str:
        return self

    def startswith(self, prefix: str, *bounds: int) -> bool:  # type: ignore[override]
        return prefix == "cuda" or super().startswith(prefix, *bounds)


def mxfp4(source: Path, out: Path, exclude: list[str], ptpc: list[str], *, keep_excluded: bool) -> None:
    """MXFP4 for every linear layer of `source` but those in `exclude`, per-channel FP8 for those in `ptpc`.

    Both are globs of module names. keep_excluded: leave excluded layers of a block-FP8 source in block FP8.
    """
    file2file_quantization._weight_dequant_fp8 = dequantize
    config = QConfig(
        global_quant_config=MXFP4Scheme().config,
        layer_quant_config={glob: PTPCFP8Scheme().config for glob in ptpc},
        exclude=exclude,
    )
    ModelQuantizer(config).direct_quantize_checkpoint(
        pretrained_model_path=str(source),
        save_path=str(out),
        keep_excluded_layers_as_original_model_state=keep_excluded,
        device=_Cpu("cpu"),
    )
    if not (out / "config.json").exists():  # Quark logs some errors and returns
        raise SystemExit("Quark wrote no checkpoint: see its messages above")
