"""llama.cpp on the same machine, where it is installed; says what is missing where it is not.

    python benchmarks/peers/llama_cpp.py [MODEL.gguf] [--threads 2]

Products: `test-backend-ops perf -o MUL_MAT` (of llama.cpp's own build). A model: `llama-bench`.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess


def run(program: str, *arguments: str) -> bool:
    """Run a program of llama.cpp; False, with a line that says so, where it is not installed."""
    if shutil.which(program) is None:
        print(f"{program} is not on PATH: llama.cpp was not measured with it")
        return False
    subprocess.run([program, *arguments], check=True)
    return True


def main() -> int:
    """Run what is there; exit code 1 where nothing is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--threads", default="2")
    options = parser.parse_args()
    done = run("test-backend-ops", "perf", "-o", "MUL_MAT", "-b", "CPU")
    if options.model:
        done |= run("llama-bench", "-m", options.model, "-t", options.threads, "-p", "128", "-n", "32")
    return 0 if done else 1


if __name__ == "__main__":
    raise SystemExit(main())
