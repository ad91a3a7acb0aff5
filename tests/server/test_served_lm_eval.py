"""lm-eval, as a stranger installs it, over HTTP: its scores and texts are those of the model."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hadron import LLM, SamplingParams
from hadron.server.run import Server
from tests.conftest import RANDOM
from tests.server.running import running

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(find_spec(name) is None for name in ("lm_eval", "tenacity", "aiohttp")),
        reason="lm-eval with what its API models need is not installed: pip install '.[test]'",
    ),
]

QUESTIONS = [
    {"question": "The river is", "choices": [" wide", " deep and cold", " not here"], "answer": 1},
    {"question": "Answer: yes or no?\nWell,", "choices": [" yes", " no", " perhaps it is so"], "answer": 0},
    {"question": "é 日本", "choices": ["語", " 12", " a"], "answer": 2},
]
CHOICE = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
TEXTS = """
task: local_texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
target_delimiter: ""
generation_kwargs:
  until: ["\\n\\n\\n"]
  do_sample: false
  temperature: 0
  max_gen_toks: 12
  chat_template_kwargs: {{enable_thinking: false}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(scope="module")
def served() -> Iterator[Server]:
    with running() as made:
        yield made


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(RANDOM), threads=1)


def evaluated(folder: Path, kind: str, task: str, server: Server, **arguments: Any) -> tuple[dict[str, Any], list[Any]]:
    """The metrics of a task, and what was answered to each of its documents. Nothing is fetched from anywhere."""
    data = folder / "questions.jsonl"
    data.write_text("\n".join(map(json.dumps, QUESTIONS)))
    for name, text in (("local_choice", CHOICE), ("local_texts", TEXTS)):
        (folder / f"{name}.yaml").write_text(text.format(data=data))
    path = "chat/completions" if "chat" in kind else "completions"
    given = {"base_url": f"{server.url}/v1/{path}", "model": "tiny", "max_retries": 1} | arguments
    command = [
        sys.executable, "-m", "lm_eval", "run", "--model", kind, "--tasks", task, "--include_path", str(folder),
        "--output_path", str(folder / "out"), "--log_samples",
        "--model_args", ",".join(f"{key}={value}" for key, value in given.items()),
    ]  # fmt: skip
    command += ["--apply_chat_template"] if "chat" in kind else []
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (results,) = (folder / "out").rglob("results_*.json")
    (samples,) = (folder / "out").rglob(f"samples_{task}_*.jsonl")
    rows = sorted((json.loads(line) for line in samples.read_text().splitlines()), key=lambda row: row["doc_id"])
    return json.loads(results.read_text())["results"][task], rows


def log_probability(llm: LLM, context: str, text: str) -> tuple[float, bool]:
    """Of `text` after `context`, and whether each of its tokens is the likeliest, by the model's logits."""
    whole, before = llm.tokenizer.encode(context + text), llm.tokenizer.encode(context)
    logits = llm.logits(whole).astype("float64")
    rows = [(logits[i - 1], whole[i]) for i in range(len(before), len(whole))]
    total = sum(row[token] - row.max() - math.log(sum(map(math.exp, row - row.max()))) for row, token in rows)
    return total, all(int(row.argmax()) == token for row, token in rows)


@pytest.mark.parametrize("ids", [True, False], ids=["token ids", "text"])
def test_multiple_choice_is_scored_by_the_log_probabilities_of_the_model(
    tmp_path: Path, served: Server, llm: LLM, ids: bool
) -> None:
    found, rows = evaluated(
        tmp_path, "local-completions", "local_choice", served, tokenizer_backend="huggingface", tokenizer=RANDOM,
        tokenized_requests=ids, num_concurrent=3,
    )  # fmt: skip
    right = 0
    for question, row in zip(QUESTIONS, rows, strict=True):
        expected = [log_probability(llm, str(question["question"]), text) for text in question["choices"]]  # type: ignore[attr-defined]
        answers = [(float(answer[0][0]), str(answer[0][1]) == "True") for answer in row["resps"]]
        for (score, greedy), (wanted, likeliest) in zip(answers, expected, strict=True):
            assert score == pytest.approx(wanted, abs=1e-4) and greedy == likeliest
        right += max(range(3), key=lambda i: expected[i][0]) == question["answer"]
    assert found["acc,none"] == pytest.approx(right / len(QUESTIONS))


@pytest.mark.parametrize("kind", ["local-completions", "local-chat-completions"])
def test_texts_are_those_that_the_model_writes(tmp_path: Path, served: Server, llm: LLM, kind: str) -> None:
    chat = "chat" in kind
    options = {} if chat else {"tokenizer_backend": "huggingface", "tokenizer": RANDOM}
    _, rows = evaluated(tmp_path, kind, "local_texts", served, num_concurrent=2, **options)
    params = SamplingParams(max_tokens=12, temperature=0, stop=["\n\n\n"])
    for question, row in zip(QUESTIONS, rows, strict=True):
        text = str(question["question"])
        if chat:
            messages = [{"role": "user", "content": text}]
            (answer,) = llm.chat(messages, params, chat_template_kwargs={"enable_thinking": False})
        else:
            (answer,) = llm.generate([text], params)
        written = answer.outputs[0].text
        assert written  # white space next to a marker of the template is dropped
        assert row["resps"][0][0] == (written.strip() if chat else written)
