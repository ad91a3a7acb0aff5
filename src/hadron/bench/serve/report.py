"""What `hadron bench serve` found, as lines for people."""

from __future__ import annotations

from collections.abc import Iterator

from hadron.bench.serve.summary import ServeReport, Spread
from hadron.bench.table import table
from hadron.preflight.report import Line, Role

_NAMES = {
    "ttft_ms": "time to first token",
    "itl_ms": "between pieces",
    "tpot_ms": "per token, of a request",
    "e2el_ms": "end to end",
}


def lines(report: ServeReport) -> Iterator[Line]:
    """A summary and a table of latencies."""
    yield Line(f"{report.base_url}, {report.endpoint}, model {report.model}", Role.TITLE)
    yield Line(f"hadron {report.hadron}, Python {report.python}", Role.DETAIL)
    yield Line(
        f"{report.sent:,} requests in {report.seconds:.2f} s, at most {report.most_at_once:,} at once: "
        f"{report.answered:,} answered, {report.failed:,} failed",
        Role.ERROR if report.failed else Role.PLAIN,
    )
    for failure in report.failures:
        yield Line(f"  {failure.count:,} {failure.kind}: {failure.example}", Role.WARNING)
    if not report.answered:
        return
    yield Line("")
    yield from table(("", "tokens", "a second"), "<>>", list(_throughput(report)))
    yield Line("")
    spreads = [(title, getattr(report, name)) for name, title in _NAMES.items()]
    rows = [(title, *_cells(spread)) for title, spread in spreads if spread is not None]
    yield from table(("milliseconds", "mean", "p50", "p90", "p95", "p99", "max"), "<>>>>>>", rows)
    yield Line("")
    if report.goodput is not None:
        bounds = ", ".join(f"{name} {most:g} ms" for name, most in report.goodput.bounds.items())
        yield Line(
            f"goodput: {report.goodput.requests_per_second:.2f} requests/s; {report.goodput.fraction:.0%} of what was "
            f"sent within {bounds}"
        )
    yield Line(_COUNTED[report.tokens_by], Role.DETAIL)
    if report.late_ms > 1:
        yield Line(f"sent up to {report.late_ms:.1f} ms late; times count from when they were due", Role.DETAIL)


_COUNTED = {
    "usage": "Tokens are those that the server counted.",
    "pieces": "The server counted no tokens: each piece of an answer counts as one, and those of prompts are unknown.",
    "usage and pieces": "Where the server counted no tokens, each piece of an answer counts as one.",
}


def _throughput(report: ServeReport) -> Iterator[tuple[str, str, str]]:
    yield "requests", "", f"{report.requests_per_second:.2f}"
    if report.input_tokens is not None and report.input_tokens_per_second is not None:
        yield "input", f"{report.input_tokens:,}", f"{report.input_tokens_per_second:.1f}"
    yield "output", f"{report.output_tokens:,}", f"{report.output_tokens_per_second:.1f}"


def _cells(spread: Spread) -> list[str]:
    return [f"{value:.1f}" for value in (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99, spread.max)]
