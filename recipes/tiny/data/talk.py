"""Conversations of small talk and about Hadron, with a word problem among the earlier turns now and then."""

from __future__ import annotations

from .about import small_talk
from .markup import TALK, Sample, assistant, user
from .problems import solved
from .source import Source


def talk(source: Source) -> Sample:
    """A short conversation; a held-out one is a single question in held-out words."""
    if source.held_out:
        while not source.novel:
            question, answer = small_talk(source)
        return Sample(TALK, 0, [user(question), assistant(answer)], answer=answer)
    turns = source.number(1, 4)
    messages, learned = [], []
    for turn in range(turns):
        if turn + 1 < turns and source.chance(0.1):
            messages += solved(source)
            continue
        question, answer = small_talk(source)
        learned.append(len(messages) + 1)
        messages += [user(question), assistant(answer)]
    return Sample(TALK, turns - 1, messages, learned=learned)
