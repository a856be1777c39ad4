"""What a materialization of the asset `departures` leaves in the database, and says about it."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from dagster import DagsterInstance, materialize

from definitions.departures import departures
from outbox_plugin import Settings
from outbox_plugin.dagster import OutboxResource
from outbox_plugin.dagster.spark import SparkResource
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.spark import OutboxWrite

pytestmark = [pytest.mark.integration, pytest.mark.spark]

ROWS = {1: 27_004, 2: 24_951}  # Of the package, by month.
MONTHS = "SELECT extract(month FROM scheduled_at AT TIME ZONE 'America/New_York')::int, count(*) FROM flight GROUP BY 1"


def materialized(dsn: str, month: int) -> dict[str, Any]:
    """Materialize one month; the metadata."""
    with DagsterInstance.ephemeral() as instance:
        result = materialize(
            [departures],
            instance=instance,
            resources={
                "outbox": OutboxResource(dsn=dsn, bootstrap_servers="127.0.0.1:1"),
                "spark": SparkResource(),
            },
            run_config={"ops": {"departures": {"config": {"month": month}}}},
        )
    [materialization] = result.asset_materializations_for_node("departures")
    return {name: value.value for name, value in materialization.metadata.items()}


@pytest.mark.slow
def test_a_month_replaces_itself_alone_and_a_repeated_run_tells_the_same(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrate(Settings(dsn=dsn, bootstrap_servers="127.0.0.1:1"))
    original, runs = OutboxWrite.__init__, iter(["run-1", "run-2", "run-2"])
    monkeypatch.setattr(OutboxWrite, "__init__", lambda self, settings, job_id: original(self, settings, next(runs)))
    seen = [materialized(dsn, month) for month in (1, 2, 2)]

    with psycopg.connect(dsn) as connection:
        assert dict(connection.execute(MONTHS).fetchall()) == ROWS
        assert connection.execute("SELECT count(*) FROM outbox").fetchone() == (26_483 + 23_690,)
    for told, month in zip(seen, (1, 2, 2), strict=True):
        assert told["flights"] == ROWS[month]
        without_event = told["cancelled_without_event"] + told["departed_without_tail_number"]
        assert told["events"] + without_event == told["flights"]
        assert told["departed_without_tail_number"] == 0
    assert [told["written_by_an_earlier_attempt"] for told in seen] == [False, False, True]
