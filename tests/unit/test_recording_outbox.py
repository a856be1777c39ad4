"""The outbox for users' tests: it keeps events, and refuses what an outbox refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from unittest.mock import MagicMock

import psycopg
import pytest
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox_plugin import Event
from outbox_plugin.emit.outbox import Outbox
from outbox_plugin.encoding import as_bytes
from outbox_plugin.errors import InvalidEvent, WrongConnection
from outbox_plugin.testing import RecordingOutbox


class Order(BaseModel):
    total: int


class OrderPlaced(Event):
    topic: str = "orders"
    type: str = "OrderPlaced"
    value: Order


FIRST, SECOND = OrderPlaced(key="ann", value=Order(total=1)), Event(topic="orders", key="bob", value=None)


@pytest.fixture
def connection() -> MagicMock:
    return MagicMock(spec=psycopg.Connection)


@pytest.mark.parametrize("kind", [psycopg.Connection, Session])
def test_events_are_kept_as_they_are_in_their_order(kind: type) -> None:
    outbox = RecordingOutbox()
    connection = MagicMock(spec=kind)
    outbox.emit(connection, FIRST)
    outbox.emit_many(connection, [SECOND, FIRST])
    outbox.emit_many(connection, (event for event in [SECOND]))
    with outbox.listener(connection) as listener:
        listener.occurred(FIRST)
        assert len(outbox.events) == 4
    assert all(kept is given for kept, given in zip(outbox.events, [FIRST, SECOND, FIRST, SECOND, FIRST], strict=True))


def test_what_a_unit_of_work_drops_is_not_kept(connection: MagicMock) -> None:
    outbox = RecordingOutbox()

    def work() -> None:
        with outbox.listener(connection) as listener:
            listener.occurred(FIRST)
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert outbox.events == []


def test_of_a_generator_that_raises_nothing_is_kept(connection: MagicMock) -> None:
    def events() -> Iterator[Event]:
        yield FIRST
        raise KeyError

    outbox = RecordingOutbox()
    with pytest.raises(KeyError):
        outbox.emit_many(connection, events())
    assert outbox.events == []


@pytest.mark.parametrize("kind", [psycopg.AsyncConnection, AsyncSession])
def test_of_an_async_connection_an_event_is_kept_once_it_is_awaited(kind: type) -> None:
    outbox = RecordingOutbox()
    connection = MagicMock(spec=kind)

    async def emitted() -> None:
        later = outbox.emit(connection, FIRST)
        assert outbox.events == []
        assert later is not None
        await later
        async with outbox.listener(connection) as listener:
            listener.occurred(SECOND)

    asyncio.run(emitted())
    assert outbox.events == [FIRST, SECOND]


@pytest.mark.parametrize(
    "event",
    [
        Event.model_construct(topic="not a topic", key="k", value=None, headers={}),
        Event(topic="orders", key="k", value="x" * 2_000_000),
        Event(topic="orders", key="k", value=object()),
        Event(topic="orders", key="k", value={"bytes": b"bytes"}),
    ],
)
def test_it_refuses_the_events_that_an_outbox_refuses(event: Event, connection: MagicMock) -> None:
    said = []
    for outbox in (Outbox(), RecordingOutbox()):
        with pytest.raises(InvalidEvent) as refused:
            outbox.emit(connection, event)
        said.append(str(refused.value))
    assert said[0] == said[1]


def test_its_arguments_are_those_of_an_outbox(connection: MagicMock) -> None:
    outbox = RecordingOutbox(serializer=as_bytes, max_record_bytes=300)
    outbox.emit(connection, Event(topic="orders", key="k", value=b"\0"))
    with pytest.raises(InvalidEvent, match="Kafka takes 300"):
        outbox.emit(connection, Event(topic="orders", key="k", value=b"x" * 200))
    assert len(outbox.events) == 1


class OutOfTransaction:
    """As Django's connection is outside of `transaction.atomic()`."""

    in_atomic_block = False

    def get_autocommit(self) -> bool:
        return True


def test_it_refuses_a_connection_that_an_outbox_refuses() -> None:
    outbox = RecordingOutbox()
    with pytest.raises(WrongConnection, match="Django commits each statement here"):
        outbox.emit(OutOfTransaction(), FIRST)
    with pytest.raises(WrongConnection, match="Django commits each statement here"):
        outbox.listener(OutOfTransaction()).__enter__()
    with pytest.raises(WrongConnection, match="expected a connection"):
        outbox.emit(object(), FIRST)  # type: ignore[call-overload]
    assert outbox.events == []
