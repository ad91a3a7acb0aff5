"""torch's bfloat16 linear on the shapes of `hadron bench kernels`, weights cold.

python benchmarks/peers/torch_linear.py [--m 1,512] [--threads 2]
"""

from __future__ import annotations

import argparse
import time

import torch

SHAPES = ((12288, 4096), (4096, 12288))
BYTES = 1 << 30


def milliseconds(rows: int, columns: int, tokens: int) -> float:
    """The best mean of three rounds of a call, each call on the next of a gigabyte of copies."""
    copies = [
        torch.randn(rows, columns, dtype=torch.bfloat16) for _ in range(max(2, BYTES // (2 * rows * columns)))
    ]  # fmt: skip
    x = torch.randn(tokens, columns, dtype=torch.bfloat16)
    torch.nn.functional.linear(x, copies[0])
    best = float("inf")
    for _ in range(3):
        count, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < 0.15:
            torch.nn.functional.linear(x, copies[count % len(copies)])
            count += 1
        best = min(best, (time.perf_counter() - begin) / count)
    return best * 1e3


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--m", default="1,8,32,512")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} threads, bf16")
    with torch.inference_mode():
        for rows, columns in SHAPES:
            for tokens in map(int, options.m.split(",")):
                ms = milliseconds(rows, columns, tokens)
                print(
                    f"{tokens:5} x {columns:5} -> {rows:5} {ms:9.2f} ms {2 * rows * columns / ms / 1e6:7.1f} GB/s "
                    f"{2 * rows * columns * tokens / ms / 1e6:8.0f} GFLOP/s"
                )


if __name__ == "__main__":
    main()
