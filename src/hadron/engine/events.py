"""What a step says to callers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class TokenEvent:
    """A generated token, or the end of a request without one (token_id None).

    text: what became certain with it, "" while a character or stop string is open. finish_reason: set with
    the last event of a request. index: which continuation of its prompt.
    """

    request_id: str
    token_id: int | None
    text: str
    finish_reason: str | None
    index: int = 0


#: Called with the index of a prompt and each of its tokens as they come.
OnToken = Callable[[int, TokenEvent], None]
