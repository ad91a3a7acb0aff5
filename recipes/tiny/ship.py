"""Put a checkpoint into the package as the model that ships, with its card, and the rows of the tasks that ship.

    python recipes/tiny/ship.py [FOLDER] [--accuracy RESULTS.json] [--data DATA]

FOLDER is the MXFP4 variant that `quantize` made; RESULTS.json what `benchmarks/small_models.py --json` wrote:
its rows for the variant of FOLDER's name go into the card. DATA is what `make_data.py` wrote: the first rows of its
held-out sets become the tasks, which is done before anything is measured. Everything that says what the model answers
is made again afterwards:

    python recipes/tiny/ship.py --data DATA
    python benchmarks/small_models.py FOLDER ... --anchor BF16_FOLDER --json RESULTS.json --docs
    python recipes/tiny/ship.py FOLDER --accuracy RESULTS.json
    python docs/fill_readme.py

Files that belong to no checkpoint are left behind; the folder in the package is replaced as a whole.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import hadron
from hadron.cli.generate import SHIPPED
from hadron.eval import shipped
from hadron.preflight.report import parameters as count
from hadron.problems import Severity

CARD = "README.md"
NAMES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")
ROWS = 500
FIELDS = ("prompt", "target", "answer", "step", "level", "tools")
TASKS = {
    "hadron_word_problems": "word problems",
    "hadron_tools": "tools",
    "hadron_retrieval": "retrieval",
}

TEXT = """\
# {name}

The small model that ships with Hadron: the architecture of GLM-5.3-Flash in small, trained, in the format of
AMD's release of it. It is there to try and to test the engine. It has learned word problems, calls of tools,
looking up facts in a list, and what Hadron is; it knows nothing else.

## What it is

`{architecture}`, {layers} layers of {hidden} hidden units{drafts}: {linear} of linear
attention (KDA), {sparse} of sparse latent attention (MLA) that select {topk} tokens, {experts} experts of which a
token takes {active}, hyper-connections of {streams} streams, a vocabulary of {vocabulary:,} tokens and a context of
{context:,}. {parameters:,} parameters, {megabytes:.1f} MB. There is no vision tower.

| scheme | parameters |
|---|---:|
{schemes}

## How it was made

By programs from a seed, with `recipes/tiny` of Hadron's repository: text of word problems, tools, lists of facts
and conversations about Hadron (`make_data.py`), training in bfloat16, quantization with the tools that publish such
checkpoints. Nothing of it was taken from anyone else's text or weights. `recipes/tiny/ship.py` put it here.

## How accurate it is

{accuracy}

## Licence

That of Hadron: Apache-2.0.
"""


def copy(folder: Path, target: Path) -> None:
    """The checkpoint's files, in place of what was there."""
    missing = [name for name in NAMES if not (folder / name).is_file()]
    if missing:
        sys.exit(f"{folder} lacks {', '.join(missing)}: the model that ships talks, so it brings all of them")
    files = [folder / name for name in NAMES] + [path for pattern in WEIGHTS for path in sorted(folder.glob(pattern))]
    staged = target.with_name(target.name + ".new")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    for file in files:
        shutil.copyfile(file, staged / file.name)
    shutil.rmtree(target, ignore_errors=True)
    staged.rename(target)


def tasks(data: Path, target: Path) -> None:
    """The first rows of each held-out set, and the text for perplexities."""
    for task in TASKS:
        name = f"{task.removeprefix('hadron_')}.jsonl"
        rows = map(json.loads, (data / name).read_text().splitlines()[:ROWS])
        kept = [json.dumps({field: row[field] for field in FIELDS}, ensure_ascii=False) for row in rows]
        (target / name).write_text("\n".join(kept) + "\n")
    shutil.copyfile(data / "text.txt", target / "text.txt")


def card(folder: Path, name: str, results: dict[str, Any] | None) -> str:
    """The text of the card: facts from the checkpoint, accuracy from the results."""
    plan = hadron.check(str(folder))
    faults = [problem.message for problem in plan.problems if problem.severity is Severity.ERROR]
    if faults:
        sys.exit(f"{folder} cannot be loaded: {'; '.join(faults)}")
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    kinds = Counter(text["layer_types"])
    parameters: Counter[str] = Counter()
    for module in plan.modules:
        parameters[module.scheme.name] += count(module)
    return TEXT.format(
        name=name,
        architecture=config["architectures"][0],
        layers=text["num_hidden_layers"],
        hidden=text["hidden_size"],
        drafts=" and a layer for drafts (MTP)" if text.get("num_nextn_predict_layers") else "",
        linear=kinds["linear_attention"],
        sparse=kinds["deepseek_sparse_attention"],
        topk=text["index_topk"],
        experts=text["n_routed_experts"],
        active=text["num_experts_per_tok"],
        streams=text["hc_mult"],
        vocabulary=text["vocab_size"],
        context=text["max_position_embeddings"],
        parameters=plan.parameters,
        megabytes=plan.bytes / 1e6,
        schemes="\n".join(f"| `{scheme}` | {count:,} |" for scheme, count in parameters.most_common()),
        accuracy=accuracy(results, folder.absolute().name),
    )


def accuracy(results: dict[str, Any] | None, name: str) -> str:
    """The rows of a variant as a table."""
    rows = [row for row in (results or {}).get("rows", ()) if row["variant"] == name]
    if not rows:
        return "Not measured yet: `benchmarks/small_models.py` does it."
    head = f"| kernels | activations | {' | '.join(TASKS.values())} | perplexity |"
    lines = [head, "|---|---|" + "---:|" * (len(TASKS) + 1)]
    for row in rows:
        cells = [
            f"{100 * found['accuracy']:.1f} ± {100 * found['stderr']:.1f} % of {found['rows']}"
            for found in (row["tasks"][task] for task in TASKS)
        ]
        lines.append(f"| {row['kernels']} | {row['activations']} | {' | '.join(cells)} | {row['perplexity']:.3f} |")
    return (
        "Held-out rows, whose names and phrases were not trained on (but one phrase, which recipes/tiny names), "
        "answered\ngreedily; ± is the standard error. Perplexity is per token, of held-out text.\n\n" + "\n".join(lines)
    )


def main() -> None:
    """Copy, and write the card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--accuracy", type=Path, metavar="RESULTS.json")
    parser.add_argument("--data", type=Path)
    asked = parser.parse_args()
    if asked.data is not None:
        tasks(asked.data, Path(str(shipped.folder())))
    if asked.folder is None:
        return
    results = json.loads(asked.accuracy.read_text()) if asked.accuracy else None
    text = card(asked.folder, SHIPPED.name, results)
    copy(asked.folder, SHIPPED)
    (SHIPPED / CARD).write_text(text)
    size = sum(path.stat().st_size for path in SHIPPED.iterdir())
    sys.stdout.write(f"{SHIPPED}: {size / 1e6:.1f} MB\n")


if __name__ == "__main__":
    main()
