"""`hadron bench kernels` on the cases that have a bar, and whether each is met.

    python benchmarks/kernels.py                    all of them, in about two minutes
    python benchmarks/kernels.py --op linear        some of them
    python benchmarks/kernels.py --rows rows.json   of rows that `hadron bench kernels --json` printed

Exit code 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

import bars
from hadron.bench import run
from hadron.bench.report import KernelReport, environment_lines, limits_text


def measured(ops: tuple[str, ...]) -> list[KernelReport]:
    """Every operation's usual cases; and the layer of 288 experts."""
    asked = [run.Asked(ops=ops)]
    if "moe" in ops:
        asked.append(run.Asked(ops=("moe",), schemes=("mxfp4",), ms=(512,), experts=288, rounds=2))
    return [run.kernels(one) for one in asked]


def main() -> int:
    """Measure or read, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", default=",".join(run.OPS))
    parser.add_argument("--rows", type=Path)
    options = parser.parse_args()
    if options.rows:
        reports = [msgspec.json.decode(options.rows.read_bytes(), type=KernelReport)]
    else:
        reports = measured(tuple(options.op.split(",")))
    found = []
    for report in reports:
        for line in environment_lines(report.environment):
            print(line.text)
        print(limits_text(report.limits))
        assert report.limits.bf16_gflops is not None, "the bars are of a level with bf16 dots"
        found += list(bars.verdicts(report.rows, report.limits.bf16_gflops))
    print("\n".join(bars.table(found)))
    return 0 if all(v.met for v in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
