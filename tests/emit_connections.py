"""Every kind of connection that events can be emitted on, with the same operations: begin, undo, and query."""

from __future__ import annotations

import inspect
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import django
import psycopg
import sqlalchemy
from django.conf import settings as django_settings
from django.db import connections, transaction
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session


class Undo(Exception):
    """Raised to undo a transaction or savepoint. It is caught where the transaction was begun."""


@dataclass(frozen=True)
class Driver:
    """How to open a transaction, which is committed at its end, and a savepoint within it."""

    name: str
    transaction: Callable[[str], AbstractAsyncContextManager[Any]]
    savepoint: Callable[[Any], AbstractAsyncContextManager[None]]


async def awaited(result: Any) -> Any:
    """The result of an emit, awaited if it must be."""
    return await result if inspect.isawaitable(result) else result


def url(dsn: str, driver: str) -> str:
    """SQLAlchemy's name for a database."""
    return dsn.replace("postgresql://", f"postgresql+{driver}://")


@asynccontextmanager
async def _psycopg(dsn: str) -> AsyncIterator[Any]:
    with psycopg.connect(dsn) as connection:
        yield connection


@asynccontextmanager
async def _pipeline(dsn: str) -> AsyncIterator[Any]:
    with psycopg.connect(dsn) as connection, connection.pipeline():
        yield connection


@asynccontextmanager
async def _psycopg_savepoint(connection: psycopg.Connection[Any]) -> AsyncIterator[None]:
    with connection.transaction():
        yield


@asynccontextmanager
async def _psycopg_async(dsn: str) -> AsyncIterator[Any]:
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        yield connection


@asynccontextmanager
async def _pipeline_async(dsn: str) -> AsyncIterator[Any]:
    async with await psycopg.AsyncConnection.connect(dsn) as connection, connection.pipeline():
        yield connection


@asynccontextmanager
async def _psycopg_async_savepoint(connection: psycopg.AsyncConnection[Any]) -> AsyncIterator[None]:
    async with connection.transaction():
        yield


def _sqlalchemy(session: bool) -> Callable[[str], AbstractAsyncContextManager[Any]]:
    @asynccontextmanager
    async def opened(dsn: str) -> AsyncIterator[Any]:
        engine = sqlalchemy.create_engine(url(dsn, "psycopg"))
        try:
            with Session(engine) if session else engine.connect() as target, target.begin():
                yield target
        finally:
            engine.dispose()

    return opened


def _sqlalchemy_async(driver: str, session: bool) -> Callable[[str], AbstractAsyncContextManager[Any]]:
    @asynccontextmanager
    async def opened(dsn: str) -> AsyncIterator[Any]:
        engine = create_async_engine(url(dsn, driver))
        try:
            async with AsyncSession(engine) if session else engine.connect() as target, target.begin():
                yield target
        finally:
            await engine.dispose()

    return opened


@asynccontextmanager
async def _nested(target: Any) -> AsyncIterator[None]:
    with target.begin_nested():
        yield


@asynccontextmanager
async def _nested_async(target: Any) -> AsyncIterator[None]:
    async with target.begin_nested():
        yield


@asynccontextmanager
async def _django(dsn: str) -> AsyncIterator[Any]:
    alias = django_alias(dsn)
    try:
        with transaction.atomic(using=alias):
            yield connections[alias]
    finally:
        connections[alias].close()


@asynccontextmanager
async def _django_savepoint(connection: Any) -> AsyncIterator[None]:
    with transaction.atomic(using=connection.alias):
        yield


def django_alias(dsn: str) -> str:
    """Make the database known to Django."""
    parts = conninfo_to_dict(dsn)
    names = {"NAME": "dbname", "USER": "user", "PASSWORD": "password", "HOST": "host", "PORT": "port"}
    database = {theirs: parts.get(libpq) or "" for theirs, libpq in names.items()}
    database["ENGINE"] = "django.db.backends.postgresql"
    alias = f"test_{uuid.uuid4().hex[:8]}"
    if not django_settings.configured:
        django_settings.configure(DATABASES={"default": {**database}}, USE_TZ=True)
        django.setup()
    known = connections.configure_settings({"default": {**database}})
    connections.settings[alias] = known["default"]
    return alias


DRIVERS = [
    Driver("psycopg", _psycopg, _psycopg_savepoint),
    Driver("psycopg, async", _psycopg_async, _psycopg_async_savepoint),
    Driver("psycopg, in a pipeline", _pipeline, _psycopg_savepoint),
    Driver("psycopg, async, in a pipeline", _pipeline_async, _psycopg_async_savepoint),
    Driver("SQLAlchemy Connection", _sqlalchemy(session=False), _nested),
    Driver("SQLAlchemy Session", _sqlalchemy(session=True), _nested),
    Driver("SQLAlchemy AsyncConnection, psycopg", _sqlalchemy_async("psycopg", session=False), _nested_async),
    Driver("SQLAlchemy AsyncSession, psycopg", _sqlalchemy_async("psycopg", session=True), _nested_async),
    Driver("SQLAlchemy AsyncConnection, asyncpg", _sqlalchemy_async("asyncpg", session=False), _nested_async),
    Driver("SQLAlchemy AsyncSession, asyncpg", _sqlalchemy_async("asyncpg", session=True), _nested_async),
    Driver("Django", _django, _django_savepoint),
]
