"""At-least-once delivery: what a leader still does when it has been replaced takes nothing from its successor."""

from __future__ import annotations

import shutil
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from outbox_plugin import Settings
from outbox_plugin.adapters.harvester_registration import HarvesterRegistration, RegistrationConnection
from outbox_plugin.adapters.postgres_marked_store import PostgresMarkedStore
from outbox_plugin.core.ordering_key import OrderingKey
from outbox_plugin.core.postgres_ports import ReadRequest
from outbox_plugin.core.row import column
from outbox_plugin.core.shards import Layout
from outbox_plugin.embedded import postgres
from outbox_plugin.embedded.postgres import EmbeddedPostgres
from outbox_plugin.errors import StoreUnavailable
from outbox_plugin.schema.connection import connect
from outbox_plugin.schema.migrate import migrate
from tests.harvesting import insert
from tests.postgres_sessions import sessions_marking, sessions_waiting_for_a_lock, sessions_waiting_to_write
from tests.roles import as_role, let_in
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.integration

OLD, NEW = str(uuid.UUID(int=1)), str(uuid.UUID(int=2))
FIRST_KEY, OTHER_KEY = "first", "other"


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"delivery": "at-least-once"})


def layout_of(settings: Settings) -> Layout:
    with closing(connect(settings)) as connection:
        return HarvesterRegistration(settings, connection).layout()


@contextmanager
def marking(store: PostgresMarkedStore) -> Iterator[None]:
    """The old leader marks rows, for as long as it takes; at the end it is done, or its session was ended."""

    def mark() -> None:
        try:
            store.mark(OLD, ReadRequest(100))
        except StoreUnavailable as error:
            failures.append(error)

    failures: list[StoreUnavailable] = []
    thread = threading.Thread(target=mark)
    thread.start()
    try:
        yield
    finally:
        thread.join(90)
    assert not thread.is_alive()


def test_a_slow_mark_of_a_leader_that_was_replaced_takes_no_mark_from_its_successor(settings: Settings) -> None:
    """It waits for the first row, which somebody changes; the successor marks the rows behind it meanwhile."""
    insert(settings, "t", [(FIRST_KEY, "1"), (OTHER_KEY, "2"), (OTHER_KEY, "3")])
    layout = layout_of(settings)
    with (
        closing(PostgresMarkedStore(settings, 0, layout)) as old,
        closing(PostgresMarkedStore(settings, 0, layout)) as new,
        psycopg.connect(settings.dsn.get_secret_value()) as somebody,
    ):
        old.lead(OLD)
        somebody.execute("SELECT FROM outbox WHERE kafka_key = %s FOR UPDATE", (FIRST_KEY,))
        with marking(old):
            eventually(lambda: sessions_waiting_for_a_lock(settings), 10)
            new.lead(NEW)
            marked = new.mark(NEW, ReadRequest(100, excluded_keys=frozenset({OrderingKey("t", FIRST_KEY)})))
            somebody.rollback()
        assert new.delete(NEW, list(column(marked, "id"))) == 2


def test_a_mark_whose_rows_their_last_leader_deletes_says_that_others_are_left(settings: Settings) -> None:
    """It waits for the rows that are being deleted, and marks none in their place."""
    insert(settings, "t", [("k", str(number)) for number in range(4)])
    layout, earliest_two = layout_of(settings), ReadRequest(2)
    found: list[list[int]] = []
    with (
        closing(PostgresMarkedStore(settings, 0, layout)) as new,
        psycopg.connect(settings.dsn.get_secret_value()) as last_leader,
    ):
        new.lead(NEW)
        last_leader.execute("DELETE FROM outbox WHERE id <= 2")
        thread = threading.Thread(target=lambda: found.append(list(column(new.mark(NEW, earliest_two), "id"))))
        thread.start()
        eventually(lambda: sessions_waiting_for_a_lock(settings), 10)
        last_leader.commit()
        thread.join(90)
        assert found == [[]]
        assert new.has_unmarked(NEW, earliest_two)
        assert list(column(new.mark(NEW, earliest_two), "id")) == [3, 4]
        assert not new.has_unmarked(NEW, earliest_two)


def with_shards(settings: Settings, shards: int) -> Layout:
    """Another number of shards, as a harvester that starts registers it. Returns the layout."""
    settings = settings.model_copy(update={"shards": shards})
    with closing(RegistrationConnection(settings)) as connection, connection.registration() as registration:
        return registration.register_layout()


def test_a_slow_mark_of_a_former_layout_takes_no_mark_from_a_leader_of_the_next_one(settings: Settings) -> None:
    """It waits for the first row, which somebody changes; a leader of another shard marks rows behind it meanwhile."""
    insert(settings, "t", [(FIRST_KEY, "1"), *((f"key-{number}", "2") for number in range(20))])
    with (
        closing(PostgresMarkedStore(settings, 0, layout_of(settings))) as old,
        psycopg.connect(settings.dsn.get_secret_value()) as somebody,
    ):
        old.lead(OLD)
        somebody.execute("SELECT FROM outbox WHERE kafka_key = %s FOR UPDATE", (FIRST_KEY,))
        with marking(old):
            eventually(lambda: sessions_waiting_for_a_lock(settings), 10)
            with closing(PostgresMarkedStore(settings, 1, with_shards(settings, 2))) as new:
                new.lead(NEW)
                marked = new.mark(NEW, ReadRequest(100, excluded_keys=frozenset({OrderingKey("t", FIRST_KEY)})))
                somebody.rollback()
                eventually(lambda: not sessions_waiting_for_a_lock(settings), 10)
                eventually(lambda: not sessions_marking(settings), 10)
                assert new.delete(NEW, list(column(marked, "id"))) == len(marked) > 0


class PostgresBySocket(EmbeddedPostgres):
    """A server that is reached through a Unix socket too, where no time-out of TCP ends anything."""

    def __init__(self, folder: Path, sockets: str) -> None:
        super().__init__(folder, {"unix_socket_directories": sockets})
        self.sockets = sockets

    @property
    def dsn(self) -> str:
        given = conninfo_to_dict(super().dsn)
        return f"postgresql://postgres:{given['password']}@/postgres?host={self.sockets}&port={self.port}"


@pytest.fixture
def by_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    monkeypatch.setattr(postgres, "_ACCESS", f"{postgres._ACCESS}local all all scram-sha-256\n")
    sockets = tempfile.mkdtemp(prefix="sockets-")
    Path(sockets).chmod(0o777)  # The server may be another user's.
    server = PostgresBySocket(tmp_path / "postgres", sockets)
    server.launch()
    try:
        server.wait()
        settings = Settings(dsn=server.dsn, bootstrap_servers="127.0.0.1:1", delivery="at-least-once")
        migrate(settings)
        yield settings
    finally:
        server.stop()
        shutil.rmtree(sockets, ignore_errors=True)


@contextmanager
def stopped_while_marking(settings: Settings, old: PostgresMarkedStore) -> Iterator[None]:
    """The old leader is stopped while it is sent the rows that it marks: it receives nothing any more."""
    insert(settings, "t", [(f"key-{number}", "x" * 900_000) for number in range(9)])
    woken = threading.Event()

    def wait(*_: object) -> None:
        woken.wait(600)
        raise psycopg.OperationalError("stopped")

    old.lead(OLD)
    old.session.reader.wait = wait  # type: ignore[method-assign, assignment]
    with marking(old):
        try:
            eventually(lambda: sessions_waiting_to_write(settings), 10)
            yield
        finally:
            woken.set()


def test_a_stopped_leader_keeps_no_rows_from_its_successor_where_no_time_out_of_tcp_helps(by_socket: Settings) -> None:
    layout = layout_of(by_socket)
    with (
        closing(PostgresMarkedStore(by_socket, 0, layout)) as old,
        closing(PostgresMarkedStore(by_socket, 0, layout)) as new,
    ):
        with stopped_while_marking(by_socket, old):
            lead = threading.Thread(target=new.lead, args=(NEW,))
            lead.start()
            lead.join(30 * PATIENCE)
            assert not lead.is_alive()
            found: list[int] = []
            mark = threading.Thread(target=lambda: found.extend(column(new.mark(NEW, ReadRequest(100)), "id")))
            mark.start()
            mark.join(30 * PATIENCE)
            kept = len(found)
        mark.join(90)
        assert kept


def test_a_stopped_leader_keeps_no_rows_from_the_leaders_of_another_layout(by_socket: Settings) -> None:
    found: list[int] = []

    def lead_the_other_shard() -> None:
        with closing(PostgresMarkedStore(by_socket, 1, with_shards(by_socket, 2))) as new:
            new.lead(NEW)
            found.extend(column(new.mark(NEW, ReadRequest(100)), "id"))

    with closing(PostgresMarkedStore(by_socket, 0, layout_of(by_socket))) as old:
        lead = threading.Thread(target=lead_the_other_shard)
        with stopped_while_marking(by_socket, old):
            lead.start()
            lead.join(30 * PATIENCE)
            kept = len(found)
        lead.join(90)
        assert kept


def test_a_session_that_may_not_be_ended_is_named(by_socket: Settings) -> None:
    """The harvesters have different roles, neither of which may end the other's sessions."""
    role, dsn = "another_harvester", by_socket.dsn.get_secret_value()
    with psycopg.connect(dsn) as connection:
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(role)))
        connection.execute(sql.SQL("GRANT ALL ON ALL TABLES IN SCHEMA public TO {}").format(sql.Identifier(role)))
        connection.execute(sql.SQL("GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {}").format(sql.Identifier(role)))
    let_in(dsn, role)
    others = by_socket.model_copy(update={"dsn": type(by_socket.dsn)(as_role(dsn, role))})
    layout = layout_of(by_socket)
    with (
        closing(PostgresMarkedStore(by_socket, 0, layout)) as old,
        closing(PostgresMarkedStore(others, 0, layout)) as new,
        stopped_while_marking(by_socket, old),
        pytest.raises(StoreUnavailable, match=r"session \d+ of the last leader"),
    ):
        new.lead(NEW)


def test_a_term_leaves_nothing_set_in_its_session(settings: Settings) -> None:
    """Behind a pooler in transaction mode, it is the session of others too."""
    insert(settings, "t", [("k", "1")])
    with closing(PostgresMarkedStore(settings, 0, layout_of(settings))) as store:
        before = changed_settings(store)
        store.lead(OLD)
        assert store.mark(OLD, ReadRequest(100))
        store.control()
        assert changed_settings(store) == before


def changed_settings(store: PostgresMarkedStore) -> list[tuple[object, ...]]:
    query = "SELECT pg_backend_pid(), name, setting FROM pg_settings WHERE source = 'session' ORDER BY name"
    return [row for each in (store.session.reader, store.session.purger) for row in each.execute(query).fetchall()]
