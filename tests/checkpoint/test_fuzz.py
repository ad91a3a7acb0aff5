"""Whatever bytes lie in a checkpoint: problems or a typed error, nothing else."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from conftest import checkpoints_root
from hadron.checkpoint.facts import Facts, read_facts
from hadron.errors import HadronError
from hadron.preflight.build import make_plan
from hadron.preflight.plan import LoadPlan
from hadron.problems import Problem, Severity
from hostile.build import GOOD_CONFIG, checkpoint, entry, good_shard, index, shard

FUZZ = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
PLAN_FUZZ = settings(FUZZ, max_examples=120)

VALID = good_shard("model.layers.0.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight")
INDEX = index(a="model.safetensors", b="model-2.safetensors")

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
PIECES = [b'"', b"{", b"}", b"[", b",", b"-1", b"1e99"]
edits = st.lists(
    st.tuples(st.integers(0, 400), st.integers(0, 6), st.binary(max_size=6) | st.sampled_from(PIECES)), max_size=4
)


def mutate(content: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    for place, cut, piece in changes:
        place %= len(content) + 1
        content = content[:place] + piece + content[place + cut :]
    return content


def survives(call: Callable[[], Facts | LoadPlan]) -> None:
    """Run it; every problem and every error has its parts, and prints."""
    try:
        found = call()
    except HadronError as error:
        for part in (error.what, error.where, error.found, error.accepted, error.hint):
            assert part
        str(error).encode()
        return
    for problem in found.problems:
        assert isinstance(problem, Problem)
        assert ": found " in problem.message
        assert "; accepted " in problem.message
        assert problem.hint
        " ".join((problem.message, *problem.tensors)).encode()


def written(**files: bytes) -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory()
    checkpoint(Path(folder.name), **files)
    return folder


@given(edits)
@FUZZ
def test_shard_bytes(changes: list[tuple[int, int, bytes]]) -> None:
    with written(model__safetensors=mutate(VALID, changes)) as folder:
        survives(lambda: read_facts(folder))


@given(st.binary(max_size=64))
@FUZZ
def test_any_shard(content: bytes) -> None:
    with written(model__safetensors=content) as folder:
        survives(lambda: read_facts(folder))


@given(
    st.dictionaries(st.sampled_from(["a", "b", "", "__metadata__", "c.weight"]), json_values, max_size=4),
    st.binary(max_size=16),
)
@FUZZ
def test_any_header_of_json(entries: dict[str, Any], data: bytes) -> None:
    with written(model__safetensors=shard(json.dumps(entries).encode(), data)) as folder:
        survives(lambda: read_facts(folder))


sizes = st.integers(-(2**70), 2**70) | st.integers(-1, 9) | json_values


@given(st.sampled_from(["F32", "F4", "F6_E2M3", "U8", "X"]), st.lists(sizes, max_size=3), st.lists(sizes, max_size=3))
@FUZZ
def test_any_entry(dtype: str, shape: list[Any], offsets: list[Any]) -> None:
    entries = {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}, "b": entry("U8", [4], 0, 4)}
    with written(model__safetensors=shard(json.dumps(entries).encode(), bytes(4))) as folder:
        survives(lambda: read_facts(folder))


@given(edits)
@FUZZ
def test_config_bytes(changes: list[tuple[int, int, bytes]]) -> None:
    with written(model__safetensors=VALID, config__json=mutate(GOOD_CONFIG, changes)) as folder:
        survives(lambda: read_facts(folder))


@given(edits)
@FUZZ
def test_index_bytes(changes: list[tuple[int, int, bytes]]) -> None:
    with written(model__safetensors=good_shard("a"), model__safetensors__index__json=mutate(INDEX, changes)) as folder:
        survives(lambda: read_facts(folder))


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A writable folder with links to a real checkpoint's shard."""
    root = checkpoints_root()
    if root is None:
        pytest.skip("the full set of checkpoints is absent: set HADRON_TEST_CHECKPOINTS to its folder")
    folder = tmp_path_factory.mktemp("real")
    (folder / "model.safetensors").symlink_to(root / "glm53f-quark-mxfp4-blockfp8" / "model.safetensors")
    return folder


CONFIGS = [
    "glm52-quark-nvfp4",
    "glm53f-quark-mxfp4-blockfp8",
    "glm52-modelopt-nvfp4",
    "glm52-ct-w4a16",
    "glm53f-fp8-block",
]


def config_of(real: Path, name: str) -> dict[str, Any]:
    root = (real / "model.safetensors").resolve().parent.parent
    config: dict[str, Any] = json.loads((root / name / "config.json").read_text())
    return config


def objects(value: Any) -> list[dict[str, Any] | list[Any]]:
    """Every object and array in a JSON value."""
    found: list[dict[str, Any] | list[Any]] = []
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict | list):
            found.append(item)
            stack += item.values() if isinstance(item, dict) else item
    return found


@given(st.data(), st.sampled_from(CONFIGS))
@PLAN_FUZZ
def test_plan_of_a_config_with_other_values(real: Path, data: st.DataObject, name: str) -> None:
    """A published configuration in which some values are something else altogether."""
    config = config_of(real, name)
    for _ in range(data.draw(st.integers(1, 3))):
        places = [place for place in objects(config) if place]
        assume(places)
        place = data.draw(st.sampled_from(places))
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if data.draw(st.booleans()):
            del place[key]
        else:
            place[key] = data.draw(json_values | st.sampled_from([-1, 0, 2**63, 10**30, "", [], {}, None, True, "fp8"]))
    (real / "config.json").write_text(json.dumps(config, allow_nan=True))
    survives(lambda: make_plan(str(real)))


FLASH, W4A16 = "glm53f-quark-mxfp4-blockfp8", "glm52-ct-w4a16"


@pytest.mark.parametrize(
    ("name", "path", "value", "says"),
    [
        (FLASH, "text_config.num_hidden_layers", 10**30, "num_hidden_layers: found 1000000000000000000000000000000"),
        (
            FLASH,
            "text_config.n_routed_experts",
            10**9,
            "n_routed_experts: found 1000000000; accepted a whole number of at least 1",
        ),
        (FLASH, "vision_config.depth", 10**30, "depth: found"),
        (FLASH, "text_config.linear_attn_config.gate_lower_bound", "x", "gate_lower_bound: found 'x'"),
        (FLASH, "text_config.rms_norm_eps", 10**400, "rms_norm_eps: found inf"),
        (W4A16, "num_hidden_layers", 10**30, "num_hidden_layers: found"),
        (W4A16, "n_routed_experts", 10**400, "n_routed_experts: found"),
        (W4A16, "quantization_config.config_groups.W4A16.targets", 7, "W4A16.targets"),
    ],
)
def test_values_that_once_got_through(real: Path, name: str, path: str, value: Any, says: str) -> None:
    """Found by putting every value at every place of every configuration."""
    config = config_of(real, name)
    *parents, last = path.split(".")
    place = config
    for key in parents:
        place = place[key]
    assert last in place
    place[last] = value
    (real / "config.json").write_text(json.dumps(config))
    found = [problem for problem in make_plan(str(real)).problems if says in problem.message]
    assert found, says
    assert found[0].severity is Severity.ERROR


@given(st.sampled_from(CONFIGS), edits)
@PLAN_FUZZ
def test_plan_of_config_bytes(real: Path, name: str, changes: list[tuple[int, int, bytes]]) -> None:
    (real / "config.json").write_bytes(mutate(json.dumps(config_of(real, name)).encode(), changes))
    survives(lambda: make_plan(str(real)))


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 3), st.binary(max_size=3)), min_size=1, max_size=3))
@PLAN_FUZZ
def test_plan_of_header_bytes(real: Path, changes: list[tuple[int, int, bytes]]) -> None:
    content = (real / "model.safetensors").resolve().read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = mutate(content[8 : 8 + length], [(place % length, cut, piece) for place, cut, piece in changes])
    with written() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config_of(real, "glm53f-quark-mxfp4-blockfp8")))
        with (Path(folder) / "model.safetensors").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + len(content) - 8 - length)
        survives(lambda: make_plan(folder))
