"""How far native kernels are from the definition, over a folder of checkpoints with golden results.

    python benchmarks/accuracy.py FOLDER

Three measures: the reference kernels against the goldens (float32); the native kernels with the router's
and the indexers' choices of the reference imposed; and free runs of the native kernels against the
goldens, beside what `transformers` does in bfloat16 (each `goldens.json` says). Errors are shares of the
largest logit. Random weights make choices hang by a thread: a trained model is steadier.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from hadron import LLM, Selections


def largest(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference as a share of the largest expected value."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def main(root: Path) -> None:
    """Print a row a checkpoint and the summary."""
    print(
        f"{'checkpoint':36} {'reference':>10} {'imposed':>10} {'free':>10} {'argmax':>8} {'bf16 hf':>10} {'argmax':>8}"
    )
    everything: list[tuple[float, ...]] = []
    for folder in sorted(p.parent for p in root.glob("*/goldens.json")):
        goldens = load_file(folder / "goldens.safetensors")
        drift = json.loads((folder / "goldens.json").read_text())["transformers_in_bfloat16"]
        reference = LLM(folder, kernels="reference", dtype="float32")
        native = LLM(folder, kernels="cpu", dtype="float32")
        rows = []
        for i, theirs in enumerate(drift):
            ids = goldens[f"prompt{i}.input_ids"].tolist()
            last, argmax = goldens[f"prompt{i}.last_logits"], goldens[f"prompt{i}.argmax"]
            choices = Selections()
            defined = reference.logits(ids, selections=choices)
            choices.imposed = True
            imposed, free = native.logits(ids, selections=choices), native.logits(ids)
            rows.append(
                (
                    largest(defined[-1], last), largest(imposed, defined), largest(free[-1], last),
                    float((free.argmax(axis=1) == argmax).mean()),
                    theirs["last_logits_max_diff"] / float(np.abs(last).max()), theirs["argmax_agreement"],
                )
            )  # fmt: skip
        worst = [max(column) if i not in (3, 5) else min(column) for i, column in enumerate(zip(*rows, strict=True))]
        print(
            f"{folder.name:36} "
            + " ".join(f"{v:10.1e}" if i not in (3, 5) else f"{v:8.2f}" for i, v in enumerate(worst))
        )
        everything += rows
    columns = list(zip(*everything, strict=True))
    print(
        f"worst reference {max(columns[0]):.1e}, worst imposed {max(columns[1]):.1e}; "
        f"free runs: median {statistics.median(columns[2]):.4f}, argmax {statistics.mean(columns[3]):.3f}; "
        f"transformers in bfloat16: median {statistics.median(columns[4]):.4f}, "
        f"argmax {statistics.mean(columns[5]):.3f}"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
