"""Sessions of SQLAlchemy for an inbox's handlers, in the transaction of the event."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import count
from typing import Any

import psycopg
from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from outbox_plugin.inbox.borrowed_connection import BorrowedAsyncConnection, BorrowedConnection

_numbers = count(1)  # Of sessions.
_connection: ContextVar[psycopg.Connection[Any]] = ContextVar("connection")
_async_connection: ContextVar[psycopg.AsyncConnection[Any]] = ContextVar("async_connection")


@contextmanager
def session_of(connection: psycopg.Connection[Any]) -> Iterator[Session]:
    """A session in the transaction of an inbox's handler.

    What it has written is committed with the event, or rolled back with it. It is flushed at the end. `rollback` undoes
    what was done since the last `commit`, or since the beginning: the session has a savepoint.

    Args:
        connection: the handler's.

    Example:
        def handle(connection: psycopg.Connection, event: Received) -> None:
            with session_of(connection) as session:
                session.add(Order(**event.json()))
    """
    token = _connection.set(connection)
    try:
        bound = _engine().connect()
    finally:
        _connection.reset(token)
    with bound, bound.begin(), Session(bound, join_transaction_mode="create_savepoint") as session:
        yield session
        session.commit()


@asynccontextmanager
async def async_session_of(connection: psycopg.AsyncConnection[Any]) -> AsyncIterator[AsyncSession]:
    """The same as `session_of`, for an `async def` handler.

    Args:
        connection: the handler's.
    """
    token = _async_connection.set(connection)
    try:
        bound = await _async_engine().connect()
    finally:
        _async_connection.reset(token)
    try:
        async with bound.begin(), AsyncSession(bound, join_transaction_mode="create_savepoint") as session:
            yield session
            await session.commit()
    finally:
        await bound.close()


def _with_own_savepoints(engine: Engine) -> Engine:
    """Let each session have savepoints of names of its own.

    SQLAlchemy begins to count them anew in each session. Of two sessions in one handler, one would go back to a
    savepoint of the other.
    """
    for name in ("do_savepoint", "do_rollback_to_savepoint", "do_release_savepoint"):
        setattr(engine.dialect, name, _of_session(getattr(engine.dialect, name)))
    return engine


def _of_session(do: Callable[[Connection, str], None]) -> Callable[[Connection, str], None]:
    def named(connection: Connection, name: str) -> None:
        number = connection.info.setdefault("outbox_session", next(_numbers))
        do(connection, f"{name}_of_{number}")

    return named


@cache
def _engine() -> Engine:
    """Has no connection of its own. It asks its first one for the server's version, and keeps that."""
    engine = create_engine(
        "postgresql+psycopg://",
        creator=lambda: BorrowedConnection(_connection.get()),
        poolclass=NullPool,
        use_native_hstore=False,  # Each session would look up the type's number.
    )
    return _with_own_savepoints(engine)


@cache
def _async_engine() -> AsyncEngine:
    async def borrow() -> Any:
        return BorrowedAsyncConnection(_async_connection.get())

    engine = create_async_engine(
        "postgresql+psycopg://", async_creator=borrow, poolclass=NullPool, use_native_hstore=False
    )
    _with_own_savepoints(engine.sync_engine)
    return engine
