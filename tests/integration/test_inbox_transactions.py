"""Whatever a handler does to its transaction or session: each event's effect once, or a dead letter; none is lost."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

import psycopg
import pytest

from outbox_plugin import Event, Outbox, Settings
from outbox_plugin.inbox import Inbox, Received, Retry
from outbox_plugin.inbox.dead_letters import DeadLetters
from outbox_plugin.inbox.handled_keys import HandledKeys
from tests.inbox_support import effects, make_effect_table, query, record_effect
from tests.integration.test_inbox_faults import letters, numbered
from tests.support import eventually

pytestmark = pytest.mark.integration

SOON = 20.0
AT_ONCE = Retry(attempts=1)
GUILTY = {0, 150, 151, 299}

left_open: list[AbstractContextManager[object]] = []  # They would be closed with the last reference to them.
Misuse = Callable[[psycopg.Connection[Any], Received], None]


@pytest.fixture
def ready(settings: Settings) -> Settings:
    """Settings for a database with a table for effects, and a role that may do nothing."""
    make_effect_table(settings)
    query(settings, "DO $$ BEGIN CREATE ROLE outbox_powerless; EXCEPTION WHEN duplicate_object THEN NULL; END $$")
    return settings


def cut(descriptor: int) -> None:
    """Cut a connection to the server, which does not notice while it is at work."""
    with socket.socket(fileno=os.dup(descriptor)) as connected:
        connected.shutdown(socket.SHUT_RDWR)


def run(settings: Settings, topic: str, group: str, misuse: Misuse, retry: Retry) -> tuple[list[str], list[str]]:
    """Handle 300 events, of which four misuse their transaction before their effect; returns the good and the guilty.

    Ends when each has its effect, or is a dead letter.
    """

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        if event.value == b"guilty":
            misuse(connection, event)
        record_effect(connection, event)

    sent = numbered(settings, topic, GUILTY)
    with Inbox(settings, group=group, topics=[topic], handler=handle, concurrency=1, retry=retry):
        eventually(lambda: {*sent} <= {event for event, _, _ in effects(settings)} | {*letters(settings)}, SOON)
    while left_open:
        with suppress(psycopg.Error):  # Else psycopg warns of it when the last reference to it goes.
            left_open.pop().__exit__(None, None, None)
    return [each for number, each in enumerate(sent) if number not in GUILTY], [sent[each] for each in sorted(GUILTY)]


def does(*statements: str) -> Misuse:
    def misuse(connection: psycopg.Connection[Any], event: Received) -> None:
        for statement in statements:
            connection.execute(statement.replace("NAME", event.idempotency_key).encode())

    return misuse


def leaves_a_pipeline(connection: psycopg.Connection[Any], event: Received) -> None:
    left_open.append(connection.pipeline())
    left_open[-1].__enter__()


def commits_and_leaves_autocommit(connection: psycopg.Connection[Any], event: Received) -> None:
    connection.execute("COMMIT")
    connection.autocommit = False


@pytest.mark.parametrize(
    "misuse",
    [
        does("PREPARE TRANSACTION 'NAME'"),
        does("PREPARE TRANSACTION 'NAME'", "BEGIN"),
        does("PREPARE TRANSACTION 'NAME'", "SELECT 1 / 0"),
        does("PREPARE TRANSACTION 'NAME'", "ROLLBACK PREPARED 'NAME'", "BEGIN"),
        does("COMMIT PREPARED 'NAME'"),
        lambda connection, _: connection.close(),
        leaves_a_pipeline,
    ],
    ids=["prepare", "prepare, begin", "prepare, fail", "prepare, roll back", "commit prepared", "close", "pipeline"],
)
def test_a_transaction_that_cannot_be_committed_any_more_is_a_failure_of_the_guilty_alone(
    ready: Settings, topic: str, group: str, misuse: Misuse
) -> None:
    good, guilty = run(ready, topic, group, misuse, AT_ONCE)
    # What the guilty do after the end of their transaction is in none of the inbox's.
    assert sorted(event for event, _, _ in effects(ready) if event not in guilty) == sorted(good)
    assert letters(ready) == sorted(guilty)
    assert query(ready, "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()") == [(0,)]


@pytest.mark.parametrize(
    "misuse",
    [
        does("PREPARE TRANSACTION 'NAME'", "COMMIT PREPARED 'NAME'"),
        does("COMMIT", "DISCARD ALL"),
        does("COMMIT", "SET default_transaction_read_only = on", "BEGIN READ WRITE"),
        commits_and_leaves_autocommit,
    ],
    ids=["prepare, commit", "discard all", "read only", "autocommit"],
)
def test_what_a_handler_commits_stays_and_harms_no_other_event(
    ready: Settings, topic: str, group: str, misuse: Misuse
) -> None:
    good, guilty = run(ready, topic, group, misuse, Retry(3, 0.05, 0.1))
    assert sorted(event for event, _, _ in effects(ready)) == sorted(good + guilty)
    assert letters(ready) == []


@pytest.mark.parametrize(
    "misuse",
    [
        does("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY"),
        does("SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL SERIALIZABLE"),
        does("GRANT ALL ON effect, effect_number_seq TO outbox_powerless", "SET ROLE outbox_powerless"),
        does("RESET ROLE"),
        does("LISTEN something", "NOTIFY something"),
        does("SET statement_timeout = '1h'", "SET lock_timeout = '1h'"),
        does("DECLARE mine CURSOR WITH HOLD FOR SELECT 1"),
        lambda connection, _: setattr(connection, "row_factory", psycopg.rows.dict_row),
    ],
    ids=["read only", "serializable", "set role", "reset role", "listen", "timeouts", "cursor", "row factory"],
)
def test_session_state_that_a_handler_leaves_behind_harms_no_other_event(
    ready: Settings, topic: str, group: str, misuse: Misuse
) -> None:
    good, guilty = run(ready, topic, group, misuse, Retry(3, 0.05, 0.1))
    assert sorted(event for event, _, _ in effects(ready)) == sorted(good + guilty)
    assert letters(ready) == []


def by_a_pipeline(connection: psycopg.Connection[Any], statement: str) -> None:
    with connection.pipeline():
        connection.execute(statement.encode())


def by_a_stream(connection: psycopg.Connection[Any], statement: str) -> None:
    with connection.cursor() as cursor, suppress(psycopg.ProgrammingError):  # It has no rows.
        list(cursor.stream(statement.encode()))


@pytest.mark.parametrize(
    "execute",
    [
        lambda connection, statement: connection.execute(statement.encode()),
        lambda connection, statement: psycopg.ClientCursor(connection).execute(statement),
        lambda connection, statement: connection.cursor().executemany(statement, [()]),
        by_a_pipeline,
        by_a_stream,
    ],
    ids=["connection", "cursor of another class", "executemany", "pipeline", "stream"],
)
def test_an_event_that_goes_back_to_a_savepoint_of_an_event_before_it_undoes_nothing_of_that(
    ready: Settings, topic: str, group: str, execute: Callable[[psycopg.Connection[Any], str], None]
) -> None:
    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        if event.value == b"guilty":
            connection.execute("ROLLBACK TO SAVEPOINT mine")
        else:
            execute(connection, "SAVEPOINT mine")
        record_effect(connection, event)

    sent = numbered(ready, topic, GUILTY)
    guilty = [sent[number] for number in GUILTY]
    with Inbox(ready, group=group, topics=[topic], handler=handle, concurrency=1, retry=AT_ONCE):
        eventually(lambda: {*sent} <= {event for event, _, _ in effects(ready)} | {*letters(ready)}, SOON)
    assert sorted(event for event, _, _ in effects(ready)) == sorted({*sent} - {*guilty})
    assert letters(ready) == sorted(guilty)
    assert "savepoint" in DeadLetters(ready).list()[0].error


@pytest.mark.parametrize("end", ["COMMIT", "PREPARE TRANSACTION 'mine'"], ids=["commit", "prepare"])
def test_a_connection_that_is_lost_while_a_handler_ends_its_transaction_costs_no_event_its_effect(
    ready: Settings, topic: str, group: str, end: str
) -> None:
    query(
        ready,
        "CREATE FUNCTION take_long() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_sleep(3) WHERE NEW.value = 'guilty'; RETURN NULL; END $$",
    )
    query(
        ready,
        "CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON effect DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION take_long()",
    )
    tries: list[Received] = []

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        record_effect(connection, event)
        if event.value == b"guilty":
            tries.append(event)
            if len(tries) == 1:
                threading.Timer(0.5, cut, [connection.fileno()]).start()
                connection.execute(end.encode())

    sent = numbered(ready, topic, {150})
    with Inbox(ready, group=group, topics=[topic], handler=handle, concurrency=1):
        eventually(lambda: {*sent} <= {event for event, _, _ in effects(ready)}, SOON)
    # What the guilty one committed stays, and it is tried again.
    others = [event for event, _, _ in effects(ready) if event != sent[150]]
    assert sorted(others) == sorted({*sent} - {sent[150]})
    assert query(ready, "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()") == [(0,)]


@pytest.mark.parametrize(
    "write",
    [
        record_effect,
        lambda connection, event: Outbox().emit(connection, Event(topic="invoices", key=event.key_text, value={})),
    ],
    ids=["execute", "emit"],
)
def test_a_handler_that_makes_no_savepoint_costs_no_round_trip_to_look_for_one(
    ready: Settings, topic: str, group: str, write: Misuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks: list[object] = []
    handled: list[Received] = []
    monkeypatch.setattr(HandledKeys, "mark", lambda *arguments: marks.append(arguments))

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        write(connection, event)
        handled.append(event)

    numbered(ready, topic, set())
    with Inbox(ready, group=group, topics=[topic], handler=handle, concurrency=1, retry=AT_ONCE):
        eventually(lambda: len(handled) >= 300, SOON)
    assert marks == []


def test_the_server_notices_the_loss_of_a_machine_within_seconds_and_only_while_events_are_handled(
    ready: Settings, topic: str, group: str
) -> None:
    names = ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count", "tcp_user_timeout")
    seen: list[tuple[list[str], list[str]]] = []

    def settings_of(connection: psycopg.Connection[Any]) -> list[str]:
        return [connection.execute(f"SHOW {name}".encode()).fetchall()[0][0] for name in names]

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        within = settings_of(connection)
        connection.execute("COMMIT")
        seen.append((within, settings_of(connection)))

    with psycopg.connect(ready.dsn.get_secret_value()) as connection:
        usual = settings_of(connection)
    numbered(ready, topic, set(), 1)
    with Inbox(ready, group=group, topics=[topic], handler=handle):
        eventually(lambda: seen, SOON)
    assert seen == [(["5", "2", "3", "10000"], usual)]
