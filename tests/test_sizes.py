"""Files stay short enough to read in one sitting, and are named for what they hold."""

from __future__ import annotations

from tests.conftest import ROOT

PACKAGE = ROOT / "src" / "hadron"
BUDGET = 400


def test_no_file_of_the_package_is_over_budget() -> None:
    lines = {p.relative_to(ROOT): len(p.read_text().splitlines()) for p in PACKAGE.rglob("*.py")}
    assert len(lines) > 40  # the package was found
    assert {str(path): count for path, count in lines.items() if count > BUDGET} == {}


def test_no_file_is_named_for_nothing() -> None:
    vague = {"utils.py", "util.py", "helpers.py", "helper.py", "common.py", "misc.py"}
    assert [p for p in PACKAGE.rglob("*.py") if p.name in vague] == []


def test_package_init_files_import_nothing() -> None:
    """`hadron` and the table of dialects are the exceptions; importing a config loads no model code."""
    allowed = {PACKAGE / "__init__.py", PACKAGE / "checkpoint" / "formats" / "__init__.py"}
    allowed.add(PACKAGE / "platforms" / "__init__.py")
    busy = [p for p in PACKAGE.rglob("__init__.py") if p not in allowed and "import" in p.read_text()]
    assert busy == []
