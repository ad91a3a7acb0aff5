"""Quark: MXFP4 for the experts, MTP layer included, and FP8 with a scale a channel for attention, in the 5.2 style."""

from __future__ import annotations

import tempfile
from pathlib import Path

from quark_files import mxfp4

from checkpoint import copy_companions, folders, read_config, read_tensors, write

EXCLUDE = [
    "*indexer*",
    "*mlp.gate",
    "*lm_head",
    "*mlp.gate_proj",
    "*mlp.up_proj",
    "*mlp.down_proj",
    "*eh_proj",
]


def main() -> None:
    """Writes the variant."""
    source, out = folders(__doc__)
    with tempfile.TemporaryDirectory() as scratch:
        # Quark takes every file of the folder for weights or for something to copy.
        bare = Path(scratch) / "bf16"
        write(bare, read_config(source), read_tensors(source))
        copy_companions(source, bare)
        mxfp4(bare, out, EXCLUDE, ptpc=["*self_attn*"], keep_excluded=False)


if __name__ == "__main__":
    main()
