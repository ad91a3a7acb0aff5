"""How long `hadron check` takes on checkpoints of full shape, as a process from start to exit.

    python benchmarks/check.py           the three large fakes and a small one
    python benchmarks/check.py --small   the small one only

Cold drops the checkpoint's files from the page cache first; warm is the best of three further runs. The
baseline is what plain Python needs in the same run for the parsing alone: `json.loads` of every header and
of the index. Bars: 2 s for the summary, 4 s for `--json`, 0.3 s for small checkpoints. Exit code 1 where
one is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fake_checkpoints import write
from hadron.platforms import detect

LARGE = {
    "nvidia-glm52-nvfp4": "nvidia/GLM-5.2-NVFP4",
    "amd-glm52-mxfp4": "amd/GLM-5.2-MXFP4",
    "amd-flash-mxfp4": "amd/GLM-5.3-Flash-Quark-MXFP4",
}
SUMMARY_BAR, JSON_BAR, SMALL_BAR = 2.0, 4.0, 0.3


def forget(folder: Path) -> None:
    """Drop the folder's files from the page cache."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def run(folder: Path, *options: str) -> float:
    """Seconds of one `hadron check`."""
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "hadron", "check", str(folder), *options], stdout=subprocess.PIPE)
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise SystemExit(f"hadron check {folder} ended with {done.returncode}:\n{done.stdout.decode()[-2000:]}")
    return seconds


def baseline(folder: Path) -> tuple[float, int]:
    """Seconds for `json.loads` of every header and the index, files warm; and the number of tensors."""
    begin = time.perf_counter()
    tensors = 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            tensors += len(json.loads(file.read(int.from_bytes(file.read(8), "little")))) - 1
    json.loads((folder / "model.safetensors.index.json").read_bytes())
    return time.perf_counter() - begin, tensors


def measure(name: str, folder: Path, bars: dict[tuple[str, ...], float]) -> bool:
    """Print a row for each set of options; whether every bar was met."""
    plain, tensors = baseline(folder)
    met = True
    for options, bar in bars.items():
        forget(folder)
        cold = run(folder, *options)
        warm = min(run(folder, *options) for _ in range(3))
        plain = min(plain, baseline(folder)[0])
        met &= max(cold, warm) < bar
        verdict = "met" if max(cold, warm) < bar else "MISSED"
        what = " ".join(("check", *options))
        print(
            f"{name:31} {tensors:8,} {what:13} {cold:6.2f} s {warm:6.2f} s {plain:6.2f} s "
            f"{warm / plain:6.1f}x  < {bar} s: {verdict}"
        )
    return met


def main() -> int:
    """Generate, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    small = parser.parse_args().small
    cpu = detect("cpu")
    print(
        f"environment: {cpu.description}, {cpu.cores} cores, load {os.getloadavg()[0]:.1f}, "
        f"Python {sys.version.split()[0]}"
    )
    print(f"{'like':31} {'tensors':>8} {'command':13} {'cold':>8} {'warm':>8} {'json':>8} {'ratio':>7}  bar")
    met = True
    with tempfile.TemporaryDirectory() as scratch:
        for kind, name in ({} if small else LARGE).items():
            folder = Path(scratch) / kind
            write(kind, folder)
            met &= measure(name, folder, {(): SUMMARY_BAR, ("--json",): JSON_BAR})
        folder = Path(scratch) / "small"
        write("amd-flash-mxfp4", folder, layers=5, experts=8)
        met &= measure("5 layers, 8 experts", folder, {(): SMALL_BAR, ("--json",): SMALL_BAR})
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
