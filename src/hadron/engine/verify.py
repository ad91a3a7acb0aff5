"""What becomes of guesses once a step's tokens are chosen: those that were right stay, and new ones are made."""

from __future__ import annotations

from collections.abc import Sequence

from hadron.engine.request import Request
from hadron.engine.runner import Ran, Runner
from hadron.engine.scheduler import Scheduled
from hadron.engine.speculative import Drafter, Taken


def settle(runner: Runner, ran: Ran, steps: Sequence[Scheduled], said: Sequence[int]) -> list[Scheduled]:
    """The steps without what was guessed wrong, which is in their caches now. said: how many tokens each gave.

    The token that is certain gives the first, every guess that was right one more; what is said last has not been
    computed yet.
    """
    settled = [
        step._replace(token_ids=step.token_ids[: max(1, count)], drafts=0) if step.drafts else step
        for step, count in zip(steps, said, strict=True)
    ]
    drafted = [own for step, own in zip(steps, settled, strict=True) if step.drafts]
    if drafted:
        runner.accept(ran.batch, drafted)
    return settled


def propose(drafter: Drafter, ran: Ran, steps: Sequence[Scheduled]) -> list[list[int]]:
    """Guesses of what follows each of the settled steps."""
    found: list[list[int]] = [[] for _ in steps]
    sound, taken = [], []
    for i, step in enumerate(steps):
        if step.request.error is None:  # nobody will read the caches of those that failed
            count = len(step.token_ids)
            wanted = useful(step.request, drafter.drafts) if step.last else 0
            first = step.cache.tokens - count
            sound.append(i)
            taken.append(Taken(step.request, step.cache, first, count, ran.batch.ranges[i][0], wanted))
    for i, own in zip(sound, drafter.propose(taken, ran.hidden), strict=True):
        found[i] = own
    return found


def useful(request: Request, most: int) -> int:
    """How many guesses of a request's next tokens could be used: its last token need not be computed."""
    if request.is_finished:
        return 0
    return max(0, min(most, request.max_new_tokens - len(request.output_token_ids) - 1))
