"""NUMA: nodes from recorded facts, and the policy for real wherever the kernel lets a process set one."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hadron.errors import UsageError
from hadron.platforms import numa
from hadron.platforms.numa import Policy, placement

DEFAULT, BIND, INTERLEAVE = 0, 2, 3


def permitted() -> bool:
    """Whether this kernel lets a process set its memory policy."""
    try:
        numa.apply(numa.current())
    except OSError:
        return False
    return 0 in numa.nodes()


needs_policy = pytest.mark.skipif(
    not permitted(), reason="set_mempolicy is denied here: run where the kernel or the container allows it"
)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A recorded machine with two nodes."""
    return recorded(tmp_path / "two", has_memory="0-1\n", online="0-1\n")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    if permitted():
        numa.apply(Policy(DEFAULT))


def recorded(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"has_memory": "0\n", "online": "0\n"}, (0,)),
        ({"has_memory": "0-7\n"}, tuple(range(8))),
        ({"has_memory": "0-1,4,6-7\n", "online": "0-7\n"}, (0, 1, 4, 6, 7)),  # CPU-only nodes between
        ({"online": "0-1\n"}, (0, 1)),
        ({"has_memory": "\n", "online": "1\n"}, (1,)),
        ({"has_memory": "what\n"}, (0,)),
        ({}, (0,)),
    ],
)
def test_nodes_with_memory(tmp_path: Path, files: dict[str, str], expected: tuple[int, ...]) -> None:
    assert numa.nodes(recorded(tmp_path / "node", **files)) == expected


@pytest.mark.parametrize(
    ("asked", "one", "several"),
    [
        ("auto", None, Policy(INTERLEAVE, (0, 2))),
        ("none", None, None),
        ("interleave", Policy(INTERLEAVE, (0,)), Policy(INTERLEAVE, (0, 2))),
        ("bind:0", Policy(BIND, (0,)), Policy(BIND, (0,))),
    ],
)
def test_what_is_asked_for_becomes_a_policy(asked: str, one: Policy | None, several: Policy | None) -> None:
    assert numa.is_word(asked)
    assert numa.policy(asked, (0,)) == one and numa.policy(asked, (0, 2)) == several


@pytest.mark.parametrize("asked", ["", "Auto", "bind", "bind:", "bind:-1", "bind:0 ", "bind:1,2", "bind:12345678"])
def test_what_is_no_word(asked: str) -> None:
    assert not numa.is_word(asked)


def test_a_node_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    directory = recorded(tmp_path / "node", has_memory="0,2\n")
    with (
        pytest.raises(UsageError, match="There is no such NUMA node") as caught,
        placement("bind:1", lasting=False, directory=directory),
    ):
        pass
    error = caught.value
    assert (error.where, error.found) == ("--numa", "bind:1")
    assert error.accepted == "bind:0, bind:2, or auto, none, interleave"
    assert error.hint == "`hadron env` says how many nodes have memory"


def test_a_kernel_that_denies(two: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def denied(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(numa, "_call", denied)
    for asked in ("bind:0", "interleave"):
        with (
            pytest.raises(UsageError, match="The kernel denies a NUMA memory policy") as caught,
            placement(asked, lasting=False, directory=two),
        ):
            pass
        error = caught.value
        assert (error.where, error.found) == ("--numa", f"{asked}: Operation not permitted")
        assert "allow set_mempolicy" in error.accepted and "--numa none" in error.hint
    reached = False
    with placement("auto", lasting=False, directory=two):
        reached = True
    assert reached and caplog.messages == ["weights are not interleaved over NUMA nodes: Operation not permitted"]


def test_a_machine_whose_calls_are_not_known_denies_too(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa.host, "machine", lambda: "vax")
    with pytest.raises(UsageError) as caught, placement("interleave", lasting=False, directory=two):
        pass
    assert caught.value.found == "interleave: the system call is not known on vax"


@needs_policy
@pytest.mark.parametrize(
    ("asked", "expected"), [("bind:0", "bind:0"), ("interleave", "interleave:0"), ("none", "default")]
)
def test_pages_of_a_mapped_file_are_read_under_the_policy(asked: str, expected: str, tmp_path: Path) -> None:
    """As the kernel itself tells it, for this mapping: the policy, and the node of its pages."""
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(64 * mmap.PAGESIZE))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        with placement(asked, lasting=False):
            assert sum(mapped[:: mmap.PAGESIZE]) >= 0
            words = next(
                line.split()
                for line in Path("/proc/thread-self/numa_maps").read_text().splitlines()
                if str(path) in line
            )
        assert words[1].startswith(expected)
        assert sum(int(w.split("=")[1]) for w in words if w.startswith("N0=")) == 64 or len(numa.nodes()) > 1
    assert numa.current() == Policy(DEFAULT)


@needs_policy
def test_a_policy_lasts_where_weights_are_read_later() -> None:
    with placement("bind:0", lasting=True):
        pass
    assert numa.current() == Policy(BIND, (0,))
    inherited: list[Policy] = []
    thread = threading.Thread(target=lambda: inherited.append(numa.current()))
    thread.start()
    thread.join()
    assert inherited == [Policy(BIND, (0,))]
    with placement("interleave", lasting=False):
        assert numa.current().mode == INTERLEAVE
    assert numa.current() == Policy(BIND, (0,)), "what was in force before"


@needs_policy
def test_a_load_that_fails_leaves_no_policy() -> None:
    with pytest.raises(RuntimeError, match="changed"), placement("bind:0", lasting=True):
        raise RuntimeError("the file changed")
    assert numa.current() == Policy(DEFAULT)


@needs_policy
def test_auto_interleaves_over_several_nodes_unless_somebody_set_a_policy(two: Path) -> None:
    with placement("auto", lasting=False):
        assert numa.current().mode == (INTERLEAVE if len(numa.nodes()) > 1 else DEFAULT)
    with placement("auto", lasting=False, directory=two):
        assert numa.current().mode == INTERLEAVE
    numa.apply(Policy(BIND, (0,)))
    with placement("auto", lasting=False, directory=two):
        assert numa.current() == Policy(BIND, (0,))
