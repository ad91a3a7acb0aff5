"""Every command and snippet of the README does what the README shows, under the mask of `docs/fill_readme.py`.

The two set-up commands are run by `.ci/run` instead, in a fresh clone.
"""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import pytest

from hadron.kernels.cpu import native
from tests.conftest import ROOT

TEXT = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def filler() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fill_readme", ROOT / "docs" / "fill_readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_two_set_up_commands() -> None:
    setup = re.findall(r"^```sh\n(.*?)^```$", TEXT[TEXT.index("## Set up") : TEXT.index("## Will")], re.M | re.S)
    assert len(setup) == 2
    install, test = setup
    assert install.count("\n") == test.count("\n") == 1
    assert "hadron generate" in install
    assert "pytest" in test


@pytest.mark.skipif(not native.levels(), reason="the README shows a build with native kernels: install with a compiler")
def test_commands_and_snippets_print_what_is_shown(filler: ModuleType) -> None:
    assert TEXT.count("\n$ hadron ") >= 3
    assert TEXT.count("```python") >= 1
    assert filler.difference(TEXT, filler.filled(TEXT)) == ""


def test_only_the_machine_is_masked(filler: ModuleType) -> None:
    shown = "memory     1 GB\nmachine    cpu, one\n           more\n\nOK\n"
    assert filler.difference(shown, shown.replace("cpu, one\n           more", "cpu, two")) == ""
    assert filler.difference(shown, shown.replace("1 GB", "2 GB")) != ""
    assert filler.difference(shown, shown.replace("OK", "NOT OK")) != ""
