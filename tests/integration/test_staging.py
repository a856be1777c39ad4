"""Spark's staging tables, without Spark: where they live, and which tables are taken for one."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import psycopg
import pyarrow as pa
import pytest
from psycopg import sql
from pyspark.sql.types import StringType, StructField, StructType

from outbox_plugin import Settings
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.spark.columns import event_form
from outbox_plugin.spark.publish import Staged
from outbox_plugin.spark.sink import _connection
from outbox_plugin.spark.staging import PREFIX, StageTask, StagingTable
from tests.postgres_sessions import sessions_waiting_for_a_lock
from tests.spark_support import new_staging_table
from tests.support import eventually

pytestmark = pytest.mark.integration

FORM = event_form(StructType([StructField("key", StringType()), StructField("value", StringType())]), "t")
# How the version before staging tables had a schema of their own made one.
EARLIER = """
CREATE UNLOGGED TABLE {} WITH (autovacuum_enabled = false) AS
SELECT gen_random_uuid() AS outbox_attempt, 0::bigint AS outbox_ordinal, ''::text AS kafka_topic
FROM (VALUES (0)) AS business WITH NO DATA
"""


@pytest.fixture
def connection(dsn: str) -> Iterator[psycopg.Connection]:
    with closing(psycopg.connect(dsn, autocommit=True)) as connection:
        yield connection


@pytest.fixture
def outboxes(connection: psycopg.Connection, unmigrated: Settings) -> tuple[Settings, Settings]:
    """Two outboxes, each in a schema of its own."""
    connection.execute("CREATE SCHEMA one; CREATE SCHEMA two")
    one, two = (Settings(**{**unmigrated.model_dump(), "table": f"{each}.outbox"}) for each in ("one", "two"))
    migrate(one)
    migrate(two)
    return one, two


def new_table(outbox: Settings) -> StagingTable:
    return StagingTable(outbox.table, f"{PREFIX}{uuid.uuid4().hex}", FORM)


def exists(connection: psycopg.Connection, name: str) -> bool:
    return bool(connection.execute("SELECT FROM pg_class WHERE relname = %s", (name,)).rowcount)


def test_one_outbox_leaves_the_staging_tables_of_another_alone(
    connection: psycopg.Connection, outboxes: tuple[Settings, Settings]
) -> None:
    one, two = outboxes
    running = new_table(two)
    running.create_leased(connection, "job")
    migrate(one)
    assert exists(connection, running.name)


@pytest.mark.parametrize(
    "made",
    [
        "CREATE TABLE {} (x int)",
        "CREATE UNLOGGED TABLE {} (outbox_attempt uuid, x int)",
        "CREATE TABLE {} (outbox_attempt uuid, outbox_ordinal bigint)",
    ],
)
@pytest.mark.parametrize("name", [f"{PREFIX}archive", f"{PREFIX}{'0' * 32}"])
def test_a_table_of_the_users_stays_whatever_it_is_called(
    connection: psycopg.Connection, settings: Settings, made: str, name: str
) -> None:
    connection.execute(sql.SQL(made).format(sql.Identifier(name)))
    migrate(settings)
    assert exists(connection, name)


def test_a_table_that_took_the_name_of_a_registered_one_stays(
    connection: psycopg.Connection, settings: Settings
) -> None:
    """As after a restore: the registry names a table by an id that is another one's now."""
    lost = new_table(settings)
    lost.create_leased(connection, "job")
    lost.end_lease(connection)
    connection.execute(sql.SQL("DROP TABLE {}").format(lost.identifier))
    connection.execute(sql.SQL("CREATE TABLE {} (x int)").format(sql.Identifier(lost.name)))
    migrate(settings)
    assert exists(connection, lost.name)


def test_what_nobody_owns_is_removed_and_forgotten(connection: psycopg.Connection, settings: Settings) -> None:
    dead, leased = new_staging_table(settings, connection, "job"), new_table(settings)
    leased.create_leased(connection, "another job")
    migrate(settings)
    assert (exists(connection, dead.name), exists(connection, leased.name)) == (False, True)
    assert connection.execute("SELECT name FROM outbox_staging").fetchall() == [(leased.name,)]


def test_what_an_earlier_version_left_beside_the_outbox_is_removed(
    connection: psycopg.Connection, settings: Settings
) -> None:
    dead, ran_out, leased = (f"{PREFIX}{uuid.uuid4().hex}" for _ in range(3))
    for name in (dead, ran_out, leased):
        connection.execute(sql.SQL(EARLIER).format(sql.Identifier(name)))
    for name, until in ((ran_out, "-1 s"), (leased, "1 h")):
        lease = "INSERT INTO outbox_staging (name, job_id, leased_until) VALUES (%s, 'job', now() + %s::interval)"
        connection.execute(lease, (name, until))
    migrate(settings)
    assert [exists(connection, name) for name in (dead, ran_out, leased)] == [False, False, True]
    assert connection.execute("SELECT name FROM outbox_staging").fetchall() == [(leased,)]


def test_a_table_that_a_task_writes_to_is_left_to_a_later_job_which_finds_it(
    connection: psycopg.Connection, settings: Settings
) -> None:
    table = new_table(settings)
    table.create_leased(connection, "job")
    with psycopg.connect(settings.dsn.get_secret_value()) as task:
        task.execute(sql.SQL("LOCK TABLE {} IN ROW EXCLUSIVE MODE").format(table.identifier))
        table.drop(connection)
        assert exists(connection, table.name)
    migrate(settings)
    assert not exists(connection, table.name)


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_tasks_of_a_job_do_not_fail_each_other_whatever_the_roles_isolation_level_is(
    connection: psycopg.Connection, settings: Settings, level: str
) -> None:
    """Each begins before another has made the table, and renews a lease that another has renewed meanwhile."""
    [(database,)] = connection.execute("SELECT current_database()").fetchall()
    default = "ALTER DATABASE {} SET default_transaction_isolation = {}"
    connection.execute(sql.SQL(default).format(sql.Identifier(str(database)), sql.Literal(level)))
    table = new_table(settings)
    task = StageTask(settings.dsn.get_secret_value(), table, leased_for="job")
    batch = pa.RecordBatch.from_pydict({"key": ["k"], "value": ["v"]})

    def give_up() -> None:
        with _connection(settings) as driver:
            table.drop(driver)

    with ThreadPoolExecutor(3) as pool:
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 1))", (table.name,))
            tasks = [pool.submit(task, iter([batch])) for _ in range(3)]
            eventually(lambda: sessions_waiting_for_a_lock(settings) == 3, 30)
        attempts = [each.result() for each in tasks]
        assert Staged(table, attempts).rows == 3
        with connection.transaction():  # As a task that lost its race renews the lease while the driver gives it up.
            table.lease(connection)
            dropped = pool.submit(give_up)
            eventually(lambda: sessions_waiting_for_a_lock(settings) == 1, 30)
        dropped.result()
    assert not exists(connection, table.name)
