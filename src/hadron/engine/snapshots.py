"""Where a prompt's recurrent state is kept for later requests. Imports no tensor library.

A snapshot has a fixed size, 146 MiB for GLM-5.3-Flash, so not every page gets one. It pays where a later
request is likely to part: at the prompt's end (the same question again, the next turn), where turns begin
(a shared system prompt, an edited history), and at doubling distances, so that a request which shares any
long beginning finds at least half of it. docs/caching.md shows the arithmetic.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

#: The first of the doubling distances, in pages: 256 tokens.
FIRST_PAGES = 4
#: Turns that get a snapshot: so many from the beginning of a prompt, and so many before its end.
FIRST_TURNS, LAST_TURNS = 2, 4


def places(token_ids: Sequence[int], page_size: int, turn_tokens: Collection[int], most: int) -> list[int]:
    """Token counts, whole pages in ascending order, after which the state of this text is kept.

    turn_tokens: ids that open a turn. most: how many there may be; the prompt's end comes first, then
    turns, then distances from the longest.
    """

    def floor(tokens: int) -> int:
        return tokens // page_size * page_size

    end = floor(len(token_ids) - 1)
    turns = [floor(i) for i, token in enumerate(token_ids) if token in turn_tokens] if turn_tokens else []
    turns = list(dict.fromkeys(turn for turn in turns if 0 < turn <= end))
    doubling = []
    distance = FIRST_PAGES * page_size
    while distance <= end:
        doubling.append(distance)
        distance *= 2
    wanted = [end, *turns[:FIRST_TURNS], *turns[FIRST_TURNS:][-LAST_TURNS:], *reversed(doubling)]
    return sorted([place for place in dict.fromkeys(wanted) if place][:most])
