"""Handlers that use SQLAlchemy: each event's effect once, whatever they do to their session."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from outbox_plugin import Event, Outbox, Settings
from outbox_plugin.inbox import Inbox, Received, Retry
from outbox_plugin.inbox.sqlalchemy import async_session_of, session_of
from tests.inbox_handlers import EVENTS, GUILTY, Misuse, are_all_ended, check_effects, effects, handle_all, name
from tests.inbox_support import query
from tests.integration.test_inbox_faults import numbered

pytestmark = pytest.mark.integration


class Base(DeclarativeBase):
    pass


class Effect(Base):
    __tablename__ = "order_effect"
    number: Mapped[int] = mapped_column(primary_key=True)
    event: Mapped[str]


@pytest.fixture
def ready(settings: Settings) -> Settings:
    query(settings, "CREATE TABLE order_effect (number BIGSERIAL PRIMARY KEY, event TEXT NOT NULL)")
    return settings


def handle(connection: psycopg.Connection[Any], event: Received) -> None:
    """A guilty event does to its session what could harm others, and fails."""
    with session_of(connection) as session:
        session.add(Effect(event=f"{name(event)} undone"))
        session.flush()
        session.rollback()
        session.add(Effect(event=name(event)))
        session.commit()
        with contextlib.suppress(IntegrityError), session.begin_nested():
            session.execute(text("INSERT INTO order_effect (event) VALUES (NULL)"))
        Outbox().emit(session, Event(topic="t", key=name(event), value="{}"))
        if event.value == b"guilty":
            session.commit()
            session.close()
            raise Misuse
    assert connection._notice_handlers == []


async def handle_async(connection: psycopg.AsyncConnection[Any], event: Received) -> None:
    async with async_session_of(connection) as session:
        session.add(Effect(event=f"{name(event)} undone"))
        await session.flush()
        await session.rollback()
        session.add(Effect(event=name(event)))
        await session.commit()
        with contextlib.suppress(IntegrityError):
            async with session.begin_nested():
                await session.execute(text("INSERT INTO order_effect (event) VALUES (NULL)"))
        await Outbox().emit(session, Event(topic="t", key=name(event), value="{}"))
        if event.value == b"guilty":
            await session.commit()
            raise Misuse
    assert connection._notice_handlers == []


def test_each_event_has_its_effect_once(ready: Settings, topic: str, group: str) -> None:
    sent = handle_all(ready, topic, group, handle)
    check_effects(ready, sent)


def test_each_event_has_its_effect_once_by_an_async_handler(ready: Settings, topic: str, group: str) -> None:
    sent = numbered(ready, topic, GUILTY, EVENTS)

    async def run() -> None:
        inbox = Inbox(ready, group=group, topics=[topic], handler=handle_async, retry=Retry(attempts=1))
        async with inbox:
            while not are_all_ended(ready):
                await asyncio.sleep(0.1)

    asyncio.run(asyncio.wait_for(run(), 60))
    check_effects(ready, sent)


def test_a_connection_that_a_session_loses_does_not_count_as_its_events_failure(
    ready: Settings, topic: str, group: str
) -> None:
    lost = set[str]()

    def lose_it_once(connection: psycopg.Connection[Any], event: Received) -> None:
        with session_of(connection) as session:
            session.add(Effect(event=name(event)))
            session.flush()
            if event.value == b"guilty" and name(event) not in lost:
                lost.add(name(event))
                session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    sent = handle_all(ready, topic, group, lose_it_once, 60)
    assert effects(ready) == sorted(sent)
    assert len(lost) == len(GUILTY)


def test_a_session_within_another_does_not_keep_what_the_outer_one_undoes(
    ready: Settings, topic: str, group: str
) -> None:
    def nested(connection: psycopg.Connection[Any], event: Received) -> None:
        with contextlib.suppress(Misuse), session_of(connection) as outer:
            outer.add(Effect(event="undone"))
            outer.flush()
            with session_of(connection) as inner:
                inner.add(Effect(event="undone, too"))
                inner.flush()
                raise Misuse
        with session_of(connection) as session:
            session.add(Effect(event=name(event)))

    sent = handle_all(ready, topic, group, nested, 60)
    assert effects(ready) == sorted(sent)


def test_an_async_session_within_another_does_not_keep_what_the_outer_one_undoes(settings: Settings) -> None:
    query(settings, "CREATE TABLE order_effect (number BIGSERIAL PRIMARY KEY, event TEXT NOT NULL)")

    async def nested() -> None:
        async with await psycopg.AsyncConnection.connect(settings.dsn.get_secret_value()) as connection:
            with contextlib.suppress(Misuse):
                async with async_session_of(connection) as outer:
                    outer.add(Effect(event="undone"))
                    await outer.flush()
                    async with async_session_of(connection) as inner:
                        inner.add(Effect(event="undone, too"))
                        await inner.flush()
                        raise Misuse

    asyncio.run(nested())
    assert effects(settings) == []
