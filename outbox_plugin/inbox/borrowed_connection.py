"""A handler's connection, as an object-relational mapper borrows it: the transaction is not the mapper's to end."""

from __future__ import annotations

from typing import Any

import psycopg


class _Borrowed:
    def __init__(self, connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def add_notice_handler(self, callback: object) -> None:
        """Each session would add one, and the connection outlives it."""


class BorrowedConnection(_Borrowed):
    """A handler's connection. Who borrows it neither ends its transaction nor adds to it."""

    def commit(self) -> None:
        """The inbox commits."""

    def rollback(self) -> None:
        """The inbox rolls back if the handler fails."""

    def close(self) -> None:
        """The inbox goes on with it."""


class BorrowedAsyncConnection(_Borrowed):
    """The same, of an `async def` handler."""

    async def commit(self) -> None:
        """The inbox commits."""

    async def rollback(self) -> None:
        """The inbox rolls back if the handler fails."""

    async def close(self) -> None:
        """The inbox goes on with it."""
