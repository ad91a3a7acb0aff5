"""The documentation says what the code does: codes, commands, links, and the tests it names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hadron.cli.main import EXIT_BUG, EXIT_INTERRUPTED, EXIT_PIPE
from hadron.models.inventory import ModuleKind
from hadron.models.registry import FAMILIES
from hadron.problems import CODES
from hadron.quantization.scheme import parse_scheme
from tests.conftest import ROOT

DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"])


def rows(page: Path, first_cell: str) -> list[list[str]]:
    """Table rows of a page whose first cell matches, as cells."""
    found = []
    for line in page.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and re.fullmatch(first_cell, cells[0]):
            found.append(cells)
    return found


def test_every_problem_code_is_documented_as_it_is() -> None:
    documented = [(code, severity, title) for code, severity, title, _ in rows(DOCS / "check.md", r"HC\d+")]
    assert documented == [(code, severity.value, title) for code, (severity, title) in CODES.items()]


def test_every_problem_says_what_to_do() -> None:
    assert [code for code, _, _, text in rows(DOCS / "check.md", r"HC\d+") if len(text) < 20] == []


def test_every_scheme_name_in_the_table_is_one() -> None:
    page = (DOCS / "check.md").read_text()
    table = page[page.index("## Scheme names") : page.index("## Activation schemes")]
    names = [name for cells in re.findall(r"^\| (`[^|]+`) \|", table, re.M) for name in re.findall(r"`(.+?)`", cells)]
    assert len(names) >= 17
    for name in names:
        assert parse_scheme(name.replace("_N", "_32")).name == name.replace("_N", "_32")


def test_every_kind_of_module_is_listed() -> None:
    page = (DOCS / "check.md").read_text()
    listed = page[page.index("Kinds: ") : page.index("## Scheme names")]
    assert re.findall(r"`(\w+)`", listed) == [kind.value for kind in ModuleKind]


def test_exit_codes_are_documented() -> None:
    codes = [int(code) for code, _ in rows(DOCS / "check.md", r"\d+")]
    assert codes == [0, 1, 2, EXIT_BUG, EXIT_INTERRUPTED, EXIT_PIPE]


def test_every_architecture_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [name for name in FAMILIES if f"`{name}`" not in readme] == []


def test_command_reference_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, DOCS / "generate_cli.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"run `python docs/generate_cli.py`:\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.+)$", linked.read_text(), re.M)
            slugs = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in slugs, target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_pages_name_exist(page: Path) -> None:
    """Paths in backquotes, relative to the repository or to the package; patterns and folders count."""
    stand_ins = {"<family>": "*", "<model_type>": "*", "<provider>": "*", "<dialect>": "*", "<operation>": "*",
                 "<name>": "*"}  # fmt: skip
    for path in re.findall(r"`([\w.<>/-]+/[\w.<>/-]*\.py)`", page.read_text()):
        pattern = path
        for stand_in, star in stand_ins.items():
            pattern = pattern.replace(stand_in, star)
        places = (ROOT, ROOT / "src" / "hadron", ROOT / "src" / "hadron" / "checkpoint")
        assert any(next(place.glob(pattern), None) for place in places), path


def names_of_tests(path: Path) -> set[str]:
    """Names of the tests in a file."""
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_fault_has_a_test_that_exists_or_a_reason() -> None:
    table = rows(DOCS / "field-faults.md", r"BR-\d+")
    assert len(table) > 40
    assert len({entry for entry, *_ in table}) == len(table)
    for entry, phrase, answer in table:
        assert len(phrase) > 10, entry
        if answer.startswith("not applicable: "):
            assert len(answer) > 25, entry
            continue
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", answer)
        assert named, f"{entry}: {answer!r} names no test"
        assert re.sub(r"`[^`]+`|,|\s", "", answer) == "", f"{entry}: {answer!r} holds more than names"
        for path, name in named:
            assert name in names_of_tests(ROOT / path), f"{entry}: {path} has no {name}"
