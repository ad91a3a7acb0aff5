"""What the engine counts, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Load(NamedTuple):
    """Requests that wait and run; pages that they hold, of how many; state slots that nobody holds."""

    waiting: int
    running: int
    pages_used: int
    pages: int
    free_slots: int


@dataclass(slots=True)
class Stats:
    """Since the engine began. Token counts of prompts are those of first admissions, not of preempted ones.

    prefix_hits, prefix_misses: requests that found some of their prompt in the cache, or nothing.
    prefix_too_short: requests whose prompt could not have found anything, having no whole page to share. Requests that
    take nothing from the cache (`prompt_logprobs`, no prefix caching) are none of these.
    drafts: times that guesses of a request were checked; draft_tokens: how many tokens these were,
    accepted_tokens: how many were right; accepted_by_position: the same for the first of a draft, the second, ...
    """

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    prefix_hits: int = 0
    prefix_misses: int = 0
    prefix_too_short: int = 0
    preemptions: int = 0
    failures: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=list)

    def verified(self, drafted: int, accepted: int) -> None:
        """A request had so many guesses in a step, and the first so many of them were right."""
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        self.accepted_by_position += [0] * (drafted - len(self.accepted_by_position))
        for position in range(accepted):
            self.accepted_by_position[position] += 1

    def admitted(self, prompt: int, cached: int, reusable: int, page_size: int) -> None:
        """A request with a prompt of so many tokens begins, `cached` found of `reusable` that were looked for."""
        self.prompt_tokens += prompt
        self.cached_tokens += cached
        if not reusable:
            return
        if cached:
            self.prefix_hits += 1
        elif reusable <= page_size:
            self.prefix_too_short += 1
        else:
            self.prefix_misses += 1
