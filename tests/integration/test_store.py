"""The outbox in Postgres, as the relay sees it: what a read returns, and what a purge may delete."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import psycopg
import pytest
from psycopg import sql

from outbox_plugin import Settings
from outbox_plugin.adapters import postgres_window_store
from outbox_plugin.adapters.postgres_marked_store import PostgresMarkedStore
from outbox_plugin.adapters.postgres_window_store import PostgresWindowStore
from outbox_plugin.adapters.row_reader import RowReader
from outbox_plugin.core.id_ranges import IdRanges
from outbox_plugin.core.id_watermark import IdRange
from outbox_plugin.core.key_summary import HASH_BYTES
from outbox_plugin.core.ordering_key import OrderingKey
from outbox_plugin.core.postgres_ports import ReadRequest
from outbox_plugin.core.progress import Publication
from outbox_plugin.core.row import OutboxRow, WholeRecord
from outbox_plugin.core.shards import Layout
from outbox_plugin.errors import SchemaMissing, ServerRefused, StoreUnavailable
from outbox_plugin.schema import connection as connection_module
from outbox_plugin.schema.connection import connect
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.schema.statements import statement
from outbox_plugin.schema.whole_records import whole_record_parts
from tests.harvesting import backlog, insert, insert_numbered
from tests.postgres_sessions import sessions_waiting_for_a_lock
from tests.support import eventually

pytestmark = pytest.mark.integration

ALL = 1_000
LAYOUT = Layout(1, 1)


@pytest.fixture
def settings(dsn: str) -> Settings:
    settings = Settings(dsn=dsn, bootstrap_servers="127.0.0.1:1")
    migrate(settings)
    insert_numbered(settings, "t", 1, 10)
    return settings


def with_room(settings: Settings) -> Settings:
    """Settings of a client that takes large records: a value that no record can hold is not read."""
    return settings.model_copy(update={"kafka": {"message.max.bytes": "10000000"}})


@pytest.fixture
def store(settings: Settings) -> Iterator[PostgresWindowStore]:
    with closing(PostgresWindowStore(with_room(settings), 0, LAYOUT)) as store:
        yield store


def ids(store: PostgresWindowStore, in_flight: IdRanges = IdRanges()) -> list[int]:  # noqa: B008 - immutable.
    return [row.id for row in store.read(ReadRequest(ALL, in_flight=in_flight))]


def test_a_read_returns_the_earliest_rows_that_are_not_in_flight(store: PostgresWindowStore) -> None:
    assert [row.id for row in store.read(ReadRequest(3))] == [1, 2, 3]
    assert ids(store, IdRanges.of([1, 2, 5])) == [3, 4, 6, 7, 8, 9, 10]


def test_the_largest_id_there_is_stops_no_other_row(settings: Settings, store: PostgresWindowStore) -> None:
    """No range of ids ends behind it: a progress record that named it could not be read again."""
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute("INSERT INTO outbox (id, kafka_topic, kafka_key) VALUES (9223372036854775807, 't', 'k')")
    assert ids(store) == list(range(1, 11))


def test_a_character_that_the_database_s_encoding_of_clients_lacks_is_read(settings: Settings) -> None:
    insert(settings, "t", [("key", "12 €")])
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        [(name,)] = connection.execute("SELECT current_database()").fetchall()
        connection.execute(
            sql.SQL("ALTER DATABASE {} SET client_encoding = 'LATIN1'").format(sql.Identifier(str(name)))
        )
    with closing(PostgresWindowStore(settings, 0, LAYOUT)) as store:
        assert store.read(ReadRequest(ALL))[-1].value == "12 €"


def test_a_standby_is_not_read(store: PostgresWindowStore) -> None:
    """A pooler may lead to one: an empty answer would be taken for rows that are not there.

    A session that may not write stands for it: both refuse to be given the right to.
    """
    store.session.reader.execute("SET default_transaction_read_only = on")
    with pytest.raises(StoreUnavailable, match="is a standby"):
        store.read(ReadRequest(ALL))


def test_a_standby_is_not_asked_for_the_sizes_of_values_that_a_read_left_out(
    store: PostgresWindowStore, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may lack a row that the primary has: rows of its key behind it would be published before it."""
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute("UPDATE outbox SET kafka_value = repeat('x', 3000000) WHERE id = 2")
    read = store._rows.read

    def then_a_standby(*arguments: Any) -> Any:
        rows = read(*arguments)
        store.session.reader.execute("SET default_transaction_read_only = on")
        return rows

    monkeypatch.setattr(store._rows, "read", then_a_standby)
    with pytest.raises(StoreUnavailable, match="is a standby"):
        store.read(ReadRequest(ALL))


def insert_many(settings: Settings) -> None:
    """As many as come in masses, of each kind: with some headers, one or none, with a value, a large one or none."""
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute(
            "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values) "
            "SELECT 't', 'k' || i % 7, CASE i % 5 WHEN 0 THEN NULL WHEN 1 THEN repeat('é', 20000) ELSE 'v' || i END, "
            "       (ARRAY['a', 'b'])[:i % 3], (ARRAY['1', NULL])[:i % 3] FROM generate_series(1, 1000) AS i"
        )


@pytest.mark.parametrize("kind", [PostgresWindowStore, PostgresMarkedStore])
def test_rows_that_come_in_masses_come_as_few_do(
    kind: type[PostgresWindowStore | PostgresMarkedStore], settings: Settings
) -> None:
    insert_many(settings)
    parked = frozenset({OrderingKey("t", "k3"), OrderingKey("100 %s", None)})
    with closing(kind(settings, 0, LAYOUT)) as store:
        if isinstance(store, PostgresMarkedStore):
            store.lead(str(uuid.uuid4()))

        def read(limit: int) -> list[OutboxRow]:
            wanted = ReadRequest(limit, IdRange(20), IdRanges.of([25]), parked)
            rows = (
                store.read(wanted) if isinstance(store, PostgresWindowStore) else store.mark(str(uuid.uuid4()), wanted)
            )
            return [row._replace(horizon=0) for row in rows]

        first, then = read(700), read(700)
        assert len(first) == 700
        assert first == then
        assert first[:10] == read(700)[:10] == [*read(10)]


def test_large_values_are_read_a_few_at_a_time_and_whole(store: PostgresWindowStore, settings: Settings) -> None:
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute(
            "UPDATE outbox SET kafka_value = repeat(chr(64 + id::int), 3000000) WHERE id BETWEEN 2 AND 7; "
            "UPDATE outbox SET kafka_value = NULL WHERE id = 8"
        )
    first = store.read(ReadRequest(ALL))
    assert [(row.id, row.value) for row in first] == [(1, "1"), (2, "B" * 3_000_000), (3, "C" * 3_000_000)]
    second = store.read(ReadRequest(ALL, in_flight=IdRanges.of([1, 2, 3, 4, 5, 6])))
    assert [(row.id, row.value) for row in second] == [(7, "G" * 3_000_000), (8, None), (9, "9"), (10, "10")]


LARGE_HEADERS = "UPDATE outbox SET kafka_header_keys = ARRAY['h', NULL], kafka_header_values = ARRAY[{}, NULL] "


@pytest.mark.parametrize("texts", ["repeat(chr(64 + id::int), 3000000)", "repeat(md5(id::text), 93750)"])
@pytest.mark.parametrize("storage", ["EXTENDED", "EXTERNAL"])
def test_large_headers_are_read_and_marked_a_few_at_a_time_and_whole(
    settings: Settings, texts: str, storage: str
) -> None:
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute(f"ALTER TABLE outbox ALTER COLUMN kafka_header_values SET STORAGE {storage}")
        connection.execute(LARGE_HEADERS.format(texts) + "WHERE id BETWEEN 2 AND 7")
        connection.execute("UPDATE outbox SET kafka_value = NULL WHERE id IN (3, 8)")
        written = connection.execute(
            "SELECT id, kafka_value, kafka_header_keys, kafka_header_values FROM outbox ORDER BY id"
        ).fetchall()
    with closing(PostgresWindowStore(with_room(settings), 0, LAYOUT)) as store:
        reads: list[Sequence[OutboxRow]] = []
        while len(seen := [row.id for rows in reads for row in rows]) < len(written):
            reads.append(store.read(ReadRequest(ALL, in_flight=IdRanges.of(seen))))
    leader = str(uuid.uuid4())
    with closing(PostgresMarkedStore(with_room(settings), 0, LAYOUT)) as marks:
        marks.lead(leader)
        marked = [marks.mark(leader, ReadRequest(ALL)) for _ in range(4)]
    assert [[row.id for row in rows] for rows in reads] == [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10]]
    assert [[row.id for row in rows] for rows in marked] == [[1, 2, 3, 4], [5, 6, 7], [8, 9, 10], []]
    for rows in (reads, marked):
        assert [(row.id, row.value, row.header_keys, row.header_values) for part in rows for row in part] == written


@pytest.mark.parametrize("vanished", ["id = 3", "id <= 4", "id <= 10"])
def test_a_row_that_vanishes_before_its_large_value_is_read_is_no_tombstone(
    store: PostgresWindowStore, settings: Settings, monkeypatch: pytest.MonkeyPatch, vanished: str
) -> None:
    with psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection:
        connection.execute("UPDATE outbox SET kafka_value = repeat('x', 2000000)")
        insert_numbered(settings, "t", 11, 2)
        connection.execute("UPDATE outbox SET kafka_value = NULL WHERE id = 11")
        execute = store.session.reader.execute

        def delete_and_execute(*query: Any, **how: Any) -> Any:
            connection.execute(f"DELETE FROM outbox WHERE {vanished}")
            return execute(*query, **how)

        monkeypatch.setattr(store.session.reader, "execute", delete_and_execute)
        rows = store.read(ReadRequest(10))
        left = connection.execute("SELECT id, length(kafka_value) FROM outbox ORDER BY id LIMIT %s", (len(rows),))
        assert [(row.id, len(str(row.value)) if row.value else None) for row in rows] == left.fetchall()
        assert rows
        assert all(row.horizon > 0 for row in rows)


@pytest.mark.parametrize("first", [3, 1])
def test_a_row_that_is_changed_before_its_large_value_is_read_is_read_again(
    store: PostgresWindowStore, settings: Settings, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """Else a record would have the key of one row, and the value of another; and later rows would overtake it."""
    with psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection:
        connection.execute("UPDATE outbox SET kafka_value = kafka_key || repeat('x', 200000)")
        details = RowReader.details
        changes = iter(range(1))

        def change_and_read(reader: RowReader, name: str, *values: Any, **more: Any) -> Any:
            if name == "deferred_columns" and next(changes, None) is not None:
                connection.execute(
                    "UPDATE outbox SET kafka_key = 'new', kafka_value = 'new' || repeat('x', 200000) WHERE id >= %s",
                    (first,),
                )
            return details(reader, name, *values, **more)

        monkeypatch.setattr(RowReader, "details", change_and_read)
        rows = store.read(ReadRequest(1_000))
    assert all(str(row.value) == row.key + "x" * 200_000 for row in rows)
    assert [row.id for row in rows] == list(range(1, first)) or first == 1
    assert rows


def test_a_marked_row_that_is_changed_before_its_columns_are_read_is_of_one_version(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    details = RowReader.details
    leader = str(uuid.uuid4())
    with (
        psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection,
        closing(PostgresMarkedStore(settings, 0, LAYOUT)) as store,
    ):
        connection.execute(
            "INSERT INTO outbox (kafka_topic, kafka_key, kafka_header_keys, kafka_header_values, kafka_header_bytes,"
            " kafka_value_bytes) VALUES ('t', 'old', '{outbox-record}', '{}', '{}', 'old')"
        )

        def change_and_read(reader: RowReader, name: str, *values: Any, **more: Any) -> Any:
            if name == "deferred_columns":
                connection.execute(
                    "UPDATE outbox SET kafka_key = 'new', kafka_value_bytes = 'new' WHERE kafka_key = 'old'"
                )
            return details(reader, name, *values, **more)

        monkeypatch.setattr(RowReader, "details", change_and_read)
        store.lead(leader)
        marked = store.mark(leader, ReadRequest(ALL))
    [row] = [each for each in marked if isinstance(each.value, WholeRecord)]
    assert isinstance(row.value, WholeRecord)
    assert (row.key, row.value.key, row.value.value) == ("new", "new", b"new")


@pytest.mark.parametrize("kind", [PostgresWindowStore, PostgresMarkedStore])
def test_a_table_whose_ids_are_of_the_small_kind(
    dsn: str, kind: type[PostgresWindowStore | PostgresMarkedStore]
) -> None:
    settings = Settings(dsn=dsn, bootstrap_servers="127.0.0.1:1")
    with psycopg.connect(dsn) as connection:
        connection.execute(
            "CREATE TABLE outbox (id SERIAL PRIMARY KEY, create_time TIMESTAMPTZ NOT NULL DEFAULT now(), kafka_topic "
            "TEXT NOT NULL, kafka_key TEXT NOT NULL, kafka_value TEXT, kafka_header_keys TEXT[] NOT NULL DEFAULT '{}', "
            "kafka_header_values TEXT[] NOT NULL DEFAULT '{}', leader_id UUID)"
        )
    migrate(settings)
    insert_numbered(settings, "t", 1, 1_000)
    leader = str(uuid.uuid4())
    with closing(kind(settings, 0, LAYOUT)) as store:
        if isinstance(store, PostgresMarkedStore):
            store.lead(leader)
        for limit in (10, 700, 800):  # Few rows, then such that come in masses.
            wanted = ReadRequest(limit, in_flight=IdRanges.of([2]))
            rows = store.read(wanted) if isinstance(store, PostgresWindowStore) else store.mark(leader, wanted)
            if isinstance(store, PostgresWindowStore):
                assert store.purge([Publication.of(rows)]) == len(rows)
            else:
                assert store.delete(leader, [row.id for row in rows]) == len(rows)
    assert backlog(settings) == (1 if kind is PostgresWindowStore else 0)


def test_an_old_postgres_is_refused_in_one_line(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "OLDEST_POSTGRES", 99)
    with pytest.raises(
        ServerRefused, match=r"^Postgres \d+\.\d+, as OUTBOX_DSN names it, is too old: version 99 or newer"
    ):
        migrate(settings)


def test_large_values_are_marked_a_few_at_a_time_and_none_is_overtaken(settings: Settings) -> None:
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute(
            "UPDATE outbox SET kafka_value = repeat('x', 3000000) WHERE id BETWEEN 2 AND 7; "
            "UPDATE outbox SET kafka_value = NULL WHERE id IN (8, 9)"
        )
    leader = str(uuid.uuid4())
    with closing(PostgresMarkedStore(with_room(settings), 0, LAYOUT)) as marks:
        marks.lead(leader)
        marked = [[row.id for row in marks.mark(leader, ReadRequest(ALL))] for _ in range(4)]
    assert marked == [[1, 2, 3, 4], [5, 6, 7], [8, 9, 10], []]


def test_a_purge_deletes_what_was_read_and_can_be_repeated(store: PostgresWindowStore) -> None:
    publication = Publication.of([store.read(ReadRequest(ALL))[each] for each in (0, 1, 4)])
    assert (store.purge([publication]), store.purge([publication])) == (3, 0)
    assert ids(store) == [3, 4, 6, 7, 8, 9, 10]


def test_a_purge_spares_rows_that_the_read_could_not_see(store: PostgresWindowStore, settings: Settings) -> None:
    publication = Publication.of(store.read(ReadRequest(ALL)))
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute("DELETE FROM outbox WHERE id > 5")
        connection.execute(
            "INSERT INTO outbox (id, kafka_topic, kafka_key, kafka_value) "
            "SELECT i, 't', 'k', 'later' FROM generate_series(6, 10) AS i"
        )
    assert store.purge([publication]) == 5
    assert ids(store) == [6, 7, 8, 9, 10]


def test_a_purge_spares_rows_that_were_created_at_another_time(store: PostgresWindowStore) -> None:
    """As after a fail-over that undid transactions: the same ids, and the same transaction ids, given out again."""
    rows = store.read(ReadRequest(ALL))
    earlier = replace(Publication.of(rows), created_until=rows[0].create_time - 1)
    assert store.purge([earlier]) == 0
    later = replace(Publication.of(rows), created_from=rows[-1].create_time + 1)
    assert store.purge([later]) == 0
    assert store.purge([Publication.of(rows)]) == 10


REWRITES = [
    "UPDATE outbox SET leader_id = gen_random_uuid()",
    "ALTER TABLE outbox ADD COLUMN more UUID DEFAULT gen_random_uuid()",
    "ALTER TABLE outbox ALTER COLUMN kafka_value TYPE bytea USING convert_to(kafka_value, 'UTF8')",
    "VACUUM FULL outbox",
]


@pytest.mark.parametrize("rewrite", REWRITES, ids=lambda rewrite: rewrite[:30])
@pytest.mark.parametrize("retention", [None, timedelta(days=1)])
def test_a_purge_deletes_rows_that_were_rewritten_since_and_reading_goes_on(
    settings: Settings, rewrite: str, retention: timedelta | None
) -> None:
    insert_each_in_a_transaction_of_its_own(settings, 10)
    with (
        closing(PostgresWindowStore(settings.model_copy(update={"retention": retention}), 0, LAYOUT)) as store,
        psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection,
    ):
        first = store.read(ReadRequest(15))
        connection.execute(rewrite)
        store.control()
        assert store.purge([Publication.of(first)]) == 15
        rest = store.read(ReadRequest(ALL))
        assert [row.id for row in rest] == [*range(16, 21)]
        connection.execute("UPDATE outbox SET leader_id = NULL")
        assert store.recover([Publication.of(rest)]) == 5
        kept = connection.execute("SELECT count(*) FROM outbox_history").fetchone()
    assert kept == (20 if retention else 0,)
    assert backlog(settings) == 0


def test_a_purge_of_several_windows_counts_each_by_itself(settings: Settings) -> None:
    """A small window that was rewritten, and a larger one that was not: what the second deletes hides no lack."""
    insert_each_in_a_transaction_of_its_own(settings, 3)
    with (
        closing(PostgresWindowStore(settings, 0, LAYOUT)) as store,
        psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection,
    ):
        small = store.read(ReadRequest(ALL))
        connection.execute("UPDATE outbox SET leader_id = gen_random_uuid()")
        insert_each_in_a_transaction_of_its_own(settings, 20)
        large = store.read(ReadRequest(ALL))[len(small) :]
        purged = store.purge([Publication.of(small), Publication.of(large)])
    assert backlog(settings) == 0
    assert purged == len(small) + len(large)


def insert_each_in_a_transaction_of_its_own(settings: Settings, count: int) -> None:
    """Rows that were created at different times."""
    for number in range(count):
        insert_numbered(settings, "t", number, 1)


@pytest.mark.parametrize("behind", [-1_000_000, 2**31 + 5])
def test_a_purge_spares_later_rows_also_when_transaction_ids_prove_nothing(settings: Settings, behind: int) -> None:
    """They went back, as in a backup that was restored; or so many have been since that new ones look old."""
    insert_each_in_a_transaction_of_its_own(settings, 10)
    with (
        closing(PostgresWindowStore(settings, 0, LAYOUT)) as store,
        psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection,
    ):
        read = Publication.of(store.read(ReadRequest(ALL)))
        connection.execute(
            "WITH gone AS (DELETE FROM outbox WHERE id = 15 RETURNING *) "
            "INSERT INTO outbox SELECT (gone).* FROM (SELECT gone FROM gone) AS g"
        )
        connection.execute("UPDATE outbox SET create_time = create_time - interval '1 microsecond' WHERE id = 15")
        publication = replace(read, horizon=read.horizon - behind)
        assert store.purge([publication]) == 19
        assert store.recover([publication]) == 0
        assert ids(store) == [15]


def test_rows_created_at_the_end_of_time_are_told_from_others(settings: Settings) -> None:
    with (
        closing(PostgresWindowStore(settings, 0, LAYOUT)) as store,
        psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection,
    ):
        connection.execute("UPDATE outbox SET create_time = 'infinity' WHERE id = 3")
        connection.execute("UPDATE outbox SET create_time = '-infinity' WHERE id = 4")
        connection.execute("UPDATE outbox SET create_time = '9999-12-31 23:59:59.999999+00' WHERE id IN (5, 6)")
        publication = Publication.of(store.read(ReadRequest(ALL)))
        connection.execute("UPDATE outbox SET create_time = '9999-12-31 23:59:59.999998+00' WHERE id = 6")
        assert store.recover([publication]) == 9
        assert ids(store) == [6]


def test_a_record_of_an_earlier_version_is_proved_by_transaction_ids(settings: Settings) -> None:
    insert_each_in_a_transaction_of_its_own(settings, 2)
    with (
        closing(PostgresWindowStore(settings, 0, LAYOUT)) as store,
        psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection,
    ):
        publication = replace(Publication.of(store.read(ReadRequest(ALL))), created=None)
        connection.execute("UPDATE outbox SET leader_id = NULL WHERE id = 3")
        assert store.recover([publication]) == 11
        assert ids(store) == [3]


@pytest.mark.parametrize("session", ["", "SET session_replication_role = 'replica'; "])
@pytest.mark.parametrize("how", ["TRUNCATE outbox RESTART IDENTITY", "TRUNCATE outbox CASCADE"])
def test_nothing_is_deleted_from_a_table_that_was_truncated(
    store: PostgresWindowStore, settings: Settings, how: str, session: str
) -> None:
    """Whatever the new rows claim; and whoever truncates it, a tool that copies tables, too."""
    with psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection:
        copied = "INSERT INTO outbox SELECT * FROM kept"
        connection.execute("CREATE TABLE kept AS SELECT * FROM outbox")
        publication = Publication.of(store.read(ReadRequest(ALL)))
        role = f"truncator_{uuid.uuid4().hex[:8]}"
        connection.execute(f"{session}CREATE ROLE {role}; GRANT TRUNCATE ON outbox TO {role}; SET ROLE {role}")
        connection.execute(f"{how.replace(' RESTART IDENTITY', '')}; RESET ROLE; {copied}")
        assert (store.purge([publication]), store.recover([publication])) == (0, 0)
        assert ids(store) == []
        connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
    with closing(PostgresWindowStore(settings, 0, LAYOUT)) as another:
        assert ids(another) == [*range(1, 11)]


@pytest.mark.parametrize("change", ["DISABLE", "ENABLE REPLICA"])
def test_an_outbox_whose_truncation_would_go_unnoticed_is_migrated_first(settings: Settings, change: str) -> None:
    with psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection:
        connection.execute(f"ALTER TABLE outbox {change} TRIGGER outbox_truncated")
        with pytest.raises(SchemaMissing, match="lacks the trigger `outbox_truncated`; run `outbox migrate` first"):
            PostgresWindowStore(settings, 0, LAYOUT)
        migrate(settings)
        PostgresWindowStore(settings, 0, LAYOUT).close()
        connection.execute("DROP TRIGGER outbox_truncated ON outbox")
        migrate(settings)
        PostgresWindowStore(settings, 0, LAYOUT).close()


@pytest.mark.parametrize("kind", [PostgresWindowStore, PostgresMarkedStore])
@pytest.mark.parametrize("rows", [10, 1_000])
@pytest.mark.parametrize("time_out", ["statement_timeout", "lock_timeout"])
def test_a_statement_of_a_term_outlasts_the_roles_timeout(
    settings: Settings, kind: type[PostgresWindowStore | PostgresMarkedStore], rows: int, time_out: str
) -> None:
    """Each later term would time out where this one did."""
    leader = str(uuid.uuid4())
    insert_numbered(settings, "t", 11, rows - 10)
    with psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection:
        name = connection.execute("SELECT current_database()").fetchone()
        assert name is not None
        names = map(sql.Identifier, (name[0], time_out))
        connection.execute(sql.SQL("ALTER DATABASE {} SET {} = 300").format(*names))
        with closing(kind(settings, 0, LAYOUT)) as store, ThreadPoolExecutor(1) as background:

            def take() -> Sequence[OutboxRow]:
                wanted = ReadRequest(rows // 2)
                return store.read(wanted) if isinstance(store, PostgresWindowStore) else store.mark(leader, wanted)

            def delete(taken: Sequence[OutboxRow]) -> int:
                if isinstance(store, PostgresWindowStore):
                    return store.purge([Publication.of(taken)])
                return store.delete(leader, [row.id for row in taken])

            def while_locked(work: Callable[[], Any]) -> Any:
                with connection.transaction():
                    connection.execute("SET LOCAL statement_timeout = 0; LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE")
                    working = background.submit(work)
                    waited = (
                        "SELECT count(*) FROM pg_locks WHERE relation = 'outbox'::regclass AND NOT granted "
                        "AND waitstart < clock_timestamp() - interval '500 ms'"
                    )
                    eventually(lambda: working.done() or connection.execute(waited).fetchone() == (1,), 20)
                return working.result(60)

            if isinstance(store, PostgresMarkedStore):
                while_locked(partial(store.lead, leader))
            for _ in range(2):  # Rows that come in masses are read in another way.
                taken = while_locked(take)
                assert len(taken) == rows // 2
                assert while_locked(partial(delete, taken)) == rows // 2


def test_a_purge_is_durable_whatever_the_sessions_default(settings: Settings) -> None:
    with psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection:
        name = connection.execute("SELECT current_database()").fetchone()
        assert name is not None
        connection.execute(sql.SQL("ALTER DATABASE {} SET synchronous_commit = off").format(sql.Identifier(name[0])))
        connection.execute(
            "CREATE TABLE seen (setting text); CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN INSERT INTO seen VALUES (current_setting('synchronous_commit')); RETURN OLD; END $$; "
            "CREATE TRIGGER see BEFORE DELETE ON outbox FOR EACH ROW EXECUTE FUNCTION see()"
        )
        with closing(PostgresWindowStore(settings, 0, LAYOUT)) as store:
            store.purge([Publication.of(store.read(ReadRequest(ALL)))])
        assert connection.execute("SELECT DISTINCT setting FROM seen").fetchall() == [("on",)]


def test_nothing_is_read_from_a_table_that_took_the_outboxs_place(
    store: PostgresWindowStore, settings: Settings
) -> None:
    store.control()
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute("DROP TABLE outbox")
    migrate(settings)
    insert_numbered(settings, "t", 1, 10)
    assert ids(store) == []
    assert backlog(settings) == 10
    with pytest.raises(StoreUnavailable, match="was dropped, truncated or recreated"):
        store.control()


def test_nothing_is_read_from_a_table_that_was_truncated(store: PostgresWindowStore, settings: Settings) -> None:
    """Its ids are given again, to rows that what is in flight would hide."""
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute("TRUNCATE outbox RESTART IDENTITY")
    insert_numbered(settings, "t", 1, 10)
    assert ids(store) == []
    with pytest.raises(StoreUnavailable, match="truncated"):
        store.control()
    with closing(PostgresWindowStore(settings, 0, LAYOUT)) as another:
        assert ids(another) == [*range(1, 11)]


@pytest.mark.parametrize(
    ("query", "condition", "above"),
    [
        ("read_window", "of_this_outbox", 0),
        ("read_window", "of_this_outbox", 99_000),
        ("read_window", "above_open_writers", 0),
        ("purge", "visible_to_the_read", 0),
        ("purge", "created_as_published", 0),
    ],
)
def test_the_primary_key_is_walked_even_when_the_planner_believes_the_table_to_be_empty(
    settings: Settings, query: str, condition: str, above: int
) -> None:
    """A burst after the table was analysed while it was nearly empty, as every outbox is."""
    with psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection:
        insert_numbered(settings, "t", 100, 50_000)
        connection.execute("DELETE FROM outbox WHERE id > 5")
        connection.execute("ANALYZE outbox")
        insert_numbered(settings, "t", 100_000, 50_000)
        known = connection.execute("SELECT table_name, incarnation FROM outbox_identity").fetchone()
        assert known is not None
        values = {
            "in_flight": "{}",
            "limit": 5_000,
            "table": known[0],
            "incarnation": known[1],
            "ids": "{[60000,65000)}",
            "layout": 1,
            "above": above,
            "open_up_to": 99_000,
            "open_writers": [2**40],
            "large": 2_000,
            "horizon": 2**31,
            "created_until": None,
            "created_from": None,
            "each": [*range(60_000, 65_000)],
            "created": [0] * 5_000,
        }
        with connection.transaction():
            notice = statement("window", "notice_hidden_rows", settings.table)
            connection.execute(statement("window", "configure_read", settings.table, notice_hidden_rows=notice))
            same = statement("window", condition, settings.table)
            composed = statement(
                "window", query, settings.table, conditions=same, **whole_record_parts("outbox", has_columns=True)
            )
            explained = connection.execute(sql.SQL("EXPLAIN ") + composed, values)
            plan = "\n".join(line for (line,) in explained)
    assert "outbox_pkey" in plan
    assert "Seq Scan on outbox " not in plan
    assert "Sort" not in plan
    if condition == "above_open_writers":
        [searched_by] = [line for line in plan.splitlines() if "Index Cond" in line]
        assert searched_by.count("id >") == 2  # Not a filter, which would walk what is passed over.


FILLFACTOR = "SELECT reloptions FROM pg_class WHERE oid = 'outbox'::regclass"


@pytest.mark.parametrize(
    ("delivery", "before", "after"),
    [
        ("exactly-once", None, None),
        ("at-least-once", None, ["fillfactor=45"]),
        ("at-least-once", ["fillfactor=80"], ["fillfactor=80"]),
    ],
)
def test_pages_are_told_to_leave_room_for_marks_unless_somebody_has_told_them(
    settings: Settings, delivery: str, before: list[str] | None, after: list[str] | None
) -> None:
    with psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection:
        if before:
            connection.execute("ALTER TABLE outbox SET (fillfactor = 80)")
        assert connection.execute(FILLFACTOR).fetchone() == (before,)
        migrate(settings.model_copy(update={"delivery": delivery}))
        assert connection.execute(FILLFACTOR).fetchone() == (after,)


def test_a_row_that_somebody_changes_while_it_is_marked_is_not_left_out(settings: Settings) -> None:
    """Else the rows behind it would overtake it."""
    dsn = settings.dsn.get_secret_value()
    with (
        closing(PostgresMarkedStore(settings, 0, LAYOUT)) as marks,
        psycopg.connect(dsn) as changing,
        ThreadPoolExecutor(1) as background,
    ):
        marks.lead(str(uuid.uuid4()))
        changing.execute("UPDATE outbox SET kafka_value = 'changed' WHERE id = 2")
        marking = background.submit(marks.mark, str(uuid.uuid4()), ReadRequest(ALL))
        eventually(lambda: sessions_waiting_for_a_lock(settings) == 1, 20)
        changing.commit()
        rows = marking.result(60)
    assert [row.id for row in rows][:3] == [1, 2, 3]
    assert rows[1].value == "changed"


IDENTITY = (
    "ALTER TABLE outbox ALTER COLUMN id DROP DEFAULT; "
    "ALTER TABLE outbox ALTER COLUMN id ADD GENERATED BY DEFAULT AS IDENTITY (START WITH 1000)"
)
DEFAULT = """CREATE SEQUENCE "o'ther" START WITH 1000; ALTER TABLE outbox ALTER COLUMN id SET DEFAULT {}"""
OTHER = """nextval('"o''ther"'::{})"""


@pytest.mark.parametrize(
    ("change", "last_id"),
    [
        (IDENTITY, 1_000),
        (DEFAULT.format(OTHER.format("regclass")), 1_000),
        (DEFAULT.format(OTHER.format("regclass") + " + 7"), 0),
        (DEFAULT.format(OTHER.format("text")), 0),
    ],
)
def test_ids_are_bounded_by_the_sequence_that_they_are_drawn_from(
    settings: Settings, change: str, last_id: int
) -> None:
    """The column's first sequence still belongs to it, and may be used for something else. Or nothing is known."""
    with psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection:
        connection.execute(change)
        connection.execute("SELECT setval('outbox_id_seq', 5000)")
        with closing(PostgresWindowStore(settings, 0, LAYOUT)) as store, connection.transaction():
            connection.execute("INSERT INTO outbox (kafka_topic, kafka_key) VALUES ('t', 'k')")
            drawn = store.control().sequence
    assert (drawn.last_id, len(drawn.writers)) == (last_id, 1 if last_id else 0)


def test_a_writer_with_savepoints_is_known_by_the_id_of_its_whole_transaction(settings: Settings) -> None:
    """That of a savepoint would seem to have ended, and no read could pass over its rows."""
    dsn = settings.dsn.get_secret_value()
    with psycopg.connect(dsn) as writer, closing(PostgresWindowStore(settings, 0, LAYOUT)) as store:
        [whole] = writer.execute("SELECT pg_current_xact_id()::text::bigint").fetchone() or ()
        with writer.transaction():
            writer.execute("INSERT INTO outbox (kafka_topic, kafka_key) VALUES ('t', 'k')")
        assert list(store.control().sequence.transaction_ids.values()) == [whole]


def test_keys_are_not_taken_for_all_keys_when_the_table_is_another_one(settings: Settings) -> None:
    insert_numbered(settings, "t", 1, 10)
    with (
        psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection,
        closing(PostgresWindowStore(settings, 0, LAYOUT)) as store,
    ):
        assert b"".join(store.key_hashes_up_to(1_000_000, 1_000))
        connection.execute("ALTER TABLE outbox RENAME TO away")
        connection.execute("CREATE TABLE outbox (LIKE away INCLUDING ALL)")
        with pytest.raises(StoreUnavailable, match="no longer"):
            list(store.key_hashes_up_to(1_000_000, 1_000))


@pytest.mark.parametrize("key_type", ["char(10)", "varchar(10)", "text"])
def test_a_key_has_one_hash_whatever_the_columns_type_adds_to_it(settings: Settings, key_type: str) -> None:
    with (
        psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection,
        closing(PostgresWindowStore(settings, 0, LAYOUT)) as store,
    ):
        connection.execute(f"ALTER TABLE outbox ALTER kafka_key TYPE {key_type}")
        connection.execute("INSERT INTO outbox (kafka_topic, kafka_key) VALUES ('t', 'a'), ('t', 'a b'), ('t', '')")
        hashes = store.key_hashes(store.read(ReadRequest(1_000)))
        assert b"".join(store.key_hashes_up_to(1_000, 1_000)) == b"".join(
            each.to_bytes(HASH_BYTES, "big") for each in hashes
        )
        assert len(set(hashes)) == len(hashes) > 2


def test_a_statement_that_reads_keys_can_be_ended(settings: Settings) -> None:
    """However long it would take: the end of a term waits for it."""
    with (
        psycopg.connect(settings.dsn.get_secret_value()) as connection,
        closing(PostgresWindowStore(settings, 0, LAYOUT)) as store,
        ThreadPoolExecutor(1) as pool,
    ):
        connection.execute("LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE")
        reading = pool.submit(lambda: list(store.key_hashes_up_to(10, 10)))
        eventually(lambda: sessions_waiting_for_a_lock(settings) == 1, 30)
        store.cancel_key_hashes()
        with pytest.raises(StoreUnavailable, match="cancel"):
            reading.result(30)


def test_keys_are_not_read_once_the_end_of_a_term_has_begun(settings: Settings) -> None:
    """The thread that is to read them may not have begun to when the term ends."""
    with (
        psycopg.connect(settings.dsn.get_secret_value()) as connection,
        closing(PostgresWindowStore(settings, 0, LAYOUT)) as store,
        ThreadPoolExecutor(1) as pool,
    ):
        store.cancel_key_hashes()
        connection.execute("LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE")
        reading = pool.submit(lambda: list(store.key_hashes_up_to(10, 10)))
        try:
            with pytest.raises(StoreUnavailable, match="the term ends"):
                reading.result(10)
        finally:
            connection.rollback()


def test_keys_that_are_read_only_after_the_end_of_a_term_has_begun_are_not_waited_for(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request to cancel that comes while the reader connects, or between two statements, cancels none."""
    requested = threading.Event()

    def connect_late(*args: Any, **options: Any) -> Any:
        requested.wait(30)
        return connect(*args, **options)

    with (
        psycopg.connect(settings.dsn.get_secret_value()) as connection,
        closing(PostgresWindowStore(settings, 0, LAYOUT)) as store,
        ThreadPoolExecutor(2) as pool,
    ):
        monkeypatch.setattr(postgres_window_store, "connect", connect_late)
        connection.execute("LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE")
        reading = pool.submit(lambda: list(store.key_hashes_up_to(10, 10)))
        eventually(lambda: not store._keys_read.is_set(), 30)
        cancelling = pool.submit(store.cancel_key_hashes)
        requested.set()
        with pytest.raises(StoreUnavailable, match=r"cancel|the term ends"):
            reading.result(30)
        cancelling.result(30)
        assert store._keys_connection is None


def test_a_connection_that_is_lost_in_a_pipeline_is_reported_once(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection,
        closing(PostgresWindowStore(settings, 0, LAYOUT)) as store,
    ):
        for read in (store.control, lambda: store.end_of_batch(10)):
            pid = store.session.reader.info.backend_pid
            connection.execute("SELECT pg_terminate_backend(%s, 10000)", (pid,))
            with pytest.raises(StoreUnavailable, match=r"terminating|closed"):
                read()
    assert "error ignored" not in caplog.text


def test_the_end_of_a_batch_is_found_among_rows_that_are_committed_one_by_one(settings: Settings) -> None:
    with (
        psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection,
        closing(PostgresWindowStore(settings, 0, LAYOUT)) as store,
    ):

        def written(rows: int) -> int:
            """The last id of a transaction's rows."""
            insert = (
                "INSERT INTO outbox (kafka_topic, kafka_key) SELECT 't', 'k' FROM generate_series(1, %s) RETURNING id"
            )
            return max(int(id_) for (id_,) in connection.execute(insert, (rows,)))

        early = [written(1) for _ in range(20)]
        assert store.end_of_batch(early[-1]) is None
        batch = written(500)
        late = [written(1) for _ in range(20)]
        assert store.end_of_batch(late[-1]) == batch
        assert store.end_of_batch(batch - 200) == batch - 200


def test_a_table_in_which_two_rows_can_have_one_id_is_refused(settings: Settings) -> None:
    """Rows are named by their ids: a deletion would meet both."""
    with psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection:
        connection.execute("ALTER TABLE outbox DROP CONSTRAINT outbox_pkey")
        connection.execute("CREATE INDEX ON outbox (id); CREATE UNIQUE INDEX ON outbox (id) WHERE id > 5")
        with pytest.raises(SchemaMissing, match=r"^the table 'outbox' lets two rows have the same id.*ADD PRIMARY KEY"):
            PostgresWindowStore(settings, 0, LAYOUT)
        connection.execute("CREATE UNIQUE INDEX ON outbox (id)")
        connection.execute(
            "CREATE TABLE by_day (id BIGINT, create_time TIMESTAMPTZ, PRIMARY KEY (id, create_time)) "
            "PARTITION BY RANGE (create_time)"
        )
        assert connection.execute(statement("identity", "unique_ids", "by_day")).fetchall()  # It can say no more.
    PostgresWindowStore(settings, 0, LAYOUT).close()


def test_rows_with_lower_ids_that_are_committed_during_a_mark_end_no_term(settings: Settings) -> None:
    """A mark leaves a row out. Before it looks for that row, more rows are committed before it than it may mark."""
    dsn = settings.dsn.get_secret_value()
    with (
        psycopg.connect(dsn) as writer,
        psycopg.connect(dsn, autocommit=True) as other,
        closing(PostgresMarkedStore(settings, 0, LAYOUT)) as store,
    ):
        other.execute("DELETE FROM outbox")
        other.execute(
            "CREATE FUNCTION leave() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "IF NEW.id = 2001 AND NOT EXISTS (SELECT FROM outbox WHERE id = 1001) THEN RETURN NULL; END IF; "
            "RETURN NEW; END $$; "
            "CREATE TRIGGER leave BEFORE UPDATE ON outbox FOR EACH ROW EXECUTE FUNCTION leave()"
        )
        writer.execute(
            "INSERT INTO outbox (id, kafka_topic, kafka_key, kafka_value) "
            "SELECT number, 't', 'k', '' FROM generate_series(1001, 1100) AS number"
        )
        other.execute("INSERT INTO outbox (id, kafka_topic, kafka_key) VALUES (2001, 't', 'k'), (2002, 't', 'k')")
        mark = store._mark

        def mark_and_commit(*arguments: Any) -> tuple[Sequence[OutboxRow], int | None]:
            marked = mark(*arguments)
            writer.commit()
            return marked

        store._mark = mark_and_commit  # type: ignore[method-assign, assignment]
        leader = str(uuid.uuid4())
        store.lead(leader)
        marked = [row.id for _ in range(60) for row in store.mark(leader, ReadRequest(2))]
        assert marked == [*range(1001, 1101), 2001, 2002]


KEEP = "CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {condition}RETURN NULL; END $$"
KEEP_EACH = "CREATE TRIGGER keep_each BEFORE {event} ON outbox FOR EACH ROW EXECUTE FUNCTION keep()"


@contextmanager
def all_marked(settings: Settings) -> Iterator[tuple[psycopg.Connection[Any], PostgresMarkedStore, str, list[int]]]:
    """Another connection, and a store whose leader has marked all rows: its id, and theirs. `keep()` is there."""
    with (
        psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as other,
        closing(PostgresMarkedStore(settings, 0, LAYOUT)) as store,
    ):
        leader = str(uuid.uuid4())
        store.lead(leader)
        marked = [row.id for row in store.mark(leader, ReadRequest(ALL))]
        other.execute(KEEP.format(condition=""))
        yield other, store, leader, marked


def test_a_mark_that_rows_cannot_lose_again_ends_the_term(settings: Settings) -> None:
    """A mark leaves the first row out. Rows behind it that kept the mark would never be published in this term."""
    with (
        psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as other,
        closing(PostgresMarkedStore(settings, 0, LAYOUT)) as store,
    ):
        other.execute("CREATE SEQUENCE marks_of_the_first")
        first_time = "NEW.id = 1 AND nextval('marks_of_the_first') = 1"
        condition = f"IF NEW.leader_id IS NOT NULL AND NOT ({first_time}) THEN RETURN NEW; END IF; "
        other.execute(KEEP.format(condition=condition))
        other.execute(KEEP_EACH.format(event="UPDATE"))
        leader = str(uuid.uuid4())
        store.lead(leader)
        with pytest.raises(StoreUnavailable, match=r"9 row\(s\) of 'outbox' cannot lose their mark"):
            store.mark(leader, ReadRequest(ALL))
        leader = str(uuid.uuid4())
        store.lead(leader)
        assert [row.id for row in store.mark(leader, ReadRequest(ALL))] == list(range(1, 11))


def test_published_rows_of_a_table_that_is_frozen_are_noticed(settings: Settings) -> None:
    """A trigger keeps them from being deleted, and from getting the id of such rows."""
    with all_marked(settings) as (other, store, leader, marked):
        other.execute(KEEP_EACH.format(event="UPDATE OR DELETE"))
        with pytest.raises(StoreUnavailable, match=r"10 published row\(s\) of 'outbox' cannot be deleted"):
            store.delete(leader, marked)


def test_a_takeover_of_a_table_that_is_frozen_ends(settings: Settings) -> None:
    """A trigger keeps rows that could not be deleted before. The next leader asked for them again and again."""
    with all_marked(settings) as (other, store, leader, marked):
        other.execute(KEEP_EACH.format(event="DELETE"))
        with pytest.raises(StoreUnavailable, match="cannot be deleted"):
            store.delete(leader, marked)
        other.execute("DROP TRIGGER keep_each ON outbox")
        other.execute(KEEP_EACH.format(event="UPDATE OR DELETE"))
        with pytest.raises(StoreUnavailable, match=r"10 published row\(s\) of 'outbox' cannot be deleted"):
            store.lead(str(uuid.uuid4()))
        other.execute("DROP TRIGGER keep_each ON outbox")
        store.lead(str(uuid.uuid4()))
        assert other.execute("SELECT count(*) FROM outbox").fetchall() == [(0,)]
