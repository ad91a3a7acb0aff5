"""What a step costs beside the kernels: scheduling, the batch, metadata of attention, sampling, bookkeeping.

A mock model stands in: it builds the metadata of attention as a real one does and gives the same logits every
time. Answers in conversations, with a tokenizer and with tokens that may not come, decode behind a context, greedily,
drawing, with penalties or by a grammar, nearly all of the chance with tokens that have a text. The time of a step is
the engine's own. That of the kernels is given apart: they write logits, change them by a request's rules, search them
for the likeliest tokens and draw among those; so is that of llguidance, which says what a grammar lets come. A shared
machine gives its processors more or less of their clock by the minute: a loop in Python is timed beside every step, and
what a step takes where that loop runs as fast as it did in the run's best moments is given too. Run it by hand:

    python benchmarks/engine_overhead.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from hadron.attention.reference import ReferenceBackend
from hadron.batch import ForwardBatch
from hadron.cache.spec import CacheSpec, LayerCache
from hadron.cli.generate import SHIPPED
from hadron.engine.assemble import MARKUP
from hadron.engine.engine import Engine
from hadron.engine.runner import Runner
from hadron.kernels.provider import Provider
from hadron.layers.logits import Logits, Questions
from hadron.sampling_params import SamplingParams
from hadron.tokenizer.tokenizer import Tokenizer

BARS = {1: 0.3, 64: 2.0}  # requests -> milliseconds
GRAMMAR = {"regex": "[^0-9]*"}
TEXTS = 1000  # ids of the shipped model's tokenizer that have a text
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "top-k 40": {"temperature": 1.0, "top_k": 40},
    "top-p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "penalties": {
        "temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.05, "presence_penalty": 0.5,
        "logit_bias": {7: -1.0, 8: 1.0}, "min_tokens": 1000,
    },
    "grammar": {"temperature": 1.0, "top_p": 0.95, "structured_outputs": GRAMMAR},
}  # fmt: skip


class MockModel:
    """No arithmetic: hidden states of zeros, one row of logits for all."""

    def __init__(self, vocabulary: int) -> None:
        self.settings = SimpleNamespace(device=torch.device("cpu"), dtype=torch.bfloat16)
        self._backend = ReferenceBackend("mqa", selection_budget=2048)
        # peaked as a model's are: of 154,880 tokens 64 hold 0.97 of the chance; the likeliest are the tokenizer's
        random = torch.Generator().manual_seed(0)
        row = (6 * torch.randn(vocabulary, generator=random)).sort(descending=True).values
        row[:TEXTS] = row[torch.randperm(TEXTS, generator=random)]
        self._row = row[None]
        self._rows = self._row.repeat(64, 1)
        found = Questions.of(Provider({"lm_head": "cpu"}))  # bound once, as a head's
        timed = {name: self.timed(getattr(found, name)) for name in ("rule", "best", "draw")}
        self._questions = found._replace(**timed)
        self.kernel_ms = 0.0

    def forward(self, batch: ForwardBatch, trace: Any = None) -> torch.Tensor:
        """Zeros, with everything around them that a model does once a step."""
        batch.check_stamps()
        self._backend.build_metadata(batch)
        batch.advance()
        return torch.zeros(batch.tokens, 8)

    def head(self, hidden: torch.Tensor) -> Logits:
        """The same row for each, written anew as a product would."""
        rows = self._rows[: hidden.shape[0]]
        self.timed(rows.copy_)(self._row)
        return Logits(rows, self._questions)

    def timed(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """The same, whose time is that of the kernels."""

        def run(*given: Any, **options: Any) -> Any:
            began = time.perf_counter()
            found = kernel(*given, **options)
            self.kernel_ms += 1000 * (time.perf_counter() - began)
            return found

        return run


def pace() -> float:
    """Milliseconds of a loop that is always the same."""
    began, total = time.perf_counter(), 0
    for i in range(1000):
        total += i & 7
    return 1000 * (time.perf_counter() - began)


def measure(
    requests: int, context: int, vocabulary: int, steps: int, sampling: dict[str, Any]
) -> tuple[list[float], list[float], list[float]]:
    """Milliseconds of each of `steps` decode steps: the engine's, the kernel's, and those of `pace` around it."""
    layer = LayerCache(latent_width=8, index_width=8, tail_rows=3, kda=(1, 8), conv=(24, 3))
    spec = CacheSpec((layer,), 4, "bfloat16", 64, "bfloat16")
    model: Any = MockModel(vocabulary)
    runner = Runner(model, spec, max_model_len=context + steps + 2048, max_num_seqs=requests, prefix_snapshots=64)
    tokenizer = Tokenizer.load(SHIPPED)
    engine = Engine(
        runner, vocabulary=vocabulary, max_position=1 << 20, eos=frozenset(), tokenizer=tokenizer,
        max_num_batched_tokens=8192, prompt_only=[i for i in map(tokenizer.token_id, MARKUP) if i is not None],
    )  # fmt: skip
    params = SamplingParams(seed=1, max_tokens=None, ignore_eos=True, **sampling).with_defaults({})
    for i in range(requests):
        engine.add(str(i), tuple((i * 31 + j) % vocabulary for j in range(context)), params, answer=True)
    for _, _, rules in engine._chooser._wishes.values():
        if rules is not None and (matcher := rules.matcher) is not None:
            matcher.allowed, matcher.accept = model.timed(matcher.allowed), model.timed(matcher.accept)
    while len(engine.step()) < requests:  # prompts
        pass
    for _ in range(8):
        engine.step()
    own, kernel, paces = [], [], []
    for _ in range(steps):
        before = pace()
        model.kernel_ms, began = 0.0, time.perf_counter()
        events = engine.step()
        kernel.append(model.kernel_ms)
        own.append(1000 * (time.perf_counter() - began) - model.kernel_ms)
        paces.append((before + pace()) / 2)
        assert len(events) == requests
    engine.abort_all()
    return own, kernel, paces


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--contexts", default="512,8192")
    parser.add_argument("--vocabularies", default="1024,154880")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for vocabulary in map(int, asked.vocabularies.split(",")):
        for context in map(int, asked.contexts.split(",")):
            for requests, bar in BARS.items():
                for kind, sampling in KINDS.items():
                    found = measure(requests, context, vocabulary, asked.steps, sampling)
                    rows.append((requests, context, vocabulary, kind, bar, *found))
    best = statistics.quantiles([pace for *_, paces in rows for pace in paces], n=20)[0]
    print("| requests | context | vocabulary | sampling | ms a step, median | at the best pace | bar | | kernels, ms |")
    print("|---|---|---|---|---|---|---|---|---|")
    for *what, bar, times, kernel, paces in rows:
        median = statistics.median(times)
        even = statistics.median(own / pace for own, pace in zip(times, paces, strict=True)) * best
        met = "met" if even <= bar else "**missed**"
        figures = (f"{median:.3f}", f"{even:.3f}", bar, met, f"{statistics.median(kernel):.3f}")
        print("| " + " | ".join(map(str, (*what, *figures))) + " |")
    slow = statistics.median(pace for *_, paces in rows for pace in paces) / best
    print(f"\nbest pace: {best:.4f} ms a loop; half of the time it took {slow:.2f} times as long or longer")


if __name__ == "__main__":
    main()
