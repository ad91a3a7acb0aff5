"""What `/metrics` tells Prometheus: the engine's own counters as they stand, and latencies as clients see them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hadron.server.worker import Generation, Worker

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)

#: field of `Stats` -> what it counts
_COUNTERS = {
    "steps": "Steps of the engine.",
    "prompt_tokens": "Tokens of the prompts of requests that began.",
    "cached_tokens": "Of those, tokens found in the prefix cache.",
    "generated_tokens": "Tokens generated.",
    "prefix_hits": "Requests that found some of their prompt in the cache.",
    "prefix_misses": "Requests that looked and found nothing.",
    "prefix_too_short": "Requests whose prompt has no whole page to find.",
    "preemptions": "Times that a request lost its cache to others.",
    "failures": "Requests that could not go on.",
    "drafts": "Times that guesses of a request's next tokens were checked.",
    "draft_tokens": "Tokens that were guessed.",
    "accepted_tokens": "Of those, tokens that were right.",
}


class _Engine(Collector):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        """Counters and gauges of the engine at this moment."""
        load = self._worker.load
        yield GaugeMetricFamily("hadron_requests_waiting", "Requests without a cache.", load.waiting)
        yield GaugeMetricFamily("hadron_requests_running", "Requests that take part in steps.", load.running)
        used = load.pages_used / load.pages if load.pages else 0.0
        yield GaugeMetricFamily("hadron_cache_usage_ratio", "Part of the pages that requests hold.", used)
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"hadron_{name}", text, getattr(self._worker.stats, name))
        by_position = CounterMetricFamily(
            "hadron_accepted_tokens_per_position", "Guesses that were right, by their place in a draft.",
            labels=("position",),
        )  # fmt: skip
        for position, right in enumerate(self._worker.stats.accepted_by_position):
            by_position.add_metric((str(position),), right)
        yield by_position


class Metrics:
    """Of one server."""

    def __init__(self, worker: Worker) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Engine(worker))
        self._requests = Counter(
            "hadron_http_requests", "Answers, by path and status.", ("path", "status"), registry=self._registry
        )
        self._finished = Counter(
            "hadron_finished", "Continuations that ended, by reason.", ("reason",), registry=self._registry
        )
        self._first = Histogram(
            "hadron_time_to_first_token_seconds", "From queueing to the first token.", buckets=_SECONDS,
            registry=self._registry,
        )  # fmt: skip
        self._between = Histogram(
            "hadron_inter_token_seconds", "Between tokens of a request.", buckets=_BETWEEN, registry=self._registry
        )
        self._whole = Histogram(
            "hadron_request_seconds", "From queueing to the end.", buckets=_SECONDS, registry=self._registry
        )
        worker.on_token = self._on_token

    def page(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)

    def answered(self, path: str, status: int) -> None:
        """An answer was sent."""
        self._requests.labels(path, str(status)).inc()

    def ended(self, reasons: list[str], seconds: float) -> None:
        """A request ended, for each continuation's reason."""
        for reason in reasons:
            self._finished.labels(reason).inc()
        self._whole.observe(seconds)

    def _on_token(self, generation: Generation, now: float, tokens: int) -> None:
        if not tokens:
            return
        if generation.last_token is None:
            self._first.observe(now - generation.began)
        else:
            each = (now - generation.last_token) * generation.open / tokens
            for _ in range(max(1, tokens // generation.open)):
                self._between.observe(each)
