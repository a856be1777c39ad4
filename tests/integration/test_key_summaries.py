"""A large batch says which keys it has: the harvester reads no row of it to know them, and never lacks a key."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
from psycopg import sql

from outbox_plugin import Event, Outbox, Settings
from outbox_plugin.access.grants import postgres_grants
from outbox_plugin.access.roles import Role
from outbox_plugin.adapters import backlog_keys
from outbox_plugin.adapters.postgres_window_store import PostgresWindowStore
from outbox_plugin.core.key_summary import HASH_BYTES
from outbox_plugin.core.postgres_ports import ReadRequest
from outbox_plugin.core.shards import Layout
from outbox_plugin.emit import drivers
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.spark import publish
from tests.emit_connections import DRIVERS, Driver, awaited
from tests.inbox_support import query
from tests.integration.test_spark_publish import commit
from tests.roles import as_role, let_in
from tests.support import eventually

pytestmark = pytest.mark.integration

BOUND = 10**12
SUMMARISE = "SELECT outbox_summarise_keys(%s)"


@pytest.fixture
def settings(dsn: str, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Of an outbox in which a batch of 100 rows is large."""
    for module in (drivers, publish):
        monkeypatch.setattr(module, "MIN_BACKLOG_IDS", 100)
    settings = Settings(dsn=dsn, bootstrap_servers="127.0.0.1:1")
    migrate(settings)
    return settings


def connect(settings: Settings, **options: Any) -> psycopg.Connection[Any]:
    return psycopg.connect(settings.dsn.get_secret_value(), **options)


def events(number: int, keys: int = 10) -> list[Event]:
    return [Event(topic="t", key=f"key-{each % keys}", value=str(each)) for each in range(number)]


def emit(settings: Settings, number: int, keys: int = 10) -> None:
    with connect(settings) as connection:
        Outbox().emit_many(connection, events(number, keys))


def summaries(settings: Settings) -> int:
    [(number,)] = query(settings, "SELECT count(*) FROM outbox_key_summary")
    return int(number)


def numbers(hashes: bytes) -> list[int]:
    return [int.from_bytes(hashes[at : at + HASH_BYTES], "big") for at in range(0, len(hashes), HASH_BYTES)]


def read_and_known(settings: Settings, bound: int = BOUND) -> tuple[list[int], set[int]]:
    """The hashes that a leader gets up to a bound, and those of the rows that are there."""
    with closing(PostgresWindowStore(settings, 0, Layout(1, 1))) as store:
        found = numbers(b"".join(store.key_hashes_up_to(bound, 1_000_000)))
        rows = [row for row in store.read(ReadRequest(1_000_000)) if row.id <= bound]
        return found, set(store.key_hashes(rows))


@pytest.mark.parametrize("driver", DRIVERS, ids=lambda each: each.name)
def test_a_large_batch_has_its_keys_summarised_on_each_kind_of_connection(
    settings: Settings, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")

    async def emitted() -> None:
        async with driver.transaction(settings.dsn.get_secret_value()) as connection:
            await awaited(Outbox().emit_many(connection, events(99)))
            await awaited(Outbox().emit_many(connection, iter(events(1_234))))

    asyncio.run(emitted())
    assert summaries(settings) == 1
    found, known = read_and_known(settings)
    assert set(found) == known
    assert len(found) < 2 * len(known)  # And not one for each row.


def test_a_job_of_spark_has_its_keys_summarised(settings: Settings) -> None:
    commit(settings, 0, *((f"key-{each % 10}", "v") for each in range(150)), tasks=3)
    commit(settings, 1, *(("key", "v") for _ in range(50)))
    found, known = read_and_known(settings)
    assert (summaries(settings), len(found), len(known)) == (1, 10 + 50, 11)
    assert set(found) == known


def test_a_very_large_batch_has_several_summaries(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers, "MAX_ROWS_IN_SUMMARY", 2_000)
    emit(settings, 5_100)
    assert summaries(settings) == 3
    found, known = read_and_known(settings)
    assert set(found) == known
    assert len(found) <= 30


def test_rows_that_no_summary_has_are_read(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else happens beside batches: rows before, between and behind, savepoints, rollbacks, deleted rows."""
    monkeypatch.setattr(backlog_keys, "KEYS_PER_PART", 7)
    monkeypatch.setattr(backlog_keys, "_BYTES_PER_PART", 3 * HASH_BYTES)
    for seed in range(25):
        _write_at_random(settings, random.Random(seed))
        [(last,)] = query(settings, "SELECT max(id) FROM outbox")
        for bound in (BOUND, int(last), random.Random(seed).randrange(int(last))):
            found, known = read_and_known(settings, bound)
            assert known <= set(found), f"seed {seed}, bound {bound}"
    assert summaries(settings)


def _write_at_random(settings: Settings, chance: random.Random) -> None:
    """Three writers by turns; each commits or rolls back at the end."""

    def write(connection: psycopg.Connection[Any], number: int) -> None:
        rows = [("t", f"{chance.randrange(10**9)}") for _ in range(number)]
        connection.cursor().executemany("INSERT INTO outbox (kafka_topic, kafka_key) VALUES (%s, %s)", rows)

    writers = [connect(settings) for _ in range(3)]
    try:
        for _ in range(chance.randrange(3, 25)):
            writer = chance.choice(writers)
            match chance.randrange(7):
                case 0 | 1 | 2:
                    write(writer, chance.choice([1, 3, 20]))
                case 3:
                    with writer.transaction(force_rollback=chance.random() < 0.5):
                        write(writer, 10)
                        writer.execute(SUMMARISE, (chance.randrange(60),))
                case 4:
                    writer.execute(SUMMARISE, (chance.choice([0, 5, 40, 10**18]),))
                case 5:
                    writer.commit()
                case 6:
                    query(settings, "DELETE FROM outbox WHERE id %% 5 = %s", chance.randrange(5))
        write(writers[0], 1)
        for writer in writers:
            writer.rollback() if chance.random() < 0.2 else writer.commit()
    finally:
        for writer in writers:
            writer.close()


def test_what_others_write_beside_a_batch_is_not_summarised(settings: Settings) -> None:
    """It leaves soon; all later rows of its keys would wait for the batch."""
    with connect(settings) as batch, connect(settings, autocommit=True) as live:
        batch.execute("INSERT INTO outbox (kafka_topic, kafka_key) VALUES ('t', 'first')")
        for number in range(4):
            with batch.transaction():  # A savepoint, which has a transaction id of its own.
                Outbox().emit_many(batch, events(60, keys=7))
            live.execute("INSERT INTO outbox (kafka_topic, kafka_key) VALUES ('t', %s)", (f"live-{number}",))
        batch.execute("INSERT INTO outbox (kafka_topic, kafka_key) SELECT 't', 'last' FROM generate_series(1, 60)")
        assert batch.execute(SUMMARISE, (300,)).fetchone() == (True,)
        live.execute("DELETE FROM outbox WHERE kafka_key LIKE 'live-%'")
        batch.commit()
    found, known = read_and_known(settings)
    assert sorted(found) == sorted(known)
    assert len(known) == 9


def test_a_batch_beside_very_many_live_events_has_a_summary(settings: Settings) -> None:
    """They leave gaps between its ids: more than a summary may have. The leader reads what is not covered."""
    with connect(settings) as batch, connect(settings) as live:
        insert = "INSERT INTO outbox (id, kafka_topic, kafka_key) SELECT n, 't', %s FROM generate_series({}, {}, 3) n"
        live.execute(insert.format(1, 33_000), ("live",))
        live.commit()
        for first in (2, 3):
            batch.execute(insert.format(first, 33_000), ("batch",))
        batch.execute(insert.replace(", 3)", ")").format(40_000, 60_000), ("end",))
        assert batch.execute(SUMMARISE, (100_000,)).fetchone() == (True,)
    found, known = read_and_known(settings)
    assert set(found) == known
    assert len(found) < 20_000


def test_nothing_that_the_session_did_before_misleads_a_summary(settings: Settings) -> None:
    """Postgres keeps the transaction id that `age` counts from; somebody may have asked it for an age before."""
    with connect(settings) as batch:
        batch.execute("SELECT age('3'::xid)")
        for _ in range(20):
            query(settings, "SELECT pg_current_xact_id()")
        Outbox().emit_many(batch, events(60))
        with batch.transaction():
            Outbox().emit_many(batch, events(60))
        assert batch.execute(SUMMARISE, (120,)).fetchone() == (True,)
    found, known = read_and_known(settings)
    assert sorted(found) == sorted(known)


def test_a_summary_is_found_without_a_walk_of_the_batch(settings: Settings) -> None:
    """The statistics are those of an empty table, as autovacuum leaves them just before a batch."""
    query(settings, "INSERT INTO outbox (kafka_topic, kafka_key) SELECT 't', 'old' FROM generate_series(1, 500)")
    query(settings, "DELETE FROM outbox")
    query(settings, "ALTER TABLE outbox SET (autovacuum_enabled = false)")
    query(settings, "ANALYZE outbox")
    emit(settings, 20_000)
    before = fetched_rows(settings)
    with closing(PostgresWindowStore(settings, 0, Layout(1, 1))) as store:
        assert len(numbers(b"".join(store.key_hashes_up_to(BOUND, 1_000_000)))) == 10
    assert fetched_rows(settings) - before < 1_000


def fetched_rows(settings: Settings) -> int:
    """How many rows of the outbox have been fetched by an index, once all sessions of the harvester have ended."""
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE starts_with(application_name, 'outbox harvester')"
    eventually(lambda: query(settings, sessions) == [(0,)], 10)
    [(rows,)] = query(settings, "SELECT idx_tup_fetch FROM pg_stat_user_tables WHERE relname = 'outbox'")
    return int(rows)


def test_a_batch_that_is_rolled_back_leaves_no_summary(settings: Settings) -> None:
    with connect(settings) as connection, connection.transaction(force_rollback=True):
        Outbox().emit_many(connection, events(1_000))
    assert summaries(settings) == 0


@pytest.mark.parametrize(
    "given_again",
    [
        "TRUNCATE outbox RESTART IDENTITY",
        "SET session_replication_role = replica; TRUNCATE outbox RESTART IDENTITY",
        "DELETE FROM outbox; ALTER SEQUENCE outbox_id_seq RESTART",
        "UPDATE outbox SET id = id + 1500; DELETE FROM outbox",
    ],
    ids=["truncated", "truncated without triggers", "set back", "from ids ahead of the sequence"],
)
@pytest.mark.parametrize("rows", [1, 1_000, 3_000])
def test_ids_that_are_given_again_are_not_taken_for_those_of_a_batch(
    settings: Settings, given_again: str, rows: int
) -> None:
    """Whether as many ids have been drawn again by then or not."""
    emit(settings, 1_000)
    for each in given_again.split("; "):
        if each.startswith("UPDATE"):
            with connect(settings) as connection:
                connection.execute(each)
                assert connection.execute(SUMMARISE, (1_000,)).fetchone() == (True,)
    query(settings, given_again)
    insert = "INSERT INTO outbox (kafka_topic, kafka_key) SELECT 't', 'new ' || n FROM generate_series(1, %s) n"
    query(settings, insert, rows)
    found, known = read_and_known(settings)
    assert set(found) == known
    assert len(found) == len(known) == rows


def test_a_summary_counts_only_while_the_end_of_its_batch_waits(settings: Settings) -> None:
    """Else one row that waits for long would have all later summaries kept and read, for ever."""
    query(settings, "INSERT INTO outbox (kafka_topic, kafka_key) VALUES ('t', 'parked')")
    for _ in range(5):
        emit(settings, 1_000)
        query(settings, "DELETE FROM outbox WHERE kafka_key <> 'parked'")
    assert summaries(settings) == 1
    found, known = read_and_known(settings)
    assert len(found) == len(known) == 1


def test_a_summary_with_far_more_keys_than_rows_that_wait_is_not_read(settings: Settings) -> None:
    """It would fill the filter, and all live rows would seem to have its keys."""
    emit(settings, 2_000, keys=2_000)
    query(settings, "DELETE FROM outbox WHERE id <= 1800")
    with closing(PostgresWindowStore(settings, 0, Layout(1, 1))) as store:
        assert len(numbers(b"".join(store.key_hashes_up_to(BOUND, 200)))) == 200
        assert len(numbers(b"".join(store.key_hashes_up_to(BOUND, 2_000)))) == 2_000


def test_a_batch_that_is_summarised_again_and_again_has_one_summary(settings: Settings) -> None:
    with connect(settings) as connection:
        Outbox().emit_many(connection, events(1_000))
        for _ in range(5):
            assert connection.execute(SUMMARISE, (1_000,)).fetchone() == (True,)
    assert summaries(settings) == 1


def test_a_column_may_have_the_name_of_a_variable(settings: Settings) -> None:
    for name in ("written", "above", "top", "nested", "whole", "made", "ours"):
        query(settings, f"ALTER TABLE outbox ADD {name} TEXT")
    emit(settings, 200)
    assert summaries(settings) == 1
    found, known = read_and_known(settings)
    assert sorted(found) == sorted(known)


def test_a_batch_that_has_ended_is_not_summarised(settings: Settings) -> None:
    """The leader has begun to read its keys."""
    emit(settings, 90)
    assert query(settings, SUMMARISE, 90) == [(False,)]
    assert summaries(settings) == 0


def test_an_id_that_two_rows_have_hides_no_gap(settings: Settings) -> None:
    """In a partitioned outbox, say. The row in the gap is written by a transaction that ends later."""
    query(settings, "ALTER TABLE outbox DROP CONSTRAINT outbox_pkey; CREATE INDEX ON outbox (id)")
    insert = "INSERT INTO outbox (id, kafka_topic, kafka_key) SELECT n, 't', 'k' FROM unnest(%s::bigint[]) n"
    with connect(settings) as connection:
        connection.execute(insert, ([1, 2, 2, 4, 5],))
        assert connection.execute(SUMMARISE, (5,)).fetchone() == (True,)
    assert query(settings, "SELECT ids @> 3::bigint FROM outbox_key_summary") == [(False,)]


def test_a_summary_that_is_removed_while_it_is_read_is_not_used(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog_keys, "_BYTES_PER_PART", 3 * HASH_BYTES)
    emit(settings, 1_000)
    with (
        closing(PostgresWindowStore(settings, 0, Layout(1, 1))) as store,
        closing(store.key_hashes_up_to(BOUND, 1_000_000)) as all_,
    ):
        parts = [next(all_)]
        query(settings, "DELETE FROM outbox_key_summary")
        parts.extend(all_)
    assert len(numbers(b"".join(parts))) == 3 + 1_000


def test_a_summary_is_removed_by_the_next_one_once_its_rows_are_gone(settings: Settings) -> None:
    emit(settings, 3_000)
    emit(settings, 10_000)
    assert summaries(settings) == 2
    query(settings, "DELETE FROM outbox WHERE id <= 3000")
    emit(settings, 10_000)
    assert summaries(settings) == 2
    query(settings, "TRUNCATE outbox")
    emit(settings, 1_000)
    assert summaries(settings) == 1


def test_ids_that_are_far_apart_are_not_summarised(settings: Settings) -> None:
    query(settings, "ALTER SEQUENCE outbox_id_seq INCREMENT BY 10")
    with connect(settings) as connection:
        insert = "INSERT INTO outbox (kafka_topic, kafka_key) SELECT 't', 'k' FROM generate_series(1, 20100)"
        connection.execute(insert)  # Ten thousand ranges of ids would cover less than half of them.
        assert connection.execute(SUMMARISE, (1_000_000,)).fetchone() == (False,)
    found, known = read_and_known(settings)
    assert set(found) == known


def test_a_serializable_batch_conflicts_with_nobody(settings: Settings) -> None:
    """It would, had it read what others write."""
    with connect(settings) as batch, connect(settings) as other:
        for each in (batch, other):
            each.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
        other.execute("SELECT count(*) FROM outbox_dead_letter")
        Outbox().emit_many(batch, events(1_000))
        Outbox().emit(other, events(1)[0])
        batch.execute(
            "INSERT INTO outbox_dead_letter (table_name, reason, create_time, kafka_topic, kafka_key,"
            " kafka_header_keys, kafka_header_values) VALUES ('', '', now(), '', '', '{}', '{}')"
        )
        other.commit()
        batch.commit()
    assert summaries(settings) == 0


@pytest.mark.parametrize(
    "broken",
    [
        "ALTER TABLE outbox_key_summary ADD CHECK (hash_form <> 1)",
        "ALTER TABLE outbox_identity RENAME TO away",
    ],
)
def test_a_failure_to_summarise_costs_the_batch_nothing(settings: Settings, broken: str) -> None:
    query(settings, broken)
    emit(settings, 1_000)
    assert (summaries(settings), query(settings, "SELECT count(*) FROM outbox")) == (0, [(1_000,)])


@pytest.mark.parametrize("table", ["outbox_key_summary", "outbox_identity"])
@pytest.mark.parametrize("timeout", ["0", "300ms"])
def test_a_batch_waits_for_no_lock_of_other_tables(settings: Settings, table: str, timeout: str) -> None:
    """As whoever alters one holds it; nor does the time that a role's statements may take end the batch."""
    with connect(settings) as holder, connect(settings) as batch:
        holder.execute(sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE").format(sql.Identifier(table)))
        batch.execute(sql.SQL("SET statement_timeout = {}").format(timeout))
        Outbox().emit_many(batch, events(1_000))
        batch.commit()
    assert (summaries(settings), query(settings, "SELECT count(*) FROM outbox")) == (0, [(1_000,)])


def test_an_outbox_that_an_earlier_version_migrated_takes_large_batches(settings: Settings) -> None:
    query(settings, "DROP FUNCTION outbox_summarise_keys; DROP TABLE outbox_key_summary")
    emit(settings, 1_000)
    found, known = read_and_known(settings)
    assert (set(found), len(found)) == (known, 1_000)


@pytest.fixture
def stranger(settings: Settings) -> Iterator[Settings]:
    """A role without any right, as which nobody logs in yet."""
    dsn = settings.dsn.get_secret_value()
    with connect(settings) as connection:
        connection.execute("CREATE ROLE stranger LOGIN")
    let_in(dsn, "stranger")
    yield settings.model_copy(update={"dsn": Settings(dsn=as_role(dsn, "stranger"), bootstrap_servers="x:1").dsn})
    with connect(settings) as connection:
        connection.execute("DROP OWNED BY stranger CASCADE; DROP ROLE stranger")


@pytest.mark.parametrize("may", [True, False], ids=["granted", "granted by an earlier version"])
def test_an_emitter_needs_no_right_to_read_for_it(settings: Settings, stranger: Settings, may: bool) -> None:
    with connect(settings) as connection:
        connection.execute(postgres_grants(settings, Role.EMITTER, "stranger").encode())
        if not may:
            connection.execute("REVOKE EXECUTE ON FUNCTION outbox_summarise_keys FROM stranger")
    emit(stranger, 1_000)
    assert summaries(settings) == may


def test_the_owner_of_the_table_has_nothing_done_as_the_one_who_migrated_it(
    settings: Settings, stranger: Settings
) -> None:
    """Reading a table can run code of its owner's: here a cast, by which a key becomes a text."""
    with connect(settings) as connection:
        connection.execute("GRANT CREATE, USAGE ON SCHEMA public TO stranger; ALTER TABLE outbox OWNER TO stranger")
        connection.execute("GRANT EXECUTE ON FUNCTION outbox_summarise_keys TO stranger")
    query(
        stranger,
        "CREATE TABLE ran_as (role TEXT); GRANT ALL ON ran_as TO PUBLIC; CREATE TYPE word AS ENUM ('k');"
        " CREATE FUNCTION spoken(word) RETURNS TEXT LANGUAGE plpgsql AS"
        " $$ BEGIN INSERT INTO public.ran_as VALUES (current_user); RETURN 'k'; END $$;"
        " CREATE CAST (word AS TEXT) WITH FUNCTION spoken(word) AS IMPLICIT;"
        " ALTER TABLE outbox ALTER kafka_key TYPE word USING 'k'::word;"
        " INSERT INTO outbox (kafka_topic, kafka_key) VALUES ('t', 'k')",
    )
    assert query(stranger, SUMMARISE, 1) == [(False,)]
    assert query(settings, "SELECT * FROM ran_as") == []


def test_an_emitter_that_may_not_use_plpgsql_takes_large_batches(settings: Settings, stranger: Settings) -> None:
    with connect(settings) as connection:
        connection.execute(postgres_grants(settings, Role.EMITTER, "stranger").encode())
        connection.execute("REVOKE USAGE ON LANGUAGE plpgsql FROM PUBLIC")
    emit(stranger, 1_000)
    assert summaries(settings) == 1


@pytest.mark.parametrize("may", [True, False], ids=["granted", "granted by an earlier version"])
def test_a_harvester_reads_the_keys_of_rows_where_it_may_read_no_summary(
    settings: Settings, stranger: Settings, may: bool
) -> None:
    with connect(settings) as connection:
        connection.execute(postgres_grants(settings, Role.HARVESTER, "stranger").encode())
        if not may:
            connection.execute("REVOKE SELECT ON outbox_key_summary FROM stranger")
    emit(settings, 1_000)
    found, known = read_and_known(stranger)
    assert (set(found), len(found)) == (known, 10 if may else 1_000)
