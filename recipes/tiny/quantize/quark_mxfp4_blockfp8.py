"""Quark: MXFP4 for the experts, block FP8 kept for dense MLPs, attention and the MTP layer, as AMD releases Flash.

As there, the source is the vendor's block FP8: this makes it first (fp8_block.py), and Quark leaves the excluded
layers as it finds them, so that each of them gets an entry in `layer_quant_config`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from fp8_block import quantize_checkpoint
from quark_files import mxfp4

from checkpoint import folders, mtp_prefix, read_tensors

EXCLUDE = ["*self_attn*", "*mlp.gate", "*mlp.gate_proj", "*mlp.up_proj", "*mlp.down_proj", "*visual*", "*lm_head*"]


def main() -> None:
    """Writes the variant."""
    source, out = folders(__doc__)
    with tempfile.TemporaryDirectory() as scratch:
        block_fp8 = Path(scratch) / "block-fp8"
        quantize_checkpoint(source, block_fp8)
        exclude = [*EXCLUDE, f"{mtp_prefix(read_tensors(source))}*"]
        mxfp4(block_fp8, out, exclude, ptpc=[], keep_excluded=True)


if __name__ == "__main__":
    main()
