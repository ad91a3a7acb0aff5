"""NUMA: which nodes have memory, and whose memory pages are taken from while weights are read.

Pages of a mapped file lie where the policy of the thread that first reads them says, which set_mempolicy(2)
sets for a thread and those it starts later; mbind(2) has no say in the page cache. What is in the page
cache already stays where it is. Called by number: libnuma is not needed.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform as host
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from hadron.errors import UsageError

logger = logging.getLogger("hadron.platforms.numa")

WORDS = ("auto", "none", "interleave")
ACCEPTED = ", ".join((*WORDS, "bind:<node>"))

_NODES = Path("/sys/devices/system/node")
_BIND = re.compile(r"bind:(\d{1,6})")
#: numbers of set_mempolicy and get_mempolicy by machine; <linux/mempolicy.h> for the modes
_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236), "riscv64": (237, 236)}
_DEFAULT, _BOUND, _INTERLEAVED = 0, 2, 3
#: nodes of a mask; the kernel is never built for more
_MOST = 1024


class Policy(Struct, frozen=True):
    """As the kernel has it. mode: with its flags. nodes: none with the default mode."""

    mode: int
    nodes: tuple[int, ...] = ()


def is_word(asked: str) -> bool:
    """Whether a value of `--numa` is one, on whatever machine."""
    return asked in WORDS or _BIND.fullmatch(asked) is not None


def nodes(directory: Path = _NODES) -> tuple[int, ...]:
    """The nodes with memory that the kernel lists; node 0 where it lists none."""
    for name in ("has_memory", "online"):
        try:
            text = (directory / name).read_text()
        except OSError:
            continue
        if found := _listed(text):
            return found
    return (0,)


def policy(asked: str, available: tuple[int, ...]) -> Policy | None:
    """What `asked` sets on a machine with the nodes `available`; None where it leaves things as they are.

    `UsageError` for a node that is not there.
    """
    if asked == "interleave" or (asked == "auto" and len(available) > 1):
        return Policy(_INTERLEAVED, available)
    if (bound := _BIND.fullmatch(asked)) is None:
        return None
    node = int(bound[1])
    if node not in available:
        raise UsageError(
            "There is no such NUMA node",
            where="--numa",
            found=f"bind:{node}",
            accepted=", ".join(f"bind:{n}" for n in available) + ", or " + ", ".join(WORDS),
            hint="`hadron env` says how many nodes have memory",
        )
    return Policy(_BOUND, (node,))


@contextmanager
def placement(asked: str, *, lasting: bool, directory: Path = _NODES) -> Iterator[None]:
    """Take pages as `asked` while it is open, by this thread and those that it starts.

    lasting: also afterwards, unless it ends in an error, for weights that are read when they are used.
    `auto` respects a policy that somebody else set (numactl), and goes on without where the kernel denies
    one. `UsageError` for a node that is not there, and where the kernel denies what was asked for by name.
    """
    wanted = policy(asked, nodes(directory))
    if wanted is None:
        yield
        return
    try:
        before = current()
        if asked == "auto" and before.mode != _DEFAULT:
            wanted = before
        apply(wanted)
    except OSError as error:
        if asked != "auto":
            raise _denied(asked, error) from error
        logger.warning("weights are not interleaved over NUMA nodes: %s", error.strerror)
        yield
        return
    done = False
    try:
        yield
        done = True
    finally:
        if not (lasting and done):
            apply(before)


def current() -> Policy:
    """This thread's policy; `OSError` where the kernel has none or does not say."""
    mode, mask = ctypes.c_int(), _mask(())
    _call(1, ctypes.byref(mode), mask, ctypes.c_ulong(_MOST), None, ctypes.c_ulong(0))
    width = 8 * ctypes.sizeof(ctypes.c_ulong)
    return Policy(mode.value, tuple(n for n in range(_MOST) if mask[n // width] >> n % width & 1))


def apply(wanted: Policy) -> None:
    """Make it this thread's policy; `OSError` where the kernel refuses."""
    mask = _mask(wanted.nodes) if wanted.nodes else None
    _call(0, ctypes.c_int(wanted.mode), mask, ctypes.c_ulong(_MOST if wanted.nodes else 0))


def _mask(of: tuple[int, ...]) -> ctypes.Array[ctypes.c_ulong]:
    width = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (_MOST // width))()
    for node in of:
        mask[node // width] |= 1 << node % width
    return mask


def _call(which: int, *arguments: object) -> None:
    """set_mempolicy(2) or get_mempolicy(2)."""
    numbers = _CALLS.get(host.machine())
    if numbers is None:
        raise OSError(0, f"the system call is not known on {host.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    if libc.syscall(ctypes.c_long(numbers[which]), *arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def _denied(asked: str, error: OSError) -> UsageError:
    return UsageError(
        "The kernel denies a NUMA memory policy",
        where="--numa",
        found=f"{asked}: {error.strerror}",
        accepted="a kernel, a container and a cpuset that allow set_mempolicy for these nodes",
        hint="use --numa none; in a container allow the system call (CAP_SYS_NICE for Docker's default profile)",
    )


def _listed(text: str) -> tuple[int, ...]:
    """The nodes of a kernel's list such as `0-1,3`; none where it is not one."""
    found: list[int] = []
    for part in text.strip().split(","):
        if (match := re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part)) is None:
            return ()
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(found)
