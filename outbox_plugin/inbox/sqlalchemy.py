"""Sessions of SQLAlchemy for an inbox's handlers, in the transaction of the event."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import psycopg
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

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


class _Borrowed:
    """A handler's connection. Who borrows it neither ends its transaction nor adds to it."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def add_notice_handler(self, callback: object) -> None:
        """Each session would add one, and the connection outlives it."""

    def commit(self) -> None:
        """The inbox commits."""

    def rollback(self) -> None:
        """The inbox rolls back if the handler fails."""

    def close(self) -> None:
        """The inbox goes on with it."""


class _AsyncBorrowed:
    """The same, of an `async def` handler."""

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def add_notice_handler(self, callback: object) -> None:
        """Each session would add one, and the connection outlives it."""

    async def commit(self) -> None:
        """The inbox commits."""

    async def rollback(self) -> None:
        """The inbox rolls back if the handler fails."""

    async def close(self) -> None:
        """The inbox goes on with it."""


@cache
def _engine() -> Engine:
    """Has no connection of its own. It asks its first one for the server's version, and keeps that."""
    return create_engine(
        "postgresql+psycopg://",
        creator=lambda: _Borrowed(_connection.get()),
        poolclass=NullPool,
        use_native_hstore=False,  # Each session would look up the type's number.
    )


@cache
def _async_engine() -> AsyncEngine:
    async def borrow() -> Any:
        return _AsyncBorrowed(_async_connection.get())

    return create_async_engine(
        "postgresql+psycopg://", async_creator=borrow, poolclass=NullPool, use_native_hstore=False
    )
