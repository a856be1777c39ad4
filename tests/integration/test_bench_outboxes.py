"""`outbox bench outboxes`: it measures many outboxes in one harvester, and leaves nothing behind."""

from __future__ import annotations

import psycopg
import pytest

from outbox_plugin.bench.outboxes import outboxes
from outbox_plugin.settings import Settings


@pytest.mark.parametrize("rest", [None, 2.0])
def test_two_outboxes_in_one_harvester(settings: Settings, rest: float | None) -> None:
    report = outboxes(settings, count=2, seconds=1.0, times=2, rows=200, rest=rest, tell=print)
    assert report.count == 2
    assert len(report.first_milliseconds) == 2
    if rest is None:
        assert report.at_rest.postgres_connections >= 2
        assert report.at_rest.kafka_connections >= 2
    else:
        assert (report.at_rest.postgres_connections, report.at_rest.kafka_connections) == (2, 0)
    assert report.drain_ratio > 0
    assert report.takeover_seconds > 0
    assert "2 outboxes at rest" in report.lines()[-1]
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        assert connection.execute("SELECT FROM pg_namespace WHERE nspname LIKE 'outbox_bench_%'").fetchall() == []
