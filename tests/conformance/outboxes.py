"""One outbox to write to, pause and look into, in two forms: real and simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Protocol

import psycopg

from outbox_plugin.adapters.postgres_marked_store import PostgresMarkedStore
from outbox_plugin.adapters.postgres_window_store import PostgresWindowStore
from outbox_plugin.core.postgres_ports import MarkedStore, WindowStore
from outbox_plugin.core.shards import Layout, Slice
from outbox_plugin.errors import StoreUnavailable
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.settings import Settings
from tests.simulation.network import Mishaps, Server
from tests.simulation.postgres import Database, MarkingStore, Service, Store, Transaction
from tests.simulation.scheduler import Process, Scheduler


class Writing(Protocol):
    """A transaction of the application."""

    def insert(self, key: str, id_: int | None = None, *, backdated: bool = False, whole: bool = False) -> int:
        """Insert a row for topic `t`, under an id that is drawn if none is given; returns the id.

        A `whole` record has a value that is no text.
        """
        ...

    def commit(self) -> None: ...

    def roll_back(self) -> None: ...


class Outbox(Protocol):
    """An outbox, and what others do to it."""

    def windows(self, shard: int = 0, layout: Layout = ...) -> WindowStore: ...

    def marks(self) -> MarkedStore: ...

    def begin(self) -> Writing: ...

    def delete(self, id_: int) -> None: ...

    def change_layout(self, shards: int) -> Layout: ...

    def truncate(self) -> None: ...

    def pause(self) -> None: ...

    def dead_letters(self) -> int: ...


FIRST = Layout(1, 1)


class RealWriting:
    """On a connection of its own."""

    def __init__(self, dsn: str) -> None:
        self._connection = psycopg.connect(dsn)
        self._connection.execute("SELECT 1")

    def insert(self, key: str, id_: int | None = None, *, backdated: bool = False, whole: bool = False) -> int:
        found = self._connection.execute(
            "INSERT INTO outbox (id, create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys,"
            " kafka_value_bytes, kafka_header_bytes) VALUES (coalesce(%s, nextval('outbox_id_seq')),"
            " now() - %s * interval '1 year', 't', %s, %s, %s, %s, %s) RETURNING id",
            (id_, int(backdated), key, *((None, ["outbox-record"], b"\xff", []) if whole else ("v", [], None, None))),
        ).fetchone()
        assert found
        return int(found[0])

    def commit(self) -> None:
        self._connection.commit()
        self._connection.close()

    def roll_back(self) -> None:
        self._connection.rollback()
        self._connection.close()


class RealOutbox:
    """In a database of its own."""

    def __init__(self, dsn: str, opened: ExitStack) -> None:
        self._settings = Settings(dsn=dsn, bootstrap_servers="127.0.0.1:1")
        self._dsn = dsn
        self._opened = opened
        migrate(self._settings)

    def windows(self, shard: int = 0, layout: Layout = FIRST) -> WindowStore:
        return self._opened.enter_context(closing(PostgresWindowStore(self._settings, shard, layout)))

    def marks(self) -> MarkedStore:
        return self._opened.enter_context(closing(PostgresMarkedStore(self._settings, 0, FIRST)))

    def begin(self) -> Writing:
        return RealWriting(self._dsn)

    def _ask(self, query: str, *values: object) -> tuple[object, ...] | None:
        with psycopg.connect(self._dsn) as connection:
            cursor = connection.execute(query, values)
            return cursor.fetchone() if cursor.description else None

    def delete(self, id_: int) -> None:
        self._ask("DELETE FROM outbox WHERE id = %s", id_)

    def change_layout(self, shards: int) -> Layout:
        found = self._ask("UPDATE outbox_identity SET layout = layout + 1, shards = %s RETURNING layout", shards)
        assert found
        return Layout(int(str(found[0])), shards)

    def truncate(self) -> None:
        self._ask("TRUNCATE outbox RESTART IDENTITY")

    def pause(self) -> None:
        self._ask("UPDATE outbox_identity SET paused = true")

    def dead_letters(self) -> int:
        found = self._ask("SELECT count(*) FROM outbox_dead_letter")
        assert found
        return int(str(found[0]))


class SimulatedWriting:
    """In the simulated database."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    def insert(self, key: str, id_: int | None = None, *, backdated: bool = False, whole: bool = False) -> int:
        id_ = self._transaction.draw() if id_ is None else id_
        if backdated:
            self._transaction.create_time = 0
        self._transaction.insert(id_, "t", key, large=whole)
        return id_

    def commit(self) -> None:
        self._transaction.commit()

    def roll_back(self) -> None:
        self._transaction.roll_back()


class SimulatedOutbox:
    """In a simulated database; to be used by a task of the scheduler."""

    def __init__(self, scheduler: Scheduler, process: Process) -> None:
        self._process = process
        self._database = Database(scheduler, lambda *_: None, 1, Service("exactly-once"))
        self._server = Server(scheduler, "Postgres", StoreUnavailable, Mishaps(), lambda *_: None)

    def _open(self, shard: int, layout: Layout) -> Store:
        return Store(self._database, self._server, self._process, Slice(shard, layout.shards), layout)

    def windows(self, shard: int = 0, layout: Layout = FIRST) -> WindowStore:
        return self._open(shard, layout)

    def marks(self) -> MarkedStore:
        return MarkingStore(self._database, self._server, self._process, Slice(0, 1), FIRST)

    def begin(self) -> Writing:
        return SimulatedWriting(self._database.begin())

    def delete(self, id_: int) -> None:
        del self._database.rows[id_]

    def change_layout(self, shards: int) -> Layout:
        self._database.change_layout(shards)
        return self._database.layout

    def truncate(self) -> None:
        self._database.truncate(restart_identity=True)

    def pause(self) -> None:
        self._database.paused = True

    def dead_letters(self) -> int:
        return len(self._database.dead)


Scenario = Callable[[Outbox], None]


def run_simulated(scenario: Scenario) -> None:
    """Run a scenario on a simulated outbox."""
    scheduler = Scheduler(0)
    process = Process(scheduler, "test")

    def work() -> None:
        scenario(SimulatedOutbox(scheduler, process))
        scheduler.over = True

    process.spawn(work, "test")
    try:
        scheduler.run(1_000.0)
    finally:
        scheduler.end()


@contextmanager
def real(dsn: str) -> Iterator[Outbox]:
    """A real outbox, whose stores are closed in the end."""
    with ExitStack() as opened:
        yield RealOutbox(dsn, opened)
