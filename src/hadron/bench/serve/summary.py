"""Outcomes of requests to figures: latencies, throughput, goodput, failures by kind.

ttft: from sending to the first piece of text. itl: between one piece and the next, over all requests. tpot: of a
request, from its first piece to its last over the tokens behind the first. e2el: from sending to the last event. By a
schedule, times count from when a request was due, so that a client or server that falls behind cannot hide it.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import version

import numpy as np
from msgspec import Struct

from hadron.bench.serve.client import Outcome

#: What goodput can bound. Of a request, itl is the mean of its gaps.
BOUNDS = ("ttft", "itl", "tpot", "e2el")


class Spread(Struct, frozen=True):
    """Milliseconds: percentiles by linear interpolation."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class Goodput(Struct, frozen=True):
    """bounds: milliseconds by name. fraction: of the requests sent, those answered within all of them."""

    bounds: dict[str, float]
    requests_per_second: float
    fraction: float


class Failure(Struct, frozen=True):
    """A kind of failure, how often it was, and what was said the first time."""

    kind: str
    count: int
    example: str


class ServeReport(Struct, frozen=True):
    """sent = answered + failed; all but these and `failures` is of the answered. seconds: from the first sending to
    the last end. input_tokens: None where the server did not count them. tokens_by: `usage`, `pieces` or `usage and
    pieces`. most_at_once: requests. late_ms: the longest that one was sent after it was due."""

    base_url: str
    endpoint: str
    model: str
    hadron: str
    python: str
    seconds: float
    sent: int
    answered: int
    failed: int
    most_at_once: int
    late_ms: float
    input_tokens: int | None
    output_tokens: int
    tokens_by: str
    requests_per_second: float
    input_tokens_per_second: float | None
    output_tokens_per_second: float
    ttft_ms: Spread | None
    itl_ms: Spread | None
    tpot_ms: Spread | None
    e2el_ms: Spread | None
    goodput: Goodput | None
    failures: list[Failure]


def summarize(
    base_url: str, endpoint: str, model: str, outcomes: Sequence[Outcome], bounds: dict[str, float]
) -> ServeReport:
    """The figures of a run."""
    answered = [outcome for outcome in outcomes if outcome.failure is None]
    begin, end = min((o.due for o in outcomes), default=0.0), max((o.ended for o in outcomes), default=0.0)
    seconds = max(end - begin, 1e-9)
    inputs = [outcome.prompt_tokens for outcome in answered]
    known = None if None in inputs else sum(filter(None, inputs))
    written = sum(map(tokens, answered))
    latencies = [of_request(outcome) for outcome in answered]
    good = sum(all(each.get(name, 0.0) <= most for name, most in bounds.items()) for each in latencies)
    return ServeReport(
        base_url=base_url, endpoint=endpoint, model=model, hadron=version("hadron-llm"),
        python=platform.python_version(), seconds=seconds, sent=len(outcomes), answered=len(answered),
        failed=len(outcomes) - len(answered), most_at_once=_most_at_once(outcomes),
        late_ms=1000 * max((o.sent - o.due for o in outcomes), default=0.0), input_tokens=known, output_tokens=written,
        tokens_by=_counted_by(answered), requests_per_second=len(answered) / seconds,
        input_tokens_per_second=None if known is None else known / seconds,
        output_tokens_per_second=written / seconds,
        ttft_ms=_spread([each["ttft"] for each in latencies]),
        itl_ms=_spread([gap for outcome in answered for gap in gaps(outcome)]),
        tpot_ms=_spread([each["tpot"] for each in latencies if "tpot" in each]),
        e2el_ms=_spread([each["e2el"] for each in latencies]),
        goodput=Goodput(bounds, good / seconds, good / max(1, len(outcomes))) if bounds else None,
        failures=_failures(outcomes),
    )  # fmt: skip


def tokens(outcome: Outcome) -> int:
    """Tokens of an answer: as the server counted, else one for each piece."""
    return len(outcome.pieces) if outcome.completion_tokens is None else outcome.completion_tokens


def gaps(outcome: Outcome) -> list[float]:
    """Milliseconds between the pieces of an answer."""
    return [1000 * (after - before) for before, after in zip(outcome.pieces, outcome.pieces[1:], strict=False)]


def of_request(outcome: Outcome) -> dict[str, float]:
    """Latencies of an answered request in milliseconds, by the names of `BOUNDS`; none of tokens behind the first
    where there are none."""
    found = {"ttft": 1000 * (outcome.pieces[0] - outcome.due), "e2el": 1000 * (outcome.ended - outcome.due)}
    wrote = 1000 * (outcome.pieces[-1] - outcome.pieces[0])
    if len(outcome.pieces) > 1:
        found["itl"] = wrote / (len(outcome.pieces) - 1)
    if tokens(outcome) > 1:
        found["tpot"] = wrote / (tokens(outcome) - 1)
    return found


def _spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    p50, p90, p95, p99 = np.percentile(values, (50, 90, 95, 99)).tolist()
    return Spread(float(np.mean(values)), p50, p90, p95, p99, max(values))


def _most_at_once(outcomes: Sequence[Outcome]) -> int:
    steps = sorted((at, change) for o in outcomes for at, change in ((o.sent, 1), (o.ended, -1)))
    return int(max(np.cumsum([change for _, change in steps]), default=0))


def _counted_by(answered: Sequence[Outcome]) -> str:
    ways = {"pieces" if outcome.completion_tokens is None else "usage" for outcome in answered}
    return " and ".join(sorted(ways, reverse=True)) or "usage"


def _failures(outcomes: Sequence[Outcome]) -> list[Failure]:
    kinds: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.failure is not None:
            kinds.setdefault(outcome.failure, []).append(outcome.detail)
    return [Failure(kind, len(details), details[0]) for kind, details in sorted(kinds.items())]
