"""llmcompressor: NVFP4 weights (NVFP4A16) for the routed experts; a BF16 MTP layer that nothing excludes.

That is how many NVFP4 releases come about: the tool is run on a model without its MTP layer, whose tensors are added
afterwards, while the configuration still speaks of the tool's model only. To leave no room for a pattern that happens
to match, `ignore` has exact names.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from llmcompressor import model_free_ptq

from checkpoint import add_shard, copy_companions, folders, mtp_prefix, read_config, read_tensors, write

ROUTED = re.compile(r"\.mlp\.experts\.\d+\.")
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def main() -> None:
    """Writes the variant."""
    source, out = folders(__doc__)
    tensors = read_tensors(source)
    mtp = mtp_prefix(tensors)
    trunk = {name: tensor for name, tensor in tensors.items() if not name.startswith(mtp)}
    ignore = [
        name.removesuffix(".weight")
        for name, tensor in trunk.items()
        if name.endswith(".weight") and tensor.dim() > 1 and not ROUTED.search(name)
    ]
    with tempfile.TemporaryDirectory() as scratch:
        bare = Path(scratch) / "bf16"
        write(bare, read_config(source), trunk)
        copy_companions(source, bare)
        model_free_ptq(str(bare), str(out), scheme="NVFP4A16", ignore=ignore, device="cpu")
    (out / "model.safetensors").rename(out / SHARDS[0])
    add_shard(out, SHARDS[1], {name: tensors[name] for name in tensors.keys() - trunk.keys()})


if __name__ == "__main__":
    main()
