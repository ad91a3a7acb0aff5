"""How accurate trained small models are, in every format and in every way of running them.

    python benchmarks/small_models.py FOLDER ... --anchor BF16_FOLDER --json RESULTS.json --docs

For each FOLDER, with the kernels `cpu` (bfloat16) and `reference` (float32), activations kept and as declared: the
tasks that ship, perplexity, bytes, tokens a second. --anchor: `transformers` in float32 on the same rows, and whether
its greedy answers are those of `reference`. Rows that RESULTS.json has of other runs stay, so that a long measurement
can be made in pieces; a figure is taken anew when its row is measured again. --docs writes the tables into
docs/accuracy.md, between the two comments there; without FOLDER, from RESULTS.json alone.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from anchor import TASKS, compare
from hadron import LLM
from hadron.bench import model
from hadron.engine.config import EngineConfig
from hadron.eval import shipped
from hadron.eval.harness import Asked, Tasks, evaluate
from hadron.eval.perplexity import measure, read_text
from hadron.preflight.build import make_plan

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "accuracy.md"
BEGIN, END = "<!-- small_models.py: begin -->", "<!-- small_models.py: end -->"
TEXT = Path(str(shipped.folder() / "text.txt"))

DTYPES = {"cpu": "bfloat16", "reference": "float32"}
ACTIVATIONS = {"kept": "none", "declared": "declared"}
NAMES = {"hadron_word_problems": "word problems", "hadron_tools": "tools", "hadron_retrieval": "retrieval"}
CONTEXT, WINDOW = 256, 1024


def declares(folder: Path) -> bool:
    """Whether the checkpoint declares that activations are quantized."""
    return any(module.activation.element is not None for module in make_plan(str(folder)).modules)


def tell(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


def row(folder: Path, kernels: str, activations: str, limit: int, text: str, threads: int | None) -> dict[str, Any]:
    """One variant, run in one way."""
    how: dict[str, Any] = {
        "kernels": kernels, "dtype": DTYPES[kernels], "activation_quantization": ACTIVATIONS[activations],
        "threads": threads,
    }  # fmt: skip
    llm = LLM(folder, max_num_seqs=32, **how)
    results = evaluate(llm, Asked(tasks=list(TASKS), limit=limit, bootstrap_iters=0), Tasks(), lambda *_: None)
    tasks = {}
    for task in TASKS:
        mean, rows = results["results"][task]["exact_match,none"], results["n-samples"][task]["effective"]
        tasks[task] = {"accuracy": mean, "stderr": (mean * (1 - mean) / max(1, rows - 1)) ** 0.5, "rows": rows}
    read = measure(llm, text, window=WINDOW, stride=WINDOW // 2)
    step = model.measure(folder, EngineConfig(**how), model.Asked(contexts=(CONTEXT,))).steps[0]
    return {
        "variant": folder.absolute().name, "kernels": kernels, "activations": activations, "tasks": tasks,
        "perplexity": read.token_perplexity, "perplexity_stderr": read.token_perplexity_stderr,
        "bytes": llm.plan.bytes, "tokens_per_second": step.tokens_per_second,
    }  # fmt: skip


def kept(results: dict[str, Any], found: dict[str, Any]) -> None:
    """Put a row in the place of an earlier one of the same variant run in the same way."""
    same = ("variant", "kernels", "activations")
    rest = [other for other in results["rows"] if any(other[name] != found[name] for name in same)]
    results["rows"] = [*rest, found]


def percent(found: dict[str, Any], of: bool = True) -> str:
    """`93.2 ± 1.1`, and of how many rows."""
    return f"{100 * found['accuracy']:.1f} ± {100 * found['stderr']:.1f}" + (f" ({found['rows']})" if of else "")


def tables(results: dict[str, Any]) -> Iterator[str]:
    """The results as lines of Markdown."""
    if results["rows"]:
        yield f"| variant | kernels | activations | {' | '.join(NAMES.values())} | perplexity | MB | tokens/s |"
        yield "|---|---|---|" + "---:|" * (len(NAMES) + 3)
    order = {name: place for place, name in enumerate(dict.fromkeys(found["variant"] for found in results["rows"]))}
    for found in sorted(
        results["rows"], key=lambda row: (order[row["variant"]], row["kernels"], row["activations"] != "kept")
    ):
        cells = [percent(found["tasks"][task]) for task in NAMES]
        deviation = found["perplexity_stderr"] or 0.0
        yield (
            f"| {found['variant']} | {found['kernels']} | {found['activations']} | {' | '.join(cells)} | "
            f"{found['perplexity']:.3f} ± {deviation:.3f} | {found['bytes'] / 1e6:.2f} | "
            f"{found['tokens_per_second']:.0f} |"
        )
    for anchor in results["anchors"]:
        yield ""
        yield f"`{anchor['variant']}` in float32, `transformers` beside `reference` on the same rows (of equal scores"
        yield "of an indexer both take the lowest index):"
        yield ""
        yield "| task | `transformers` | `reference` | answers identical, id by id |"
        yield "|---|---:|---:|---:|"
        for task, name in NAMES.items():
            both = anchor["tasks"][task]
            rows = both["reference"]["rows"]
            theirs, ours = percent(both["transformers"]), percent(both["reference"])
            yield f"| {name} | {theirs} | {ours} | {both['identical']} of {rows} |"
        differ = [one for both in anchor["tasks"].values() for one in both["differ"]]
        if differ:
            margins = [one["margin"] for one in differ if one["margin"] is not None]
            yield ""
            yield (
                f"Of the {len(differ)} that differ, the logits of the two tokens are at most "
                f"{max(margins, default=0.0):.1e} apart where they part."
            )


def write_page(lines: list[str]) -> None:
    """Put the tables between the two comments of docs/accuracy.md."""
    page = PAGE.read_text()
    found = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.S)
    if not found.search(page):
        sys.exit(f"{PAGE} has no {BEGIN} … {END}")
    section = "\n".join((BEGIN, *lines, END))
    PAGE.write_text(found.sub(lambda _: section, page))


def main() -> None:
    """Measure what was asked for; print, keep and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--anchor", type=Path, metavar="BF16_FOLDER")
    parser.add_argument("--kernels", default="cpu,reference")
    parser.add_argument("--activations", default="kept,declared")
    parser.add_argument("--limit", type=int, default=500, help="rows of each task (default %(default)s)")
    parser.add_argument("--reference-limit", type=int, default=200, help="the same on `reference`")
    parser.add_argument("--anchor-limit", type=int, default=200, help="the same with --anchor")
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer, with --anchor")
    parser.add_argument("--text", type=Path, default=TEXT, help="what perplexity is measured on")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, metavar="RESULTS.json", help="keep results here")
    parser.add_argument("--docs", action="store_true", help="write docs/accuracy.md")
    asked = parser.parse_args()

    results: dict[str, Any] = {"schema_version": 1, "rows": [], "anchors": []}
    if asked.json and asked.json.exists():
        results |= json.loads(asked.json.read_text())

    def keep() -> None:
        if asked.json:
            asked.json.write_text(json.dumps(results, indent=1) + "\n")

    text = read_text(asked.text)
    for folder in asked.folders:
        for kernels in asked.kernels.split(","):
            for activations in asked.activations.split(","):
                if activations == "declared" and not declares(folder):
                    continue
                limit = asked.reference_limit if kernels == "reference" else asked.limit
                found = row(folder, kernels, activations, limit, text, asked.threads)
                kept(results, found)
                keep()
                tell(f"{folder.name} {kernels} {activations}: {[percent(one) for one in found['tasks'].values()]}")
    if asked.anchor:
        anchor = compare(asked.anchor, asked.anchor_limit, asked.max_tokens, asked.threads, tell)
        others = [other for other in results["anchors"] if other["variant"] != anchor["variant"]]
        results["anchors"] = [*others, anchor]
        keep()
    lines = list(tables(results))
    print("\n".join(lines))
    if asked.docs:
        write_page(lines)


if __name__ == "__main__":
    main()
