"""Whole models on checkpoints of full width, against their bars, with transformers beside where it fits.

    python benchmarks/models.py FOLDER ...     folders that `full_width.py` wrote
    python benchmarks/models.py FOLDER --peer  transformers in bfloat16 in the same run

Exit code 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from hadron.bench import model
from hadron.bench.model import ModelReport
from hadron.bench.report import model_lines
from hadron.engine.config import EngineConfig

FRACTION, CALLS, GROWTH = 0.75, 12.0, 1.3
CONTEXTS = (1024, 4096, 65536, 262144)


def judge(decode: ModelReport) -> list[tuple[str, float, float, bool]]:
    """(what, measured, bar, met) of a decode report."""
    steps = {step.context: step for step in decode.steps}
    first = steps[min(steps)]
    calls = max(step.profile.native_calls_a_layer for step in decode.steps)
    found = [
        ("decode, fraction of read bandwidth", first.fraction, FRACTION, first.fraction >= FRACTION),
        ("native calls a layer", calls, CALLS, calls <= CALLS),
    ]
    if {4096, 262144} <= set(steps):
        near, far = steps[4096], steps[262144]
        explained = (far.context_bytes - near.context_bytes) / far.limit_value / 1e6
        growth = (far.ms - explained) / near.ms
        found.append(("step at 256 k over step at 4 k", growth, GROWTH, growth <= GROWTH))
    return found


def main() -> int:
    """Measure each folder, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    met = True
    for folder in options.folders:
        positions = json.loads((folder / "config.json").read_text())
        longest = positions.get("text_config", positions)["max_position_embeddings"]
        contexts = tuple(c for c in CONTEXTS if c <= longest)
        config = EngineConfig(prefault=True)
        decode = model.measure(folder, config, model.Asked(contexts=contexts, steps=options.steps))
        prefill = model.measure(folder, config, model.Asked(contexts=(0,), tokens=(128, 512), steps=3))
        for report in (decode, prefill):
            print("\n".join(line.text for line in model_lines(report)), end="\n\n")
        for what, value, bar, good in judge(decode):
            print(f"{what}: {value:.2f}, bar {bar}: {'met' if good else 'MISSED'}")
            met &= good
        if options.peer:
            peer = Path(__file__).with_name("peers") / "transformers_bf16.py"
            subprocess.run([sys.executable, peer, folder], check=False)
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
