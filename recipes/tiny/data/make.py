"""The data of a recipe, from a seed: tokenizer, chat template, training samples, held-out sets.

    python recipes/tiny/make_data.py --out FOLDER [--seed 1] [--samples N]

Nothing is downloaded, and the same seed gives the same bytes. `train.npz`: `ids` uint16 and `weights` uint8 (the
loss weight of predicting that id, in tenths), one sample after the other; `offsets` int64, one more than there are
samples; `kind` (0 problem, 1 tool, 2 retrieval, 3 talk) and `level` (0 easiest to 3) uint8, one a sample.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from .markup import KINDS, MARKUP, PROBLEM, RETRIEVAL, SPECIAL, TALK, TOOL, Sample, row, weighted
from .problems import problem
from .retrieval import retrieval
from .source import Source
from .talk import talk
from .tokenizer import build, generation, settings
from .tools import tool

#: About 25 million tokens.
SAMPLES = 185_000
#: Of a hundred samples, by kind.
SHARES = (64, 15, 15, 6)
MAKERS: tuple[Callable[[Source], Sample], ...] = (problem, tool, retrieval, talk)
HELD_OUT = 1000
TEXT_BYTES = 50_000
#: Samples the tokenizer is trained on.
TOKENIZER_SAMPLES = 8_000
_BATCH = 4096


def training_sample(seed: int, index: int) -> Sample:
    """The sample of this number."""
    source = Source(f"train:{seed}:{index}")
    return MAKERS[source.rng.choices(range(len(MAKERS)), SHARES)[0]](source)


def tokenizer_texts(seed: int) -> Iterator[str]:
    """Text between markup, of samples of their own: the vocabulary does not depend on how many are trained on."""
    markup = re.compile("|".join(map(re.escape, (*SPECIAL, *MARKUP))))
    for index in range(TOKENIZER_SAMPLES):
        yield from filter(None, markup.split(weighted(training_sample(seed, -1 - index))[0]))


def encode(tokenizer: Tokenizer, samples: list[Sample]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Ids and loss weights of each sample."""
    texts = [weighted(sample) for sample in samples]
    ids, weights = [], []
    for (_, by_character), encoding in zip(
        texts, tokenizer.encode_batch([text for text, _ in texts], add_special_tokens=False), strict=True
    ):
        starts = [start for start, _ in encoding.offsets]
        ids.append(np.array(encoding.ids, np.uint16))
        weights.append(np.frombuffer(by_character, np.uint8)[starts])
    return ids, weights


def train_arrays(tokenizer: Tokenizer, seed: int, count: int) -> dict[str, np.ndarray]:
    """The arrays of `train.npz`."""
    ids: list[np.ndarray] = []
    weights: list[np.ndarray] = []
    labels: list[tuple[int, int]] = []
    for first in range(0, count, _BATCH):
        samples = [training_sample(seed, index) for index in range(first, min(first + _BATCH, count))]
        more_ids, more_weights = encode(tokenizer, samples)
        ids += more_ids
        weights += more_weights
        labels += [(sample.kind, sample.level) for sample in samples]
    kind, level = np.array(labels, np.uint8).T
    return {
        "ids": np.concatenate(ids),
        "weights": np.concatenate(weights),
        "offsets": np.concatenate([[0], np.cumsum([len(part) for part in ids])]).astype(np.int64),
        "kind": kind.copy(),
        "level": level.copy(),
    }


def held_out_rows(kind: int, seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Held-out rows of a kind, different ones, as many of each level as of any other."""
    levels = {PROBLEM: 4, TOOL: 3, RETRIEVAL: 4, TALK: 1}[kind]
    seen: set[str] = set()
    index = 0
    while len(seen) < count:
        source = Source(f"test:{kind}:{seed}:{index}", held_out=True)
        level = len(seen) % levels
        index += 1
        if kind == TALK:
            made = row(talk(source))
        else:
            made = row({PROBLEM: problem, TOOL: tool, RETRIEVAL: retrieval}[kind](source, level))
        if made["prompt"] not in seen and (source.novel or kind == RETRIEVAL):
            seen.add(made["prompt"])
            yield made


FILES = {"word_problems": PROBLEM, "tools": TOOL, "retrieval": RETRIEVAL, "talk": TALK}


def write_held_out(out: Path, seed: int, count: int) -> None:
    """The held-out sets, and held-out text for perplexities."""
    for name, kind in FILES.items():
        rows = held_out_rows(kind, seed, min(count, 50) if kind == TALK else count)
        lines = [json.dumps(made, ensure_ascii=False) + "\n" for made in rows]
        (out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    text, index = "", 0
    while len(text) < TEXT_BYTES:
        source = Source(f"text:{seed}:{index}", held_out=True)
        text += weighted(MAKERS[source.rng.choices(range(len(MAKERS)), SHARES)[0]](source))[0]
        index += 1
    (out / "text.txt").write_text(text, encoding="utf-8")


def figures(arrays: dict[str, np.ndarray]) -> str:
    """What was made, in a few lines."""
    lengths, weights = np.diff(arrays["offsets"]), arrays["weights"]
    lines = [f"{len(lengths):,} samples, {lengths.sum():,} tokens, {(weights == 10).mean():.1%} of them to be learned"]
    for kind, name in enumerate(KINDS):
        chosen = arrays["kind"] == kind
        of_kind = np.repeat(chosen, lengths)
        lines.append(
            f"  {name:9}  {chosen.sum():7,} samples  {lengths[chosen].sum():10,} tokens  "
            f"mean {lengths[chosen].mean():5.1f}  longest {lengths[chosen].max():4}  "
            f"learned {(weights[of_kind] == 10).mean():.1%}"
        )
    return "\n".join(lines)


def make(out: Path, *, seed: int = 1, samples: int = SAMPLES, held_out: int = HELD_OUT) -> dict[str, np.ndarray]:
    """Write everything into a folder; returns the arrays of `train.npz`."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = build(tokenizer_texts(seed))
    (out / "tokenizer.json").write_text(tokenizer.to_str(pretty=False) + "\n", encoding="utf-8")
    (out / "tokenizer_config.json").write_text(settings(), encoding="utf-8")
    (out / "generation_config.json").write_text(generation(tokenizer), encoding="utf-8")
    shutil.copyfile(Path(__file__).parent / "chat_template.jinja", out / "chat_template.jinja")
    write_held_out(out, seed, held_out)
    arrays = train_arrays(tokenizer, seed, samples)
    np.savez(out / "train.npz", **arrays)
    return arrays


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Make the data of the small models.")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the files go")
    parser.add_argument("--seed", type=int, default=1, help="another seed, other samples (default: 1)")
    parser.add_argument(
        "--samples", type=int, default=SAMPLES, metavar="N", help=f"samples to train on (default: {SAMPLES})"
    )
    options = parser.parse_args()
    print(figures(make(options.out, seed=options.seed, samples=options.samples)))
