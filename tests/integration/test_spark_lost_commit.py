"""A job whose connection is lost during its commit ends as its commit did: rows are there once, and it knows so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from pyspark.sql import DataFrame, SparkSession

from outbox_plugin import Settings
from outbox_plugin.bench.proxy import Proxy
from outbox_plugin.errors import CommitUnknown, ServerRefused
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.spark import OutboxWrite, staging
from tests.postgres_sessions import sessions_waiting_for_a_lock
from tests.spark_support import count, events_of, numbers, outbox_rows, staging_tables
from tests.support import eventually

pytestmark = [pytest.mark.integration, pytest.mark.spark]

ROWS = 50
COMMITS_WAIT = """
    CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN PERFORM pg_advisory_xact_lock_shared(7); RETURN NULL; END $$;
    CREATE CONSTRAINT TRIGGER waits AFTER INSERT ON outbox_job DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION wait()
"""
NOTHING_IS_DROPPED = """
    CREATE FUNCTION refuse() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no table is dropped'; END $$;
    CREATE EVENT TRIGGER refuses ON sql_drop WHEN TAG IN ('DROP TABLE') EXECUTE FUNCTION refuse()
"""

THE_FIRST_IS_NOT_DROPPED = """
    CREATE FUNCTION refuse() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN
        IF (SELECT min(table_oid) FROM outbox_staging) IN (SELECT objid FROM pg_event_trigger_dropped_objects())
        THEN RAISE 'this table is not dropped'; END IF;
    END $$;
    CREATE EVENT TRIGGER refuses ON sql_drop WHEN TAG IN ('DROP TABLE') EXECUTE FUNCTION refuse()
"""


@pytest.fixture
def settings(dsn: str) -> Settings:
    settings = Settings(dsn=dsn, bootstrap_servers="127.0.0.1:1")
    migrate(settings)
    return settings


@pytest.fixture
def proxy(dsn: str) -> Iterator[Proxy]:
    with Proxy(int(str(conninfo_to_dict(dsn)["port"]))) as proxy:
        yield proxy


def save(settings: Settings, events: DataFrame) -> None:
    options = {"dsn": settings.dsn.get_secret_value(), "topic": "t"}
    events.write.format("outbox").options(**options).mode("append").save()


def write(settings: Settings, events: DataFrame) -> None:
    written = OutboxWrite(settings).events(events, topic="t").commit()
    assert (written.events, written.again) == (ROWS, False)


def lose_the_answer(settings: Settings, proxy: Proxy, holder: psycopg.Connection) -> None:
    proxy.discard("to client")
    holder.rollback()
    eventually(lambda: count(settings, "outbox"), 20)
    proxy.restore()


def end_the_session(settings: Settings, proxy: Proxy, holder: psycopg.Connection) -> None:
    holder.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
    holder.rollback()


def stop_for_good(_: Settings, proxy: Proxy, holder: psycopg.Connection) -> None:
    proxy.stop()
    holder.rollback()


@contextmanager
def lost_during_the_commit(
    settings: Settings, proxy: Proxy, lose: Callable[[Settings, Proxy, psycopg.Connection], None]
) -> Iterator[Settings]:
    """Settings with which a job reaches Postgres by the proxy, and loses it while its COMMIT waits."""
    direct = settings.dsn.get_secret_value()
    through = direct.replace(f":{conninfo_to_dict(direct)['port']}/", f":{proxy.port}/")
    with psycopg.connect(direct) as holder, ThreadPoolExecutor() as pool:
        holder.execute(COMMITS_WAIT.encode())
        holder.commit()
        holder.execute("SELECT pg_advisory_xact_lock(7)")

        def lose_it() -> None:
            eventually(lambda: sessions_waiting_for_a_lock(settings), 30)
            lose(settings, proxy, holder)

        losing = pool.submit(lose_it)
        yield Settings(dsn=through, bootstrap_servers="127.0.0.1:1")
        losing.result()


@pytest.mark.parametrize("lose", [lose_the_answer, end_the_session])
@pytest.mark.parametrize("job", [save, write])
def test_a_connection_that_is_lost_during_the_commit(
    spark: SparkSession,
    settings: Settings,
    proxy: Proxy,
    job: Callable[[Settings, DataFrame], None],
    lose: Callable[[Settings, Proxy, psycopg.Connection], None],
) -> None:
    with lost_during_the_commit(settings, proxy, lose) as through:
        job(through, events_of(numbers(spark, ROWS, 1)))
    assert [texts[-1] for *_, texts in outbox_rows(settings)] == [str(n + 1) for n in range(ROWS)]
    assert staging_tables(settings) == set()


@pytest.mark.parametrize(
    ("job_id", "advice"),
    [
        ("mine", "run the job again with the job id 'mine', which writes them if they are not there"),
        (None, "run the job again: its condition tells whether they were written"),
    ],
)
def test_what_to_do_if_postgres_does_not_come_back(
    spark: SparkSession,
    settings: Settings,
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
    job_id: str | None,
    advice: str,
) -> None:
    """A write with a condition refuses a job id."""
    monkeypatch.setattr(staging, "RESTART_SECONDS", 0.0)
    with lost_during_the_commit(settings, proxy, stop_for_good) as through:
        written = OutboxWrite(through, job_id).events(events_of(numbers(spark, ROWS, 1)), topic="t")
        with pytest.raises(CommitUnknown, match=f": {advice}$"):
            (written if job_id else written.only_if(lambda _: True)).commit()


@pytest.mark.parametrize("ends", ["COMMIT", "ROLLBACK"])
def test_a_condition_that_ends_the_transaction_fails_and_no_event_is_written(
    spark: SparkSession, settings: Settings, ends: str
) -> None:
    def claim(connection: psycopg.Connection[tuple[object, ...]]) -> bool:
        connection.execute(ends.encode())
        return True

    with pytest.raises(ServerRefused, match="SAVEPOINT can only be used in transaction blocks"):
        OutboxWrite(settings).events(events_of(numbers(spark, ROWS, 1)), topic="t").only_if(claim).commit()
    assert count(settings, "outbox") == 0


def test_a_condition_that_rolls_back_does_not_hold(spark: SparkSession, settings: Settings) -> None:
    def claim(_: object) -> bool:
        raise psycopg.Rollback

    done = OutboxWrite(settings).events(events_of(numbers(spark, ROWS, 1)), topic="t").only_if(claim).commit()
    assert (done.events, done.again, count(settings, "outbox"), count(settings, "outbox_job")) == (0, True, 0, 0)


def test_a_staging_table_that_cannot_be_dropped_is_left_to_later_jobs_alone(
    spark: SparkSession, settings: Settings
) -> None:
    """The other one of the job is dropped."""
    rows = numbers(spark, ROWS, 1)
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute("CREATE TABLE business (number bigint, name text)")
        connection.execute(THE_FIRST_IS_NOT_DROPPED.encode())
    OutboxWrite(settings).table(rows, "business").events(events_of(rows), topic="t").commit()
    assert len(staging_tables(settings)) == 1


@pytest.mark.parametrize("job", [save, write])
def test_a_staging_table_that_cannot_be_dropped_fails_no_job_that_has_committed(
    spark: SparkSession, settings: Settings, job: Callable[[Settings, DataFrame], None]
) -> None:
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute(NOTHING_IS_DROPPED.encode())
    job(settings, events_of(numbers(spark, ROWS, 1)))
    assert count(settings, "outbox") == ROWS
