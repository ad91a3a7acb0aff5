"""The exceptions Hadron raises on purpose.

    HadronError                 every message has four parts: what, where, found/accepted, hint
    ├── UsageError              a flag or an argument cannot be used
    ├── CheckpointError         a checkpoint cannot be read at all
    │   ├── ConfigError         a configuration file or one of its values
    │   ├── HubError            fetching from the Hub
    │   └── ChangedError        a file changed between the plan and the load
    ├── PlanError               the plan holds problems of severity error (`.problems`)
    ├── UnsupportedError        no kernel or backend can do it (every reason in `found`)
    ├── TokenizerError          tokenizer or chat template
    ├── RequestError            a request asks for something impossible
    ├── CapacityError           caches are too small for what is asked
    └── NumericsError           non-finite logits

Anything a file, a flag or a request can cause is one of these; an assertion is our own bug.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hadron.problems import Problem


class HadronError(Exception):
    """Base of all deliberate errors.

    what: one sentence, what failed. where: file, tensor, field or flag. found: what was there.
    accepted: what would have been accepted. hint: what the reader can do.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str, found: str, accepted: str, hint: str) -> None:
        self.what = what
        self.where = where
        self.found = found
        self.accepted = accepted
        self.hint = hint
        super().__init__(
            f"{what}\n  where:    {where}\n  found:    {found}\n  accepted: {accepted}\n  try:      {hint}"
        )

    def parts(self) -> dict[str, str]:
        """The four parts by name, for machines."""
        return {
            "what": self.what, "where": self.where, "found": self.found, "accepted": self.accepted, "hint": self.hint,
        }  # fmt: skip


class UsageError(HadronError):
    """A flag or an argument cannot be used as given."""


class CheckpointError(HadronError):
    """A checkpoint cannot be read at all."""


class ConfigError(CheckpointError):
    """A configuration file, or one value in it, cannot be used."""


class HubError(CheckpointError):
    """Something could not be fetched from the Hub."""


class ChangedError(CheckpointError):
    """A file is not what it was when the plan was made."""


class PlanError(HadronError):
    """The plan holds problems of severity `error`; nothing was loaded."""

    exit_code = 1

    def __init__(self, model: str, problems: Sequence[Problem], flags: str = "") -> None:
        """flags: what `hadron check` needs to make the same plan, such as ` --kernels triton`."""
        self.problems = tuple(problems)
        listing = "; ".join(f"{p.code} {p.message}" for p in self.problems[:5])
        more = len(self.problems) - 5
        super().__init__(
            f"{model} cannot be loaded: its plan holds {len(self.problems)} error(s)",
            where=model,
            found=listing + (f"; and {more} more" if more > 0 else ""),
            accepted="a plan without errors",
            hint=f"run `hadron check {model}{flags}` for all of them with what to do about each",
        )


class UnsupportedError(HadronError):
    """Nothing here can do what is asked; `found` holds every reason."""


class TokenizerError(HadronError):
    """A tokenizer or chat template is missing or broken."""


class RequestError(HadronError):
    """A request asks for something that cannot be done."""


class CapacityError(HadronError):
    """The caches are too small for what is asked."""


class NumericsError(HadronError):
    """Logits are not finite."""

    exit_code = 1
