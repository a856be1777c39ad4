"""The roles of `docs/how-to/secure.md` may do what they need, and no more."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta

import psycopg
import pytest
from pyspark.sql import SparkSession

from outbox_plugin import Event, Harvester, Outbox, Settings
from outbox_plugin.observe import table
from outbox_plugin.schema.connection import connect
from outbox_plugin.schema.place import in_full
from outbox_plugin.spark import OutboxWrite
from outbox_plugin.status import read_status
from tests.documents import blocks
from tests.harvesting import consume, drained, insert
from tests.roles import as_role, let_in
from tests.sparking import count, staging_tables
from tests.support import eventually

pytestmark = pytest.mark.integration


@pytest.fixture
def roles(settings: Settings) -> Iterator[dict[str, Settings]]:
    """The outbox as each role sees it; with names of the test's own, as roles are the server's."""
    [block] = blocks("how-to/secure.md", "sql")
    suffix = uuid.uuid4().hex[:8]
    names = {role: f"{role}_{suffix}" for role in ("outbox_writer", "outbox_harvester", "outbox_spark")}
    text = block.text
    for role, name in names.items():
        text = text.replace(role, name)
    dsn = settings.dsn.get_secret_value()
    with psycopg.connect(dsn) as connection:
        connection.execute(text.encode())
    for name in names.values():
        let_in(dsn, name)
    yield {role: Settings(**{**settings.model_dump(), "dsn": as_role(dsn, name)}) for role, name in names.items()}
    with psycopg.connect(dsn) as connection:
        for name in names.values():
            connection.execute(f"DROP OWNED BY {name}".encode())
            connection.execute(f"DROP ROLE {name}".encode())


def test_a_writer_emits_and_reads_nothing(roles: dict[str, Settings], settings: Settings, topic: str) -> None:
    dsn = roles["outbox_writer"].dsn.get_secret_value()
    with psycopg.connect(dsn) as connection:
        Outbox().emit(connection, Event(topic=topic, key="k", value=1))
    with psycopg.connect(dsn) as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
        connection.execute("SELECT * FROM outbox")
    with psycopg.connect(dsn) as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
        connection.execute("DELETE FROM outbox")


@pytest.mark.parametrize("retention", [None, timedelta(days=7)])
def test_a_harvester_relays_and_parks(
    roles: dict[str, Settings], settings: Settings, topic: str, retention: timedelta | None
) -> None:
    """Also where it keeps what it has published, and drops a day whose time is over."""
    dsn = settings.dsn.get_secret_value()
    with psycopg.connect(dsn) as connection:
        connection.execute(
            "CREATE TABLE old PARTITION OF outbox_history FOR VALUES FROM ('2020-01-01') TO ('2020-01-02')"
        )
    harvester = roles["outbox_harvester"].model_copy(update={"retention": retention})
    insert(settings, topic, [("good", "1"), ("bad", "x" * 2_000_000), ("good", "2")])
    with Harvester(harvester):
        eventually(lambda: read_status(harvester).parked_keys == 1, 60)
        with psycopg.connect(settings.dsn.get_secret_value()) as connection:
            connection.execute("DELETE FROM outbox WHERE kafka_key = 'bad'")
        drained(settings)
    assert [record.value for record in consume(settings, topic)] == ["1", "2"]
    assert count(settings, "outbox_history") == (2 if retention else 0)
    with psycopg.connect(dsn) as connection:
        assert connection.execute("SELECT to_regclass('old') IS NULL").fetchall() == [(retention is not None,)]


def test_a_harvester_may_look_at_what_its_metrics_show(
    roles: dict[str, Settings], topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "STATEMENT_MILLISECONDS", 60_000)  # A busy machine may take its time.
    harvester = roles["outbox_harvester"]
    insert(roles["outbox_writer"], topic, [("key", "value")])
    with closing(connect(harvester)) as connection:
        found = table.look(connection, harvester.table, in_full(connection, harvester.table))
    assert found.waiting is not None
    assert (found.waiting[0].rows, found.parked_keys, found.dead_letters) == (1, 0, 0)


@pytest.mark.spark
def test_a_spark_job_writes_and_creates_nothing_beside_the_outbox(
    spark: SparkSession, roles: dict[str, Settings], settings: Settings
) -> None:
    """In both ways of writing; a row that the outbox would refuse goes to the dead letters."""
    events = spark.createDataFrame([("k", "v"), ("k" * 101, "v")], "key string, value string")
    written = OutboxWrite(roles["outbox_spark"]).events(events, topic="t", on_bad_row="deadLetter").commit()
    assert (written.events, written.set_aside) == (1, 1)
    options = {"dsn": roles["outbox_spark"].dsn.get_secret_value(), "topic": "t", "onBadRow": "deadLetter"}
    events.write.format("outbox").options(**options).mode("append").save()
    assert (count(settings, "outbox"), count(settings, "outbox_dead_letter")) == (2, 2)
    assert staging_tables(settings) == set()
    dsn = roles["outbox_spark"].dsn.get_secret_value()
    with psycopg.connect(dsn) as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
        connection.execute("CREATE TABLE beside (x int)")


def test_nobody_else_may_drop_the_days_of_the_history(roles: dict[str, Settings]) -> None:
    dsn = roles["outbox_writer"].dsn.get_secret_value()
    with psycopg.connect(dsn) as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
        connection.execute("SELECT outbox_history_days(interval '0')")
