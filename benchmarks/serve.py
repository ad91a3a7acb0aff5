"""Throughput of `hadron serve` at several numbers of requests at a time, beside one at a time in the same run.

A server process is started on a checkpoint, such as `full_width.py` writes, and driven by the client of
`hadron bench serve`; one at a time is measured first and last, to show how far the machine drifted. By hand:

    python benchmarks/full_width.py small-mxfp4 FOLDER
    python benchmarks/serve.py FOLDER
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from hadron.bench.serve.load import Lengths, Load
from hadron.bench.serve.run import Asked, measure
from hadron.bench.serve.summary import ServeReport


@contextmanager
def server(model: str, seqs: int, context: int, threads: int | None) -> Iterator[str]:
    """The address of a server that is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    options = ["--port", str(port), "--max-num-seqs", str(seqs), "--max-model-len", str(context), "--prefault"]
    options += [] if threads is None else ["--threads", str(threads)]
    process = subprocess.Popen([sys.executable, "-m", "hadron", "serve", model, *options], stderr=subprocess.DEVNULL)
    try:
        while not ready(url):
            assert process.poll() is None, "the server ended"
            time.sleep(0.2)
        yield f"{url}/v1"
    finally:
        process.terminate()
        process.wait(30)


def ready(url: str) -> bool:
    """Whether a server takes requests."""
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


def vocabulary(model: str) -> int:
    """Of the checkpoint."""
    config = json.loads((Path(model) / "config.json").read_text())
    return int(config.get("text_config", config)["vocab_size"])


def rows(asked: argparse.Namespace, url: str) -> Iterator[tuple[int, ServeReport]]:
    """Numbers of requests at a time, and what each gave."""
    counts = [int(word) for word in asked.concurrency.split(",")]
    for i, at_once in enumerate([1, *(count for count in counts if count != 1), 1]):
        load = Load(
            Lengths("fixed", asked.input_len), Lengths("fixed", asked.output_len),
            ids=(100, vocabulary(asked.model) - 100), seed=i,
        )  # fmt: skip
        yield at_once, measure(
            Asked(
                url, load=load, requests=max(asked.least, 2 * at_once), concurrency=at_once,
                extra={"ignore_eos": True, "temperature": 0},
            )
        )  # fmt: skip


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--concurrency", default="1,4,16,64")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument(
        "--threads", type=int, help="of the server; the rest of the cores are its event loop's and ours"
    )
    parser.add_argument("--least", type=int, default=8, help="requests of a row, at least; two for each at a time")
    asked = parser.parse_args()
    most = max(map(int, asked.concurrency.split(",")))
    print("| at a time | requests | output tokens/s | times alone | input tokens/s | ttft p50, p99 ms | tpot p50 ms |")
    print("|---|---|---|---|---|---|---|")
    alone = None
    with server(asked.model, most, asked.input_len + asked.output_len + 64, asked.threads) as url:
        for at_once, found in rows(asked, url):
            assert not found.failed, found.failures
            assert found.input_tokens_per_second is not None and found.ttft_ms is not None and found.tpot_ms is not None
            alone = alone or found.output_tokens_per_second
            cells = (
                at_once, found.sent, f"{found.output_tokens_per_second:.1f}",
                f"{found.output_tokens_per_second / alone:.2f}", f"{found.input_tokens_per_second:.0f}",
                f"{found.ttft_ms.p50:.0f}, {found.ttft_ms.p99:.0f}", f"{found.tpot_ms.p50:.0f}",
            )  # fmt: skip
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
