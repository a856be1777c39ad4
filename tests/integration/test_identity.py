"""Ids alone are not identity: tables that are truncated, dropped, restored, and outboxes that share a group."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import LiteralString

import psycopg
import pytest
from psycopg import sql
from pydantic import SecretStr

from outbox_plugin import Harvester, Settings
from outbox_plugin.adapters.harvester_registration import HarvesterRegistration
from outbox_plugin.adapters.kafka_admin import KafkaAdmin
from outbox_plugin.core.recovery import TermHistory
from outbox_plugin.embedded.postgres import EmbeddedPostgres, _as_seen_by_server, _run
from outbox_plugin.errors import ForeignOutbox, InvalidSetting, LogUnavailable, SchemaMissing, ServerRefused
from outbox_plugin.relay.events import HarvestEvent, TermFinished
from outbox_plugin.schema.connection import connect
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.status.reader import read_status
from tests.harvesting import (
    assert_exactly_once_in_order,
    backlog,
    by_key,
    consume,
    create_topic,
    drained,
    insert,
    insert_numbered,
    last_progress,
    named_by_progress,
    publish_but_kill_before_the_purge,
)
from tests.postgres_sessions import sessions_waiting_for_a_lock
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.integration

ROWS = 2_000


@pytest.fixture
def killed_before_the_purge(settings: Settings, topic: str, tmp_path: Path) -> None:
    """A leader published `ROWS` rows and was killed before it could delete them: its progress record names them."""
    insert_numbered(settings, topic, 0, ROWS)
    publish_but_kill_before_the_purge(settings, tmp_path)


REWRITES = [
    "UPDATE outbox SET leader_id = gen_random_uuid()",
    "ALTER TABLE outbox ADD COLUMN more UUID DEFAULT gen_random_uuid()",
    "ALTER TABLE outbox ALTER COLUMN kafka_value TYPE bytea USING convert_to(kafka_value, 'UTF8')",
]


def relay_all(settings: Settings, topic: str) -> list[int]:
    with Harvester(settings):
        drained(settings)
    return sorted(int(record.value or -1) for record in consume(settings, topic))


@pytest.mark.usefixtures("killed_before_the_purge")
class TestAfterAKill:
    def test_a_truncated_and_refilled_table_loses_nothing(self, settings: Settings, topic: str) -> None:
        with psycopg.connect(settings.dsn.get_secret_value()) as connection:
            connection.execute("TRUNCATE outbox RESTART IDENTITY")
        insert_numbered(settings, topic, ROWS, ROWS)
        assert relay_all(settings, topic) == list(range(2 * ROWS))

    def test_even_when_the_new_rows_claim_to_be_as_old_as_the_old_ones(self, settings: Settings, topic: str) -> None:
        with psycopg.connect(settings.dsn.get_secret_value()) as connection:
            connection.execute("TRUNCATE outbox RESTART IDENTITY")
        insert_numbered(settings, topic, ROWS, ROWS)
        with psycopg.connect(settings.dsn.get_secret_value()) as connection:
            connection.execute("UPDATE outbox SET create_time = '2001-01-01'")
        assert relay_all(settings, topic) == list(range(2 * ROWS))

    def test_a_dropped_and_migrated_table_loses_nothing(self, settings: Settings, topic: str) -> None:
        with psycopg.connect(settings.dsn.get_secret_value()) as connection:
            connection.execute("DROP TABLE outbox")
        assert migrate(settings)
        insert_numbered(settings, topic, ROWS, ROWS)
        assert relay_all(settings, topic) == list(range(2 * ROWS))

    def test_all_our_tables_dropped_and_migrated_anew(self, settings: Settings, topic: str) -> None:
        with psycopg.connect(settings.dsn.get_secret_value()) as connection:
            connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        migrate(settings)
        insert_numbered(settings, topic, ROWS, ROWS)
        assert relay_all(settings, topic) == list(range(2 * ROWS))

    @pytest.mark.parametrize("rewrite", REWRITES, ids=lambda rewrite: rewrite[:30])
    def test_rows_that_were_rewritten_since_are_not_published_again(
        self, settings: Settings, topic: str, rewrite: str
    ) -> None:
        with psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection:
            connection.execute(rewrite)
        assert relay_all(settings, topic) == list(range(ROWS))

    def test_a_table_that_was_recreated_by_hand_is_not_guessed_at(self, settings: Settings) -> None:
        with psycopg.connect(settings.dsn.get_secret_value()) as connection:
            connection.execute("CREATE TABLE other (LIKE outbox INCLUDING ALL); DROP TABLE outbox CASCADE")
            connection.execute("ALTER TABLE other RENAME TO outbox")
        with pytest.raises(SchemaMissing, match="was dropped and recreated, or restored; run `outbox migrate`"):
            Harvester(settings).start()


@pytest.mark.parametrize("rewrite", REWRITES, ids=lambda rewrite: rewrite[:30])
def test_rows_that_are_rewritten_in_flight_are_published_once(settings: Settings, topic: str, rewrite: str) -> None:
    """Between their publication and their purge, which waits for the lock."""
    insert_numbered(settings, topic, 0, ROWS // 2)
    insert_numbered(settings, topic, ROWS // 2, ROWS // 2)
    with psycopg.connect(settings.dsn.get_secret_value()) as migration:
        migration.execute("LOCK TABLE outbox IN SHARE MODE")
        events: list[HarvestEvent] = []
        with Harvester(settings, observe=events.append):
            eventually(lambda: named_by_progress(settings) == ROWS, 60)
            migration.execute(rewrite.encode())
            migration.commit()
            drained(settings)
            assert not any(isinstance(event, TermFinished) for event in events)
    assert_exactly_once_in_order(consume(settings, topic), 0, ROWS)


@pytest.fixture
def own_postgres(tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    """A Postgres whose transaction ids may be tampered with."""
    postgres = EmbeddedPostgres(tmp_path / "postgres")
    postgres.launch()
    postgres.wait()
    yield postgres
    postgres.stop()


def jump(postgres: EmbeddedPostgres, transactions: int) -> None:
    """Let the next transaction be the one after so many: fewer than 2^31, the most between two freezes."""
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        connection.execute("UPDATE pg_database SET datallowconn = true")
        databases = [name for (name,) in connection.execute("SELECT datname FROM pg_database")]
        [(last,)] = connection.execute("SELECT pg_current_xact_id()::text::bigint").fetchall()
    for name in databases:
        with psycopg.connect(postgres.dsn, dbname=name, autocommit=True) as connection:
            connection.execute("VACUUM (FREEZE)")
    postgres.stop()
    data, wanted = postgres.folder / "data", (last + transactions) % 2**32
    status = data / "pg_xact" / f"{wanted // 2**20:04X}"  # A page of what became of them has to be there.
    status.write_bytes(bytes(2**18))
    shutil.chown(status, data.owner(), data.group())
    command = ["pg_resetwal", "--next-transaction-id", str(wanted), "--pgdata", _as_seen_by_server(data)]
    _run("set the next transaction id", data, command)
    postgres.launch()
    postgres.wait()


def test_a_row_that_outlived_two_thousand_million_transactions_is_published_once(
    unmigrated: Settings, group: str, own_postgres: EmbeddedPostgres
) -> None:
    topic = create_topic(unmigrated, f"{group}-events")
    old = unmigrated.model_copy(update={"dsn": SecretStr(own_postgres.dsn)})
    migrate(old)
    insert_numbered(old, topic, 0, 10)
    for _ in range(2):
        jump(own_postgres, 1_500_000_000)
        old = old.model_copy(update={"dsn": SecretStr(own_postgres.dsn)})
    with psycopg.connect(own_postgres.dsn) as connection:
        assert connection.execute("SELECT max(age(xmin)) < 0 FROM outbox").fetchone() == (True,)
    insert_numbered(old, topic, 10, 10)
    assert relay_all(old, topic) == list(range(20))


def test_a_table_that_is_dropped_and_migrated_under_a_running_harvester(settings: Settings, topic: str) -> None:
    with Harvester(settings):
        insert(settings, topic, [("k", "before")])
        drained(settings)
        with psycopg.connect(settings.dsn.get_secret_value()) as connection:
            connection.execute("DROP TABLE outbox")
        migrate(settings)
        insert(settings, topic, [("k", "after")])
        drained(settings)
        record = last_progress(settings)
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        now = connection.execute("SELECT incarnation::text FROM outbox_identity").fetchone()
    assert record is not None
    assert (record.identity.incarnation,) == now
    assert by_key(consume(settings, topic)) == {"k": ["before", "after"]}


@pytest.mark.parametrize("first_runs", [True, False])
def test_two_outboxes_pointed_at_one_group_by_mistake(settings: Settings, topic: str, first_runs: bool) -> None:
    """The second is refused, whether the first one runs or only has run; nothing of either is deleted."""
    second = settings.model_copy(update={"table": "outbox_of_somebody_else"})
    migrate(second)
    insert(second, topic, [("k", "not ours")])
    first = Harvester(settings)
    first.start()
    insert(settings, topic, [("k", "ours")])
    drained(settings)
    if not first_runs:
        first.stop()
    try:
        with pytest.raises(ForeignOutbox, match=r"relays another outbox: outbox in .*OUTBOX_GROUP of its own"):
            Harvester(second).start()
    finally:
        first.stop()
    assert backlog(second) == 1
    assert by_key(consume(settings, topic)) == {"k": ["ours"]}


@pytest.mark.parametrize("first_runs", [True, False])
def test_two_outboxes_that_differ_by_search_path_alone_are_told_apart(
    unmigrated: Settings, group: str, first_runs: bool
) -> None:
    topic = create_topic(unmigrated, f"{group}-events")
    dsn = unmigrated.dsn.get_secret_value()
    first, second = (
        unmigrated.model_copy(update={"dsn": SecretStr(f"{dsn}?options=-csearch_path%3D{schema}")})
        for schema in ("sales", "stock")
    )
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE SCHEMA sales; CREATE SCHEMA stock")
    for each, value in ((first, "ours"), (second, "not ours")):
        migrate(each)
        insert(each, topic, [("k", value)])
    leader = Harvester(first)
    leader.start()
    drained(first)
    if not first_runs:
        leader.stop()
    try:
        with pytest.raises(ForeignOutbox, match=r"another outbox:? sales.outbox in .*OUTBOX_GROUP of its own"):
            Harvester(second).start()
    finally:
        leader.stop()
    assert backlog(second) == 1
    assert by_key(consume(first, topic)) == {"k": ["ours"]}


def test_an_outbox_has_one_name(settings: Settings) -> None:
    """By another one it would be another outbox, with another group, pauses and parked keys of its own."""
    qualified = settings.model_copy(update={"table": "public.outbox"})
    expected = "OUTBOX_TABLE: the table 'public.outbox' is known as 'outbox' here; set OUTBOX_TABLE to that"
    with pytest.raises(InvalidSetting, match=expected):
        migrate(qualified)
    with pytest.raises(InvalidSetting, match=expected):
        Harvester(qualified).start()


def test_of_two_names_that_an_earlier_version_allowed_the_harvested_one_is_right(settings: Settings) -> None:
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute(
            "INSERT INTO outbox_identity (table_name, table_oid, incarnation, since) "
            "VALUES ('public.outbox', 'outbox'::regclass, gen_random_uuid(), '2001-01-01')"
        )
        connection.execute(
            "UPDATE outbox_identity SET harvest_group = %s WHERE table_name = 'outbox'", [settings.group]
        )
    Harvester(settings)._check()
    assert not migrate(settings)
    with pytest.raises(InvalidSetting, match=r"'public\.outbox' is known as 'outbox'"):
        Harvester(settings.model_copy(update={"table": "public.outbox"})).start()


def test_a_stricter_isolation_of_transactions_is_refused(settings: Settings) -> None:
    """A statement would not see what was done before it got its lock."""
    dsn = f"{settings.dsn.get_secret_value()}?options=-cdefault_transaction_isolation%3Drepeatable%5C%20read"
    with pytest.raises(ServerRefused, match=r"default_transaction_isolation is 'repeatable read' .*ALTER ROLE"):
        Harvester(settings.model_copy(update={"dsn": SecretStr(dsn)})).start()


def test_a_second_group_on_one_outbox_is_refused_unless_it_adopts(settings: Settings, topic: str) -> None:
    """Fencing would not stop it: the two would publish every row twice."""
    with Harvester(settings):
        insert(settings, topic, [("k", "1")])
        drained(settings)
    other = settings.model_copy(update={"group": f"{settings.group}-other"})
    with pytest.raises(ForeignOutbox, match=f"the group '{settings.group}' harvests the outbox 'outbox'"):
        Harvester(other).start()
    insert(settings, topic, [("k", "2")])
    with Harvester(other, adopt=True):
        drained(settings)
    with pytest.raises(ForeignOutbox, match=f"the group '{other.group}' harvests"):
        Harvester(settings).start()
    assert by_key(consume(settings, topic)) == {"k": ["1", "2"]}


def test_an_adoption_that_fails_on_kafka_changes_nothing(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the group, nor the delivery, nor the number of shards."""
    with Harvester(settings):
        pass

    def fail(*_: object, **__: object) -> None:
        raise LogUnavailable("Kafka: away")

    changes = {"group": f"{settings.group}-other", "delivery": "at-least-once", "shards": 3}
    with monkeypatch.context() as patch:
        patch.setattr(KafkaAdmin, "ensure_topics", fail)
        with pytest.raises(ServerRefused, match="Kafka: away"):
            Harvester(settings.model_copy(update=changes), adopt=True).start()
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        found = connection.execute("SELECT harvest_group, delivery, shards FROM outbox_identity").fetchall()
    assert found == [(settings.group, "exactly-once", 1)]
    with Harvester(settings):
        pass


def test_a_group_is_taken_over_from_an_outbox_that_is_no_more(settings: Settings, topic: str) -> None:
    with Harvester(settings):
        insert(settings, topic, [("k", "1")])
        drained(settings)
    moved = settings.model_copy(update={"table": "outbox_moved"})
    migrate(moved)
    insert(moved, topic, [("k", "2")])
    with Harvester(moved, adopt=True):
        drained(moved)
    with Harvester(moved):
        insert(moved, topic, [("k", "3")])
        drained(moved)
    assert by_key(consume(settings, topic)) == {"k": ["1", "2", "3"]}


@pytest.mark.parametrize(
    ("form", "told"),
    [
        ("CACHE 20", "drawn 20 at a time"),
        ("INCREMENT -1 MINVALUE -1000", "INCREMENT is -1"),
        ("MAXVALUE 1000 CYCLE", "begin again"),
    ],
)
def test_ids_that_do_not_ascend_are_told(settings: Settings, topic: str, form: LiteralString, told: str) -> None:
    """The rows leave all the same."""
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute("ALTER SEQUENCE outbox_id_seq " + form)
    insert_numbered(settings, topic, 1, 30)
    with Harvester(settings):
        eventually(lambda: told in (read_status(settings).shards[0].trouble or ""), 30)
        insert_numbered(settings, topic, 31, 30)
        drained(settings)
    assert {int(record.value or 0) for record in consume(settings, topic)} == set(range(1, 61))


def test_a_start_that_is_stopped_in_its_transaction_begins_it_again(
    settings: Settings, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Postgres ends the session then, as others may wait for what it has locked."""
    stopped: list[int] = []
    terms = HarvesterRegistration.terms

    def stopped_once(registration: HarvesterRegistration) -> TermHistory:
        if not stopped:
            stopped.append(registration._connection.info.backend_pid)
            registration._connection.execute("SET LOCAL idle_in_transaction_session_timeout = 50")
            eventually(lambda: not is_there(settings, stopped[0]), 30)
        return terms(registration)

    monkeypatch.setattr(HarvesterRegistration, "terms", stopped_once)
    insert_numbered(settings, topic, 0, 10)
    with Harvester(settings):
        drained(settings)
    assert stopped


def test_a_start_waits_for_whoever_locks_the_outbox_and_says_so(
    settings: Settings, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    harvester = Harvester(settings)
    with psycopg.connect(settings.dsn.get_secret_value()) as other, ThreadPoolExecutor() as starts:
        other.execute("SELECT FROM outbox_identity FOR UPDATE")
        started = starts.submit(harvester.start)
        eventually(lambda: "waiting for another session that locks the outbox" in caplog.text, 60)
        other.rollback()
        started.result(60 * PATIENCE)
    insert_numbered(settings, topic, 0, 10)
    drained(settings)
    harvester.stop()


@pytest.mark.parametrize("time_out", ["statement_timeout", "transaction_timeout"])
def test_a_start_waits_for_a_lock_for_longer_than_the_roles_time_outs(
    settings: Settings, time_out: str, caplog: pytest.LogCaptureFixture
) -> None:
    harvester = Harvester(settings)
    with psycopg.connect(settings.dsn.get_secret_value()) as other, ThreadPoolExecutor() as starts:
        if other.info.server_version < 170_000 and time_out == "transaction_timeout":
            pytest.skip("Postgres 17 has brought it")
        path = sql.SQL("ALTER ROLE CURRENT_USER IN DATABASE {} SET {} = '2s'")
        other.execute(path.format(sql.Identifier(other.info.dbname), sql.Identifier(time_out)))
        other.commit()
        other.execute("SELECT FROM outbox_identity FOR UPDATE")
        started = starts.submit(harvester.start)
        eventually(lambda: "waiting for another session that locks the outbox" in caplog.text or started.done(), 60)
        other.rollback()
        started.result(60 * PATIENCE)
    harvester.stop()


def test_a_start_that_waits_for_a_lock_can_be_stopped(settings: Settings) -> None:
    harvester = Harvester(settings)
    with psycopg.connect(settings.dsn.get_secret_value()) as other, ThreadPoolExecutor() as starts:
        other.execute("SELECT FROM outbox_identity FOR UPDATE")
        started = starts.submit(harvester.start)
        eventually(lambda: sessions_waiting_for_a_lock(settings), 60)
        harvester.stop()
        with pytest.raises(ServerRefused, match="lock timeout"):
            started.result(60 * PATIENCE)


def is_there(settings: Settings, pid: int) -> bool:
    """Whether Postgres still has this session."""
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        return bool(connection.execute("SELECT FROM pg_stat_activity WHERE pid = %s", (pid,)).fetchall())


@pytest.mark.parametrize("question", ["register_group", "register_delivery", "terms", "layout"])
def test_an_outbox_that_is_forgotten_meanwhile_is_missing(settings: Settings, question: str) -> None:
    with connect(settings) as connection:
        connection.execute("DELETE FROM outbox_identity")
        with pytest.raises(SchemaMissing, match="run `outbox migrate` first"):
            getattr(HarvesterRegistration(settings, connection), question)()
