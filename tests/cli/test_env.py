"""`hadron env`: what a bug report needs is there, in both forms."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
import torch

from hadron.cli.env import environment
from hadron.cli.main import run
from hadron.platforms import numa


def test_json_says_what_is_installed_and_what_the_machine_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["software"]["hadron"] == version("hadron-llm")
    assert found["software"]["python"] == platform.python_version()
    for library in ("torch", "numpy", "tokenizers", "jinja2", "huggingface-hub"):
        assert found["software"][library] == version(library)
    assert found["processor"]["architecture"] == platform.machine()
    assert found["processor"]["torch_threads"] == torch.get_num_threads()
    assert found["processor"]["instruction_sets"]
    assert found["processor"]["numa_nodes"] == len(numa.nodes())
    assert found["memory"]["total"] == psutil.virtual_memory().total
    assert found["gpu"]["devices"] == [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def test_text_has_every_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for section, values in environment().items():
        assert section in lines
        for name in values:
            assert sum(line.startswith(f"  {name} ") for line in lines) == 1, name
    assert any(line.split() == ["total", f"{psutil.virtual_memory().total / 1e9:.1f}", "GB"] for line in lines)


def test_nothing_of_the_user_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """A report is pasted in public: no names of users, hosts or folders."""
    assert run(["env", "--json"]) == 0
    text = capsys.readouterr().out
    assert platform.node() not in text
    assert str(Path.home()) not in text
    assert str(Path.cwd()) not in text


def test_a_level_that_is_not_there_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HADRON_ISA", "sse9")
    shown = environment()["processor"]["native_kernels"]
    assert shown is None or shown.startswith("none: HADRON_ISA='sse9' is not one of baseline")
