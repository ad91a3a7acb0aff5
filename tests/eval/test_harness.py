"""Tasks, lm-eval's and one's own, on a small model."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hadron import LLM, UsageError
from hadron.eval.harness import Asked, Tasks, evaluate, require
from tests.conftest import RANDOM
from tests.eval.own_tasks import QUESTIONS, llm, task_folder


@pytest.fixture(scope="module")
def tasks(task_folder: Path) -> Tasks:
    return Tasks([task_folder])


def run(llm: LLM, tasks: Tasks, *names: str, **asked: Any) -> dict[str, Any]:
    return evaluate(llm, Asked(tasks=names, **asked), tasks, lambda what, done, total: None)


def best_choices(llm: LLM) -> list[int]:
    """Which choice of each question the logits make the likeliest."""
    chosen = []
    for question in QUESTIONS:
        context = f"{question['text']}\nAnswer:"
        begin, sums = len(llm.tokenizer.encode(context)), []
        for choice in question["choices"]:
            ids = llm.tokenizer.encode(f"{context} {choice}")
            rows = llm.logits(ids).astype(np.float64)
            rows -= np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1, keepdims=True)) + rows.max(1, keepdims=True)
            sums.append(sum(rows[i - 1, ids[i]] for i in range(begin, len(ids))))
        chosen.append(int(np.argmax(sums)))
    return chosen


def test_a_multiple_choice_task_of_ones_own(llm: LLM, tasks: Tasks) -> None:
    results = run(llm, tasks, "own_choice", log_samples=True)
    right = [best == question["gold"] for best, question in zip(best_choices(llm), QUESTIONS, strict=True)]
    assert results["results"]["own_choice"]["acc,none"] == pytest.approx(np.mean(right))
    error = np.std(right, ddof=1) / np.sqrt(len(right))
    assert results["results"]["own_choice"]["acc_stderr,none"] == pytest.approx(error)
    assert [sample["acc"] for sample in results["samples"]["own_choice"]] == right
    assert results["config"]["model"] == str(RANDOM) and results["config"]["activation_quantization"] == "none"


def test_a_task_that_generates_and_one_of_texts(llm: LLM, tasks: Tasks) -> None:
    results = run(llm, tasks, "own_*", limit=3, log_samples=True)
    assert set(results["results"]) == {"own_answers", "own_choice", "own_texts"}
    assert all(counts["effective"] == 3 for counts in results["n-samples"].values())
    answers = [sample["resps"][0][0] for sample in results["samples"]["own_answers"]]
    assert len(answers) == 3 and all("e" not in answer for answer in answers)
    assert results["results"]["own_texts"]["word_perplexity,none"] > 1


def test_results_do_not_depend_on_the_batch(tasks: Tasks) -> None:
    """On native kernels the likelihoods have the same bits with one request at a time and with many."""
    alone, crowd = (
        run(
            LLM(RANDOM, kernels="cpu", threads=1, max_model_len=128, max_num_seqs=most, max_num_batched_tokens=tokens),
            tasks, "own_*", log_samples=True,
        )
        for most, tokens in ((1, 16), (16, 512))
    )  # fmt: skip
    for name, samples in alone["samples"].items():
        assert [s["resps"] for s in samples] == [s["resps"] for s in crowd["samples"][name]]


def test_declared_activation_quantization_is_what_the_logits_say(llm: LLM, tasks: Tasks) -> None:
    """A deployment that quantizes activations as the checkpoint declares is predicted, not the kept activations."""
    declared = LLM(
        RANDOM, kernels="reference", dtype="float32", threads=1, max_model_len=128, activation_quantization="declared"
    )
    kept_results = run(llm, tasks, "own_choice", log_samples=True)
    results = run(declared, tasks, "own_choice", log_samples=True)
    assert results["config"]["activation_quantization"] == "declared"
    own = [s["resps"] for s in results["samples"]["own_choice"]]
    assert own != [s["resps"] for s in kept_results["samples"]["own_choice"]]
    context, choice = f"{QUESTIONS[0]['text']}\nAnswer:", f" {QUESTIONS[0]['choices'][0]}"
    ids = declared.tokenizer.encode(context + choice)
    rows = declared.logits(ids).astype(np.float64)
    rows -= np.log(np.exp(rows).sum(1, keepdims=True))
    begin = len(declared.tokenizer.encode(context))
    wanted = sum(rows[i - 1, ids[i]] for i in range(begin, len(ids)))
    assert own[0][0][0][0] == pytest.approx(wanted, abs=1e-4)


def test_an_unknown_task_is_refused_with_names_like_it(tasks: Tasks) -> None:
    with pytest.raises(UsageError) as raised:
        tasks.matching(["hadron_tool"])
    error = raised.value
    assert error.where == "--tasks" and error.found == "'hadron_tool'"
    assert "hadron_tools" in error.accepted and "--list-tasks" in error.hint
    with pytest.raises(UsageError, match="no such task"):
        tasks.matching(["own_zzz*"])


def test_groups_tags_and_tasks_are_listed(tasks: Tasks) -> None:
    listed = tasks.listed()
    assert {"own_choice", "hadron_tools", "hellaswag"} <= set(listed["tasks"])
    assert "hadron" in listed["tags"] and "mmlu" in listed["groups"]


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="which is not there") as raised:
        Tasks([tmp_path / "none"])
    assert raised.value.where == "--include-path"


def test_a_task_without_its_data_is_refused(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "lost.yaml").write_text(
        "task: lost\ndataset_path: json\ndataset_kwargs: {data_files: {test: " + str(tmp_path) + "/nowhere.jsonl}}\n"
        "test_split: test\n"
        'output_type: generate_until\ndoc_to_text: "{{text}}"\ndoc_to_target: "x"\n'
        "metric_list: [{metric: exact_match}]\n"
    )
    with pytest.raises(UsageError) as raised:
        run(llm, Tasks([tmp_path]), "lost")
    assert raised.value.where == "lost" and "nowhere.jsonl" in raised.value.found
    assert "docs/eval.md" in raised.value.hint


def test_without_lm_eval_a_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "lm_eval":
            raise ModuleNotFoundError("No module named 'lm_eval'")
        return real(name, *rest, **more)

    monkeypatch.delitem(sys.modules, "lm_eval", raising=False)
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UsageError) as raised:
        require()
    assert raised.value.found == "No module named 'lm_eval'"
    assert raised.value.accepted == "the extra `eval`"
    assert raised.value.hint == "pip install 'hadron-llm[eval]'"
