"""Calls of `emit` that type checkers must accept. They check this file, and nothing runs it."""

from __future__ import annotations

from typing import Any

import psycopg
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session, scoped_session

from outbox_plugin import Event, Outbox

outbox = Outbox()
event = Event(topic="orders", key="17", value={"total": 12})


def emit(one: psycopg.Connection[Any], two: Connection, three: Session, four: scoped_session[Session]) -> None:
    outbox.emit(one, event)
    outbox.emit(two, event)
    outbox.emit(three, event)
    outbox.emit(four, event)
    outbox.emit_many(three, [event])
    with outbox.listener(three) as listener:
        listener.occurred(event)


async def emit_async(one: psycopg.AsyncConnection[Any], two: AsyncConnection, three: AsyncSession) -> None:
    await outbox.emit(one, event)
    await outbox.emit(two, event)
    await outbox.emit(three, event)
    await outbox.emit_many(three, [event])
    async with outbox.listener(three) as listener:
        listener.occurred(event)
