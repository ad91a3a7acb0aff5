"""`hadron eval` and `hadron perplexity`: what they print and write, and their exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hadron.cli.generate import SHIPPED, SHIPPED_NOTE
from hadron.cli.main import run
from tests.conftest import RANDOM
from tests.eval.own_tasks import task_folder

HOW = ["--kernels", "reference", "--dtype", "float32", "--threads", "1", "--max-model-len", "256"]
RUN = ["eval", str(RANDOM), *HOW]


def test_a_task_that_ships_runs_and_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "results"
    asked = ["--tasks", "hadron_word_problems", "--limit", "3", "--gen-kwargs", "max_gen_toks=4"]
    assert run(["eval", *HOW, *asked, "--output", str(folder), "--log-samples"]) == 0
    shown = capsys.readouterr()
    head, row = (line.split() for line in shown.out.splitlines())
    assert head == ["task", "filter", "shots", "documents", "metric", "better", "value", "stderr"]
    assert row[0] == "hadron_word_problems" and row[3:6] == ["3", "exact_match", "more"] and len(row) == 8
    assert shown.err.splitlines()[0] == SHIPPED_NOTE and "it/s" not in shown.err
    results = json.loads((folder / "results.json").read_text())
    assert results["config"]["model"] == str(SHIPPED) and results["config"]["limit"] == 3
    assert "samples" not in results
    lines = (folder / "samples_hadron_word_problems.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert [sample["doc_id"] for sample in samples] == [0, 1, 2]
    assert samples[0]["arguments"][0][1]["max_gen_toks"] == 4
    # results of an earlier evaluation stay
    assert run(["eval", *HOW, *asked, "--output", str(folder)]) == 2
    assert "a results.json of an earlier evaluation" in capsys.readouterr().err


def test_json_is_one_object(task_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*RUN, "--tasks", "own_choice", "--include-path", str(task_folder), "--limit", "0.4", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert results["n-samples"] == {"own_choice": {"original": 5, "effective": 2}}
    assert set(results["results"]["own_choice"]) >= {"acc,none", "acc_stderr,none"}


def test_through_the_chat_template(task_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--tasks", "own_answers", "--include-path", str(task_folder), "--limit", "1", "--apply-chat-template"]
    switches = ["--chat-template-kwargs", '{"enable_thinking": false}', "--system-instruction", "Be brief."]
    assert run([*RUN, *asked, *switches, "--output", str(tmp_path / "out"), "--log-samples"]) == 0
    (line,) = (tmp_path / "out" / "samples_own_answers.jsonl").read_text().splitlines()
    prompt = json.loads(line)["arguments"][0][0]
    assert "<|system|>" in prompt and "Be brief." in prompt and prompt.count("<|user|>") == 1
    assert prompt.endswith("</think>")


def test_tasks_are_listed(task_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["eval", "--list-tasks", "--include-path", str(task_folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"task  own_choice", "task  hadron_tools", "tag   hadron", "group mmlu"} <= set(lines)
    assert run(["eval", "--list-tasks", "--json"]) == 0
    assert "hadron_retrieval" in json.loads(capsys.readouterr().out)["tasks"]


@pytest.mark.parametrize(
    ("arguments", "where", "found"),
    [
        (["--tasks", "hadron_word_problem"], "--tasks", "such as hadron_word_problems"),
        ([], "--tasks", "nothing"),
        (["--tasks", "hadron", "--include-path", "/no/such/folder"], "--include-path", "not there"),
        (["--tasks", "hadron", "--chat-template-kwargs", "[1]"], "--chat-template-kwargs", "[1]"),
        (["--tasks", "hadron", "--gen-kwargs", "temperature"], "--gen-kwargs", "'temperature'"),
    ],
)
def test_what_cannot_be_evaluated(
    arguments: list[str], where: str, found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*RUN, *arguments]) == 2
    shown = capsys.readouterr()
    assert f"where:    {where}" in shown.err and found in shown.err and shown.out == ""


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert run([*RUN, "--tasks", "hadron", "--output", str(tmp_path / "file")]) == 2
    shown = capsys.readouterr().err
    assert f"where:    --output {tmp_path / 'file'}" in shown and "File exists" in shown and "another folder" in shown


def test_values_of_gen_kwargs() -> None:
    from hadron.cli.eval import _gen_kwargs

    assert _gen_kwargs("do_sample=True,temperature=0.5,top_k=3,until=x") == {
        "do_sample": True, "temperature": 0.5, "top_k": 3, "until": "x",
    }  # fmt: skip


def test_a_perplexity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Rivers are long. " * 30)
    asked: list[Any] = ["perplexity", str(RANDOM), str(text), *HOW[:-2], "--window", "64"]
    assert run([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["window"], found["stride"], found["words"], found["bytes"]) == (64, 64, 90, 510)
    assert run(asked) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["per", "count", "perplexity", "stderr"]
    assert lines[1].split()[:2] == ["token", f"{found['tokens']:,}"]
    assert float(lines[1].split()[2]) == pytest.approx(found["token_perplexity"], rel=1e-3)
    assert lines[-1].endswith("stride 64")


@pytest.mark.parametrize(("data", "found"), [(b"", "no bytes"), (b"\xff", "0xff at byte 0")])
def test_a_file_that_holds_no_text(data: bytes, found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(data)
    assert run(["perplexity", str(RANDOM), str(path)]) == 2
    assert f"found:    {found}" in capsys.readouterr().err
