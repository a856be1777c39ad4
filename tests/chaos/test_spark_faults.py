"""Spark's driver is killed, or Postgres is: what a job or a stream emits is there once, in order, or not yet at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from outbox_plugin import Settings
from outbox_plugin.embedded.postgres import EmbeddedPostgres
from outbox_plugin.schema.migrate import migrate
from tests.postgres_sessions import sessions_waiting_for_a_lock
from tests.processes import launched
from tests.spark_driver import application
from tests.spark_support import count, outbox_rows, staging_tables
from tests.support import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.spark, pytest.mark.timeout(1200)]

ROWS = 2_000
START_SECONDS = 300.0  # A driver starts slowly where two others do.


@pytest.fixture
def settings(dsn: str) -> Settings:
    settings = Settings(dsn=dsn, bootstrap_servers="127.0.0.1:1")
    migrate(settings)
    return settings


def numbers_of(settings: Settings) -> list[int]:
    return [json.loads(value or "")["number"] for _, value, *_ in outbox_rows(settings)]


def asked(settings: Settings, query: str) -> int:
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        row = connection.execute(query).fetchone()
    return int(row[0]) if row else 0


@pytest.mark.slow
def test_a_driver_killed_before_its_commit_leaves_nothing_and_can_be_run_again(settings: Settings) -> None:
    with psycopg.connect(settings.dsn.get_secret_value()) as holder:
        holder.execute("LOCK TABLE outbox_job IN EXCLUSIVE MODE")  # The commit waits for it, all being staged.
        with application(settings, "batch", "j", str(ROWS)) as driver:
            eventually(lambda: sessions_waiting_for_a_lock(settings), START_SECONDS)
            driver.kill()
    assert staging_tables(settings)
    eventually(
        lambda: asked(settings, "SELECT count(*) FROM pg_stat_activity WHERE application_name ~ 'spark'") == 0, 20
    )
    assert (count(settings, "outbox"), count(settings, "outbox_job")) == (0, 0)
    with application(settings, "batch", "j", str(ROWS)) as driver:
        assert driver.ends() == 0
    assert numbers_of(settings) == list(range(ROWS))
    assert staging_tables(settings) == set()  # Those of the killed driver too.


@pytest.mark.slow
def test_a_driver_killed_after_its_commit_and_run_again_writes_nothing_twice(settings: Settings) -> None:
    with application(settings, "batch", "j", str(ROWS)) as driver:
        eventually(lambda: count(settings, "outbox_job"), START_SECONDS)
        driver.kill()
    with application(settings, "batch", "j", str(ROWS)) as driver:
        assert driver.ends() == 0
    assert numbers_of(settings) == list(range(ROWS))
    assert staging_tables(settings) == set()


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_stream_that_is_killed_five_times_emits_everything_once(settings: Settings, tmp_path: Path) -> None:
    """While it stages, while it commits, and after a commit that it could not note in its checkpoint any more."""
    batches, per_batch = 8, 200
    (tmp_path / "source").mkdir()
    for batch in range(batches):
        lines = (json.dumps({"number": batch * per_batch + n}) for n in range(per_batch))
        file = tmp_path / "source" / f"{batch}.json"
        file.write_text("\n".join(lines))
        os.utime(file, (1_700_000_000 + batch,) * 2)  # Spark takes the oldest first.

    def committed() -> int:
        return asked(settings, "SELECT count(*) FROM outbox_stream") and asked(
            settings, "SELECT batch_id + 1 FROM outbox_stream"
        )

    for kill in range(5):
        before = committed()
        slow = "0" if kill % 2 else "1"  # There must be time to kill it before it has emitted everything.
        with application(settings, "stream", str(tmp_path), slow) as driver:
            if kill % 2:  # While it commits: what it did must be undone.
                with psycopg.connect(settings.dsn.get_secret_value()) as holder:
                    holder.execute("LOCK TABLE outbox_stream IN EXCLUSIVE MODE")
                    eventually(lambda: sessions_waiting_for_a_lock(settings), START_SECONDS)
                    driver.kill()
            elif kill < 4:  # As soon as a commit is seen.
                eventually(lambda before=before: committed() > before, START_SECONDS)  # type: ignore[misc]
                driver.kill()
            else:
                eventually(lambda: staging_tables(settings), START_SECONDS)
                driver.kill()
        assert count(settings, "outbox") == committed() * per_batch
        assert committed() < batches  # Else it was not killed.
    with application(settings, "stream", str(tmp_path)) as driver:
        assert driver.ends() == 0
    assert numbers_of(settings) == list(range(batches * per_batch))
    assert [texts[-1] for *_, texts in outbox_rows(settings)] == [str(n + 1) for n in range(batches * per_batch)]
    with application(settings, "stream", str(tmp_path)) as driver:
        assert driver.ends() == 0
    assert count(settings, "outbox") == batches * per_batch


@pytest.fixture
def own_postgres(tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    """A server of the test's own, which it may kill."""
    server = EmbeddedPostgres(tmp_path / "postgres")
    with launched(server):
        yield server


@pytest.mark.slow
def test_postgres_crashes_while_a_job_stages(own_postgres: EmbeddedPostgres) -> None:
    """The job ends well, or fails and is run again; either way everything is there once."""
    settings = Settings(dsn=own_postgres.dsn, bootstrap_servers="127.0.0.1:1")
    migrate(settings)
    with application(settings, "batch", "j", str(ROWS), "3") as driver:
        eventually(lambda: staging_tables(settings), START_SECONDS)
        own_postgres.kill()
        own_postgres.launch()
        own_postgres.wait()
        ended = driver.ends()
    assert count(settings, "outbox") == (0 if ended else ROWS)
    with application(settings, "batch", "j", str(ROWS)) as driver:
        assert driver.ends() == 0
    assert numbers_of(settings) == list(range(ROWS))
