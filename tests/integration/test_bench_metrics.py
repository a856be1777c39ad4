"""`outbox bench metrics`: it measures what metrics cost a drain, and leaves nothing behind."""

from __future__ import annotations

import json

import psycopg
import pytest

from outbox_plugin.bench.metrics import metrics
from outbox_plugin.settings import Settings

pytestmark = pytest.mark.integration


def test_the_share_of_a_drain_is_measured(settings: Settings) -> None:
    report = metrics(settings, rows=5_000, rounds=2, tell=print)
    assert len(report.costs) == 2
    for cost in report.costs:
        assert min(cost.counting, cost.scrape) > 0
        assert 0 < cost.share < 1
    assert "of the CPU time of a drain of 5,000 rows (median of 2)" in report.lines()[-1]
    assert json.loads(json.dumps(report.to_json()))["share"] == report.share
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        assert connection.execute("SELECT FROM pg_namespace WHERE nspname LIKE 'outbox_bench_%'").fetchall() == []
