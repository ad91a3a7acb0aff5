"""What `/metrics` says of guesses, from counted values."""

from __future__ import annotations

from types import SimpleNamespace

from hadron.engine.stats import Load, Stats
from hadron.server.metrics import Metrics


def test_metrics_count_guesses() -> None:
    stats = Stats()
    stats.verified(3, 2)
    stats.verified(2, 0)
    page = Metrics(SimpleNamespace(stats=stats, load=Load(0, 0, 0, 1, 1), on_token=None)).page().decode()  # type: ignore[arg-type]
    for line in (
        "hadron_drafts_total 2.0", "hadron_draft_tokens_total 5.0", "hadron_accepted_tokens_total 2.0",
        'hadron_accepted_tokens_per_position_total{position="0"} 1.0',
        'hadron_accepted_tokens_per_position_total{position="1"} 1.0',
        'hadron_accepted_tokens_per_position_total{position="2"} 0.0',
    ):  # fmt: skip
        assert line in page.splitlines()
