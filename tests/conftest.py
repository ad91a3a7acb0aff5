"""Where the tests find real checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

# Before torch is loaded: threads that spin while they wait take what other processes need, and with `-n 2`, or on a
# machine that others use, a test takes ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(__file__).resolve().parent / "data"
#: A small checkpoint with random weights, its tokenizer and its chat template, for what depends on no answer.
RANDOM = DATA / "glm53f-tiny-random-mxfp4"


def checkpoints_root() -> Path | None:
    """The folder with the full set of checkpoints, or None."""
    root = Path(os.environ.get("HADRON_TEST_CHECKPOINTS", ROOT.parent / "shared" / "checkpoints"))
    return root if root.is_dir() else None


def checkpoint_names() -> list[str]:
    """Names of the checkpoints in the full set; empty where it is absent."""
    root = checkpoints_root()
    return sorted(p.name for p in root.iterdir() if (p / "config.json").is_file()) if root else []


@pytest.fixture
def checkpoints() -> Path:
    """The folder with the full set of checkpoints."""
    root = checkpoints_root()
    if root is None:
        pytest.skip("the full set of checkpoints is absent: set HADRON_TEST_CHECKPOINTS to its folder")
    return root
