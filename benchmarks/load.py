"""What loading costs: anonymous memory and mapped pages, apart, and the time to a built model.

    python benchmarks/load.py            a reduced GLM-5.3-Flash in MXFP4 and block FP8, every page touched
    python benchmarks/load.py --full     all 45 layers and 288 experts, no page touched but scales

The checkpoint is generated in a temporary folder: real shapes, sparse files of zeros. The bar: the peak of
anonymous memory, Python and torch included, is at most 5 % of the checkpoint and 300 MB, without caches.
Exit code 1 where it is missed.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
import threading
import time
from pathlib import Path

import fake_models
from fake_checkpoints import write

MB = 1 << 20
SHARE, FIXED = 0.05, 300 * MB


def smaps_rollup() -> dict[str, int]:
    """Bytes by kind of memory of this process."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    return {key: int(value.split()[0]) * 1024 for key, _, value in (line.partition(":") for line in lines)}


class PeakAnonymous(threading.Thread):
    """Samples anonymous memory every few milliseconds until stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self._stop_asked = threading.Event()

    def run(self) -> None:
        """Sample."""
        while not self._stop_asked.wait(0.005):
            self._sample()

    def _sample(self) -> None:
        status = Path("/proc/self/status").read_text()
        self.peak = max(self.peak, int(status.partition("RssAnon:")[2].split()[0]) * 1024)

    def stop(self) -> int:
        """The peak, a last sample included."""
        self._stop_asked.set()
        self.join()
        self._sample()
        return self.peak


def main() -> int:
    """Generate, plan, build, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true")
    full = parser.parse_args().full
    start = smaps_rollup()["Anonymous"]
    with tempfile.TemporaryDirectory() as folder:
        if full:
            write("amd-flash-mxfp4", Path(folder))
        else:
            fake_models.VOCABULARY = 8192
            write("amd-flash-mxfp4", Path(folder), layers=5, experts=16)
        sampler = PeakAnonymous()
        sampler.start()
        return report(folder, full, start, sampler)


def report(folder: str, full: bool, start: int, sampler: PeakAnonymous) -> int:
    """Load `folder` and print what it took."""
    import torch

    from hadron.engine.build import build_model
    from hadron.engine.config import EngineConfig
    from hadron.platforms import detect
    from hadron.preflight.build import make_plan

    imported = smaps_rollup()["Anonymous"]
    began = time.perf_counter()
    plan = make_plan(folder)
    planned = time.perf_counter()
    model = build_model(plan, EngineConfig(prefault=not full))
    built = time.perf_counter()
    peak, now = sampler.stop(), smaps_rollup()
    limit = SHARE * plan.bytes + FIXED
    cpu = detect("cpu")
    print(
        f"environment: {cpu.description}, {cpu.cores} cores, Linux {platform.release()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )
    print(f"checkpoint: {plan.bytes / 1e9:.2f} GB, {len(plan.facts.tensors)} tensors, {model.layer_count} layers run")
    print(
        f"time: plan {planned - began:.2f} s, build {built - planned:.2f} s{'' if full else ' with every page touched'}"
    )
    print(f"mapped pages: {(now['Rss'] - now['Anonymous']) / MB:.0f} MB resident, libraries included")
    print(
        f"anonymous: peak {peak / MB:.0f} MB = {100 * peak / plan.bytes:.1f} % of the checkpoint; at start "
        f"{start / MB:.0f} MB, with torch and hadron imported {imported / MB:.0f} MB, "
        f"at the end {now['Anonymous'] / MB:.0f} MB"
    )
    verdict = "met" if peak <= limit else "MISSED"
    print(f"bar: {SHARE:.0%} of the checkpoint + {FIXED // MB} MB = {limit / MB:.0f} MB: {verdict}")
    return 0 if peak <= limit else 1


if __name__ == "__main__":
    sys.exit(main())
