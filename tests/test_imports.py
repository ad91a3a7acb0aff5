"""What may import what, and what `hadron check` must not load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

SHIPPED = ROOT / "src" / "hadron" / "assets"
HEAVY = ("torch", "transformers", "triton", "rich", "huggingface_hub", "numpy", "tokenizers", "jinja2")

_CHECK = """
import sys
from hadron.cli.main import run
code = run(["check", sys.argv[1], *sys.argv[2:]])
heavy = sorted({name.partition(".")[0] for name in sys.modules} & set(%r))
print("code", code, "heavy", heavy, file=sys.stderr)
"""


def check(model: Path, *options: str) -> str:
    """The last line of stderr of a check in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _CHECK % (HEAVY,), str(model), *options], capture_output=True, text=True, check=True
    )
    return done.stderr.splitlines()[-1]


def shipped() -> Path:
    (model,) = (path.parent for path in SHIPPED.glob("*/config.json"))
    return model


def test_check_loads_no_heavy_library() -> None:
    assert check(shipped()) == "code 0 heavy []"
    assert check(shipped(), "--json") == "code 0 heavy []"


def test_the_measure_sees_a_heavy_library() -> None:
    """The test above can fail: --data reads tensors, with numpy."""
    assert check(shipped(), "--data") == "code 0 heavy ['numpy']"


def test_import_contracts_hold() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    if not program.exists():
        import pytest

        pytest.skip("import-linter is not installed: pip install '.[lint]'")
    done = subprocess.run([program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
