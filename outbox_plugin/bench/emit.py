"""Emit: what an event costs on each kind of connection, against a plain INSERT of the same row by hand.

Both are timed inside one open transaction, in turn, so that neither pays for a commit.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from statistics import median
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from outbox_plugin.bench.temporary_outbox import Tell, median_ratio, temporary_outbox
from outbox_plugin.emit.drivers import Insert, Query
from outbox_plugin.emit.event import Event
from outbox_plugin.emit.outbox import Outbox
from outbox_plugin.settings import Settings

EVENTS_PER_TURN = 20  # Then the other kind has its turn, so that load on the machine affects both alike.
COLUMNS = ("topic", "key", "value", "names", "texts")
VALUE = {"order": "o-4711", "customer": "c-17", "lines": [{"article": f"a-{each}", "count": each} for each in range(4)]}

Row = tuple[Any, ...]
Write = Callable[[Sequence[Row]], Awaitable[None]]


@dataclass(frozen=True)
class Cost:
    """Microseconds per event, by hand and emitted; `ratio` is the median of the ratios of all turns."""

    driver: str
    many: bool
    plain: float
    emitted: float
    ratio: float

    def line(self) -> str:
        """For people."""
        kind = "many a call" if self.many else "one a call"
        return f"{self.driver:36} {kind:12} {self.plain:7.1f} µs by hand, {self.emitted:7.1f} µs: {self.ratio:.2f}"


@dataclass(frozen=True)
class EmitReport:
    """Each kind of connection, with one event a call and with many."""

    costs: list[Cost]

    def lines(self) -> list[str]:
        """The report as lines of text."""
        dearest = max(self.costs, key=lambda cost: cost.ratio)
        return [f"ratio: at most {dearest.ratio:.2f} ({dearest.driver})"]

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Driver:
    """A kind of connection: opened in a transaction, with the way to insert rows by hand."""

    name: str
    needs: tuple[str, ...]
    open: Callable[[str, Query], AbstractAsyncContextManager[tuple[Any, Write]]]


def bench_emit(settings: Settings, turns: int, tell: Tell) -> EmitReport:
    """Time each kind of connection whose library is installed, one event a call and many a call.

    Args:
        settings: how to reach the user's servers; the benchmark makes an outbox of its own there.
        turns: how many times each cost is measured.
        tell: is called with each line of progress.
    """
    costs = []
    with temporary_outbox(settings) as scratch:
        for driver in DRIVERS:
            if all(find_spec(module) for module in driver.needs):
                for many in (False, True):
                    costs.append(asyncio.run(_cost(driver, scratch, turns, many)))
                    tell(costs[-1].line())
    return EmitReport(costs)


async def _cost(driver: Driver, settings: Settings, turns: int, many: bool) -> Cost:
    outbox = Outbox(settings.table)
    insert = Insert(settings.table).one

    async def by_hand() -> None:
        if many:
            await write([_row() for _ in range(EVENTS_PER_TURN)])
        else:
            for _ in range(EVENTS_PER_TURN):
                await write([_row()])

    async def emitted() -> None:
        if many:
            await _done(outbox.emit_many(target, [_event() for _ in range(EVENTS_PER_TURN)]))
        else:
            for _ in range(EVENTS_PER_TURN):
                await _done(outbox.emit(target, _event()))

    plain, ours = [], []
    async with driver.open(settings.dsn.get_secret_value(), insert) as (target, write):
        await _timed(by_hand), await _timed(emitted)  # Warm.
        for turn in range(turns):
            if turn % 2:
                plain.append(await _timed(by_hand))
                ours.append(await _timed(emitted))
            else:
                ours.append(await _timed(emitted))
                plain.append(await _timed(by_hand))
    return Cost(driver.name, many, median(plain), median(ours), median_ratio(ours, plain))


async def _timed(work: Callable[[], Awaitable[None]]) -> float:
    """Microseconds an event."""
    began = time.perf_counter()
    await work()
    return (time.perf_counter() - began) / EVENTS_PER_TURN * 1e6


async def _done(result: Any) -> None:
    if result is not None:
        await result


def _event() -> Event:
    return Event(topic="orders", key="c-17", type="OrderPlaced", value=VALUE)


def _row() -> Row:
    return (
        "orders",
        "c-17",
        json.dumps(VALUE),
        ["event-type", "idempotency-key", "occurred-at"],
        ["OrderPlaced", str(uuid.uuid4()), datetime.now(UTC).isoformat()],
    )


@asynccontextmanager
async def _psycopg(dsn: str, insert: Query) -> AsyncIterator[tuple[Any, Write]]:
    with psycopg.connect(dsn) as connection:

        async def write(rows: Sequence[Row]) -> None:
            if len(rows) == 1:
                connection.execute(insert.bytes, rows[0])
            else:
                connection.cursor().executemany(insert.bytes, rows)

        yield connection, write


@asynccontextmanager
async def _psycopg_async(dsn: str, insert: Query) -> AsyncIterator[tuple[Any, Write]]:
    async with await psycopg.AsyncConnection.connect(dsn) as connection:

        async def write(rows: Sequence[Row]) -> None:
            if len(rows) == 1:
                await connection.execute(insert.bytes, rows[0])
            else:
                await connection.cursor().executemany(insert.bytes, rows)

        yield connection, write


def _named(insert: Query) -> Any:
    """The INSERT as one writes it for SQLAlchemy."""
    from sqlalchemy import text

    names = iter(COLUMNS)
    return text("".join(part if part != "%s" else f":{next(names)}" for part in _parts(insert.text)))


def _parts(query: str) -> list[str]:
    pieces = query.split("%s")
    return [each for piece in pieces[:-1] for each in (piece, "%s")] + [pieces[-1]]


def _sqlalchemy(session: bool) -> Callable[[str, Query], AbstractAsyncContextManager[tuple[Any, Write]]]:
    @asynccontextmanager
    async def opened(dsn: str, insert: Query) -> AsyncIterator[tuple[Any, Write]]:
        from sqlalchemy import create_engine
        from sqlalchemy.orm import Session

        query, engine = _named(insert), create_engine(_url(dsn, "psycopg"))
        with Session(engine) if session else engine.connect() as target:

            async def write(rows: Sequence[Row]) -> None:
                target.execute(query, [dict(zip(COLUMNS, row, strict=True)) for row in rows])

            yield target, write
        engine.dispose()

    return opened


def _sqlalchemy_async(
    driver: str, session: bool
) -> Callable[[str, Query], AbstractAsyncContextManager[tuple[Any, Write]]]:
    @asynccontextmanager
    async def opened(dsn: str, insert: Query) -> AsyncIterator[tuple[Any, Write]]:
        from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

        query, engine = _named(insert), create_async_engine(_url(dsn, driver))
        async with AsyncSession(engine) if session else engine.connect() as target:

            async def write(rows: Sequence[Row]) -> None:
                await target.execute(query, [dict(zip(COLUMNS, row, strict=True)) for row in rows])

            yield target, write
        await engine.dispose()

    return opened


def _url(dsn: str, driver: str) -> str:
    return f"postgresql+{driver}://{dsn.partition('://')[2]}"


@asynccontextmanager
async def _django(dsn: str, insert: Query) -> AsyncIterator[tuple[Any, Write]]:
    import os

    import django
    from django.conf import settings
    from django.db import connection, transaction

    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "1"  # All kinds are driven alike, from a coroutine.
    if not settings.configured:
        parts = conninfo_to_dict(dsn)
        names = {"NAME": "dbname", "USER": "user", "PASSWORD": "password", "HOST": "host", "PORT": "port"}
        database = {theirs: parts.get(libpq) or "" for theirs, libpq in names.items()}
        settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", **database}}, USE_TZ=True)
        django.setup()
    with transaction.atomic():

        async def write(rows: Sequence[Row]) -> None:
            with connection.cursor() as cursor:
                if len(rows) == 1:
                    cursor.execute(insert.text, rows[0])
                else:
                    cursor.executemany(insert.text, rows)

        yield connection, write
    connection.close()


_ASYNC = ("sqlalchemy", "greenlet")
DRIVERS = [
    Driver("psycopg", (), _psycopg),
    Driver("psycopg, async", (), _psycopg_async),
    Driver("SQLAlchemy Connection", ("sqlalchemy",), _sqlalchemy(session=False)),
    Driver("SQLAlchemy Session", ("sqlalchemy",), _sqlalchemy(session=True)),
    Driver("SQLAlchemy AsyncConnection, psycopg", _ASYNC, _sqlalchemy_async("psycopg", session=False)),
    Driver("SQLAlchemy AsyncSession, psycopg", _ASYNC, _sqlalchemy_async("psycopg", session=True)),
    Driver("SQLAlchemy AsyncConnection, asyncpg", (*_ASYNC, "asyncpg"), _sqlalchemy_async("asyncpg", session=False)),
    Driver("SQLAlchemy AsyncSession, asyncpg", (*_ASYNC, "asyncpg"), _sqlalchemy_async("asyncpg", session=True)),
    Driver("Django", ("django",), _django),
]
