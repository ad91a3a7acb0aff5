"""A small model, and a folder of task files with the three kinds of request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hadron import LLM
from tests.conftest import RANDOM

QUESTIONS = [
    {"text": f"Question {i}: which of these is a river of {place}?", "choices": ["the Nile", "a dog", "7 apples"],
     "gold": i % 3}
    for i, place in enumerate(["Egypt", "Sudan", "the north", "Uganda", "a far land"])
]  # fmt: skip

COMMON = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
  cache_dir: {cache}
test_split: test
output_type: {kind}
"""
TASKS = {
    "own_choice": ("multiple_choice", """
doc_to_text: "{{text}}\\nAnswer:"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list:
  - metric: acc
"""),
    "own_answers": ("generate_until", """
doc_to_text: "{{text}}\\nAnswer:"
doc_to_target: "{{choices[gold]}}"
generation_kwargs: {until: ["e"], max_gen_toks: 8}
metric_list:
  - metric: exact_match
"""),
    "own_texts": ("loglikelihood_rolling", """
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
  - metric: bits_per_byte
"""),
}  # fmt: skip


@pytest.fixture(scope="session")
def llm() -> LLM:
    return LLM(RANDOM, kernels="reference", dtype="float32", threads=1, max_model_len=128)


@pytest.fixture(scope="session")
def task_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for name, (kind, rest) in TASKS.items():
        head = COMMON.format(name=name, data=data, cache=folder / "cache", kind=kind)
        (folder / f"{name}.yaml").write_text(head + rest)
    return folder
