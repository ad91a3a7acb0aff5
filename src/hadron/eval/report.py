"""What an evaluation found, as lines for people and as files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hadron.errors import UsageError
from hadron.eval.perplexity import Perplexity
from hadron.preflight.report import Line, Role, table

RESULTS = "results.json"


def lines(results: Mapping[str, Any]) -> Iterator[Line]:
    """A row for each figure: its standard error beside it, and whether more is better."""
    better, shots, counts = results["higher_is_better"], results["n-shot"], results["n-samples"]
    rows = []
    for name, figures in results["results"].items():
        for key, value in figures.items():
            metric, _, variant = key.partition(",")
            if not variant or metric.endswith("_stderr"):
                continue
            error = figures.get(f"{metric}_stderr,{variant}")
            direction = {True: "more", False: "less"}.get(better.get(name, {}).get(metric), "")
            documents = counts.get(name, {}).get("effective", figures.get("sample_len", ""))
            rows.append(
                (
                    name, variant, str(shots.get(name, "")), str(documents), metric, direction, _number(value),
                    _number(error),
                )
            )  # fmt: skip
    yield from table(("task", "filter", "shots", "documents", "metric", "better", "value", "stderr"), "<<>><<>>", rows)
    if count := results.get("shortened_requests"):
        yield Line("")
        yield Line(
            f"{count} request(s) lost the beginning of their context to fit: raise --max-model-len", Role.WARNING
        )


def perplexity_lines(found: Perplexity) -> Iterator[Line]:
    """A row for each unit."""
    rows = [
        ("token", f"{found.tokens:,}", _number(found.token_perplexity), _number(found.token_perplexity_stderr)),
        ("word", f"{found.words:,}", _number(found.word_perplexity), ""),
        ("byte", f"{found.bytes:,}", _number(found.byte_perplexity), ""),
    ]
    yield from table(("per", "count", "perplexity", "stderr"), "<>>>", rows)
    yield Line("")
    yield Line(
        f"{found.bits_per_byte:.4f} bits per byte; {found.windows} window(s) of at most {found.window:,} tokens, "
        f"stride {found.stride:,}"
    )


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"
    return "-" if value in (None, "N/A") else str(value)


def as_json(results: Mapping[str, Any]) -> str:
    """One JSON object without the samples; what JSON has no form for, such as a function of a task, as text."""
    shown = {name: value for name, value in results.items() if name != "samples"}
    return json.dumps(shown, indent=2, ensure_ascii=False, default=str)


def prepare(folder: Path) -> None:
    """Make the folder; `UsageError` where that fails, or where results of another evaluation are in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(folder, error.strerror or str(error)) from error
    if (folder / RESULTS).exists():
        raise _unusable(folder, f"a {RESULTS} of an earlier evaluation")


def write(folder: Path, results: Mapping[str, Any]) -> list[Path]:
    """`results.json`, and a file of samples for each task where they were kept; what was written."""
    written = []
    try:
        for name, samples in (results.get("samples") or {}).items():
            path = folder / f"samples_{name.replace('/', '_')}.jsonl"
            text = "".join(json.dumps(sample, ensure_ascii=False, default=str) + "\n" for sample in samples)
            path.write_text(text, encoding="utf-8")
            written.append(path)
        path = folder / RESULTS
        path.write_text(as_json(results) + "\n", encoding="utf-8")
    except OSError as error:
        raise _unusable(folder, error.strerror or str(error)) from error
    return [*written, path]


def _unusable(folder: Path, found: str) -> UsageError:
    return UsageError(
        "results cannot be written", where=f"--output {folder}", found=found,
        accepted="a folder that can be written to and holds no results", hint="name another folder",
    )  # fmt: skip
