"""`emit_many` writes all events of a call or none, whatever its generator, its caller or its connection does."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import psycopg
import pytest
import sqlalchemy
from django.db import DataError, connections, transaction
from psycopg.pq import TransactionStatus
from sqlalchemy import orm

from outbox_plugin import Event, Outbox, Settings
from outbox_plugin.emit.drivers import CHARACTERS_AT_A_TIME, ROWS_AT_A_TIME
from outbox_plugin.errors import InvalidEvent, WrongConnection
from tests.emit_connections import Undo, django_alias, url
from tests.inbox_support import query
from tests.support import eventually

pytestmark = pytest.mark.integration

MANY = 2 * ROWS_AT_A_TIME + 1


class Base(orm.DeclarativeBase):
    """Of SQLAlchemy's."""


class Bought(Base):
    """A business row."""

    __tablename__ = "bought"
    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)


def event(value: str) -> Event:
    return Event(topic="t", key="k", value=value)


def events(number: int, error: BaseException | None = None) -> Iterator[Event]:
    """So many events; then the error, if there is one."""
    for each in range(number):
        yield event(str(each))
    if error is not None:
        raise error


def values(settings: Settings) -> list[str]:
    return [value for (value,) in query(settings, "SELECT kafka_value FROM outbox ORDER BY id")]


def connect(settings: Settings) -> psycopg.Connection[Any]:
    return psycopg.connect(settings.dsn.get_secret_value())


def test_a_generator_that_emits_on_the_same_connection_and_fails_leaves_nothing_of_either(settings: Settings) -> None:
    outbox = Outbox()

    def nested(connection: psycopg.Connection[Any]) -> Iterator[Event]:
        yield from events(MANY)
        with suppress(Undo):
            outbox.emit_many(connection, events(MANY, Undo()))
        raise Undo

    with connect(settings) as connection:
        outbox.emit(connection, event("before"))
        with pytest.raises(Undo):
            outbox.emit_many(connection, nested(connection))
        outbox.emit(connection, event("after"))
    assert values(settings) == ["before", "after"]


def test_a_generator_may_hold_a_transaction_block(settings: Settings) -> None:
    def in_a_block(connection: psycopg.Connection[Any]) -> Iterator[Event]:
        with connection.transaction():
            yield from events(MANY)

    with connect(settings) as connection:
        Outbox().emit_many(connection, in_a_block(connection))
    assert len(values(settings)) == MANY


def test_the_callers_transaction_is_not_committed_where_it_begins_with_many_events(settings: Settings) -> None:
    with connect(settings) as connection:
        Outbox().emit_many(connection, events(MANY))
        assert connection.info.transaction_status == TransactionStatus.INTRANS
        connection.rollback()
    assert values(settings) == []


def test_a_pipeline_without_a_transaction_is_refused(settings: Settings) -> None:
    """What fails later in the pipeline would not undo the events."""
    with connect(settings) as connection:
        connection.autocommit = True
        with connection.pipeline():
            connection.execute("SELECT 1")
            with pytest.raises(WrongConnection, match="autocommit"):
                Outbox().emit_many(connection, events(MANY))
        with connection.transaction(), connection.pipeline():
            Outbox().emit_many(connection, events(MANY))
    assert len(values(settings)) == MANY


def test_an_async_pipeline_without_a_transaction_is_refused(settings: Settings) -> None:
    async def scenario() -> None:
        dsn = settings.dsn.get_secret_value()
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            async with connection.pipeline():
                await connection.execute("SELECT 1")
                with pytest.raises(WrongConnection, match="autocommit"):
                    await Outbox().emit_many(connection, events(MANY))
            async with connection.transaction(), connection.pipeline():
                await Outbox().emit_many(connection, events(MANY))

    asyncio.run(scenario())
    assert len(values(settings)) == MANY


def test_a_serializer_that_stops_the_iteration_is_an_error_and_no_end(settings: Settings) -> None:
    def serializer(event: Event) -> str:
        if event.value == "1500":
            raise StopIteration
        return str(event.value)

    with connect(settings) as connection, pytest.raises(RuntimeError, match="StopIteration"):
        Outbox(serializer=serializer).emit_many(connection, events(MANY))
    assert values(settings) == []


@pytest.mark.parametrize("as_list", [False, True])
def test_an_interrupt_between_two_statements_leaves_nothing(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, as_list: bool
) -> None:
    execute, inserts = psycopg.Cursor.execute, []

    def interrupted(cursor: psycopg.Cursor[Any], query: Any, *args: Any) -> Any:
        if b"INSERT" in query:
            inserts.append(query)
            if len(inserts) == 2:
                raise KeyboardInterrupt
        return execute(cursor, query, *args)

    with connect(settings) as connection:
        Outbox().emit(connection, event("before"))
        monkeypatch.setattr(psycopg.Cursor, "execute", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Outbox().emit_many(connection, list(events(MANY)) if as_list else events(MANY))
        monkeypatch.undo()
    assert values(settings) == ["before"]


def test_rows_that_the_same_connection_streams_are_refused_in_place_of_waiting_for_ever(settings: Settings) -> None:
    with connect(settings) as connection:
        Outbox().emit(connection, event("before"))
        rows = connection.cursor().stream(f"SELECT generate_series(1, {MANY})")
        with pytest.raises(WrongConnection, match="stream"):
            Outbox().emit_many(connection, (event(str(row)) for (row,) in rows))
    assert values(settings) == []


@pytest.mark.parametrize("begun", [False, True])
def test_an_event_that_is_refused_beside_such_rows_waits_for_nothing_either(settings: Settings, begun: bool) -> None:
    with connect(settings) as connection:
        rows = connection.cursor().stream("SELECT generate_series(1, 9)")
        if begun:
            next(rows)
        with pytest.raises(WrongConnection, match="stream"):
            Outbox().emit_many(connection, (event("x" * 1_000_000) for _ in rows))
    assert values(settings) == []


def test_a_list_waits_for_what_another_thread_does_on_the_connection(settings: Settings) -> None:
    with connect(settings) as connection, ThreadPoolExecutor(1) as pool:
        other = pool.submit(connection.execute, "SELECT pg_sleep(1)")
        eventually(connection.lock.locked, 30)
        Outbox().emit_many(connection, list(events(MANY)))
        other.result()
    assert len(values(settings)) == MANY


def test_an_event_that_is_refused_inside_a_generators_block_leaves_nothing(settings: Settings) -> None:
    def in_a_block(connection: psycopg.Connection[Any]) -> Iterator[Event]:
        with connection.transaction():
            yield from events(MANY)
            yield event("x" * 1_000_000)
            yield event("never")

    with connect(settings) as connection:
        Outbox().emit(connection, event("before"))
        with pytest.raises(InvalidEvent):
            Outbox().emit_many(connection, in_a_block(connection))
        Outbox().emit(connection, event("after"))
    assert values(settings) == ["before", "after"]


def test_what_a_session_has_of_its_own_is_not_rolled_back_with_the_events(settings: Settings) -> None:
    """A generator that reads through the session has the session write what it holds."""
    engine = sqlalchemy.create_engine(url(settings.dsn.get_secret_value(), "psycopg"))
    with orm.Session(engine) as session:
        session.execute(sqlalchemy.text("CREATE TABLE bought (id bigint PRIMARY KEY)"))
        session.add(Bought(id=1))

        def reading() -> Iterator[Event]:
            session.scalars(sqlalchemy.select(Bought)).all()
            yield event("1")
            raise Undo

        with pytest.raises(Undo):
            Outbox().emit_many(session, reading())
        session.commit()
    engine.dispose()
    assert query(settings, "SELECT id FROM bought") == [(1,)]
    assert values(settings) == []


def test_a_statement_of_djangos_that_fails_in_the_generator_costs_the_events_alone(settings: Settings) -> None:
    alias = django_alias(settings.dsn.get_secret_value())
    connection = connections[alias]

    def failing() -> Iterator[Event]:
        yield event("1")
        with transaction.mark_for_rollback_on_error(using=alias), connection.cursor() as cursor:
            cursor.execute("SELECT 1 / 0")

    with closing(connection), transaction.atomic(using=alias):
        Outbox().emit(connection, event("before"))
        with pytest.raises(DataError):
            Outbox().emit_many(connection, failing())
    assert values(settings) == ["before"]


def test_rows_of_a_server_side_cursor_of_the_same_connection_are_written(settings: Settings) -> None:
    with connect(settings) as connection, connection.cursor("rows") as cursor:
        cursor.execute(f"SELECT generate_series(1, {MANY})")
        Outbox().emit_many(connection, (event(str(row)) for (row,) in cursor))
    assert len(values(settings)) == MANY


def test_a_list_that_changes_before_it_is_awaited_is_written_as_it_was(settings: Settings) -> None:
    async def scenario() -> None:
        async with await psycopg.AsyncConnection.connect(settings.dsn.get_secret_value()) as connection:
            batch = [event("1"), event("2")]
            written = Outbox().emit_many(connection, batch)
            batch.clear()
            await written

    asyncio.run(scenario())
    assert values(settings) == ["1", "2"]


def test_large_events_are_written_in_the_memory_of_a_few(settings: Settings) -> None:
    large = CHARACTERS_AT_A_TIME // 10
    with connect(settings) as connection:
        tracemalloc.start()
        try:
            Outbox().emit_many(connection, (event("x" * large) for _ in range(100)))
            assert tracemalloc.get_traced_memory()[1] < 10 * CHARACTERS_AT_A_TIME
        finally:
            tracemalloc.stop()
    assert len(values(settings)) == 100
