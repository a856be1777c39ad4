"""A steady writer on several connections, which remembers what it did and survives the restarts of Postgres."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import NamedTuple

import psycopg
from psycopg import sql

from outbox_plugin.bench.judge import RowId, Transaction, value_of
from outbox_plugin.settings import Settings

HOT_KEYS, KEYS = 3, 1_000
PADDING = "x" * 150
_RETRY_SECONDS = 0.1
_CATCH_UP_SECONDS = 1.0  # After an outage, at most this much of the missed writing is made up for.


@dataclass(frozen=True, slots=True)
class Mix:
    """The kinds of transactions to write. Shares are from 0 to 1.

    `held` transactions stay open for up to three seconds after their rows have been inserted, so that their ids become
    visible late; half of all rows are of the hot keys.
    """

    rows_per_second: float = 400.0
    connections: int = 6
    most_rows: int = 12
    rolled_back: float = 0.1
    held: float = 0.01


class Row(NamedTuple):
    """A row to write, beside the ordinary ones; `topic` is the writer's own where it is None.

    `belongs_aside`: it must not arrive in the writer's topic.
    """

    key: str
    topic: str | None = None
    padding: str = PADDING
    header_keys: Sequence[str] = ()
    header_values: Sequence[str] = ()
    belongs_aside: bool = False


class Order(NamedTuple):
    """Rows that are to be written in one transaction; `committed` is set once they are."""

    rows: Sequence[Row]
    committed: threading.Event


class Writer:
    """Writes rows into the outbox, and into a ledger which transactions have committed; on threads of its own."""

    def __init__(self, settings: Settings, topic: str, mix: Mix, seed: int) -> None:
        """Create the table of what was committed. Nothing is written yet.

        Args:
            settings: of the outbox.
            topic: of the rows.
            mix: what kinds of transactions are written, and how often.
            seed: decides what each transaction writes.
        """
        self._dsn = settings.dsn.get_secret_value()
        *schema, table = settings.table.split(".")
        self._ledger = sql.Identifier(*schema, "bench_ledger")
        self._insert = sql.SQL(
            "INSERT INTO {} (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values) "
            "VALUES (clock_timestamp(), %s, %s, %s, %s, %s)"
        ).format(sql.Identifier(*schema, table))
        self._topic = topic
        self._mix = mix
        self._orders: SimpleQueue[Order] = SimpleQueue()
        self._stop = threading.Event()
        self._attempted: dict[int, Transaction] = {}
        self._acknowledged: set[int] = set()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self.rows = 0
        self.rolled_back = 0
        with closing(psycopg.connect(self._dsn, autocommit=True)) as connection:
            connection.execute(sql.SQL("CREATE TABLE {} (transaction BIGINT PRIMARY KEY)").format(self._ledger))
        self._threads = [
            threading.Thread(target=self._write, args=(number, random.Random(seed + number)), name="bench-writer")
            for number in range(mix.connections)
        ]

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write for as long as the body runs.

        Raises:
            psycopg.Error: it could not write, for another reason than that Postgres was away.
        """
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join()
        if self._error is not None:
            raise self._error

    def write(self, rows: Sequence[Row]) -> threading.Event:
        """Write these rows soon, in one transaction. Returns an event that is set when it has committed.

        It is retried until a commit is acknowledged, so it may commit more than once.
        """
        order = Order(rows, threading.Event())
        self._orders.put(order)
        return order.committed

    def committed(self) -> dict[int, Transaction]:
        """All committed transactions: those that were acknowledged, and those in the ledger. Call it at the end."""
        with closing(psycopg.connect(self._dsn)) as connection:
            ledger = {
                number for (number,) in connection.execute(sql.SQL("SELECT transaction FROM {}").format(self._ledger))
            }
        return {number: self._attempted[number] for number in sorted(self._acknowledged | ledger)}

    def _write(self, number: int, chance: random.Random) -> None:
        undecided: int | None = None
        order: Order | None = None
        pace = _Pace(self._mix.rows_per_second / self._mix.connections)
        try:
            while not self._stop.is_set():
                try:
                    with closing(self._connect()) as connection:
                        self._decided(undecided)  # Whatever it was: a Postgres that has recovered has decided.
                        while not self._stop.wait(pace.due_in()):
                            order = order or self._next_order()
                            undecided, number = number, number + self._mix.connections
                            if order is None:
                                pace.wrote(self._ordinary(connection, undecided, chance))
                            else:
                                self._transaction(connection, undecided, order.rows)
                                order.committed.set()
                            undecided = order = None
                except (psycopg.OperationalError, psycopg.InterfaceError):
                    self._stop.wait(_RETRY_SECONDS)
        except BaseException as error:
            self._error = error

    def _connect(self) -> psycopg.Connection[tuple[int]]:
        """A connection that prepares no statements: a pooler in transaction mode may lose them."""
        return psycopg.connect(self._dsn, connect_timeout=5, autocommit=True, prepare_threshold=None)

    def _next_order(self) -> Order | None:
        try:
            return self._orders.get_nowait()
        except Empty:
            return None

    def _ordinary(self, connection: psycopg.Connection[tuple[int]], number: int, chance: random.Random) -> int:
        rows = [Row(_key(chance)) for _ in range(chance.randint(1, self._mix.most_rows))]
        rolls_back, is_held = chance.random() < self._mix.rolled_back, chance.random() < self._mix.held
        hold_seconds = chance.uniform(0.2, 3.0) if is_held else 0.0
        self._transaction(connection, number, rows, rolls_back, hold_seconds)
        return len(rows)

    def _transaction(
        self,
        connection: psycopg.Connection[tuple[int]],
        number: int,
        rows: Sequence[Row],
        rolls_back: bool = False,
        hold_seconds: float = 0.0,
    ) -> None:
        aside = frozenset(place for place, row in enumerate(rows) if row.belongs_aside)
        self._attempted[number] = Transaction(len(rows), began=time.monotonic(), aside=aside)
        with connection.transaction(force_rollback=rolls_back), connection.cursor() as cursor:
            cursor.executemany(self._insert, [self._columns(number, place, row) for place, row in enumerate(rows)])
            cursor.execute(sql.SQL("INSERT INTO {} VALUES (%s)").format(self._ledger), (number,))
            self._stop.wait(hold_seconds)
        if rolls_back:
            with self._lock:
                self.rolled_back += 1
            return
        self._decided(number)
        with self._lock:
            self._acknowledged.add(number)
            self.rows += len(rows)

    def _columns(self, number: int, place: int, row: Row) -> tuple[str, str, str, list[str], list[str]]:
        value = value_of(RowId(number, place), row.key, row.padding)
        return row.topic or self._topic, row.key, value, list(row.header_keys), list(row.header_values)

    def _decided(self, number: int | None) -> None:
        if number is not None:
            self._attempted[number] = self._attempted[number]._replace(decided=time.monotonic())


def _key(chance: random.Random) -> str:
    if chance.random() < 0.5:
        return f"hot-{chance.randrange(HOT_KEYS)}"
    return f"key-{chance.randrange(KEYS)}"


class _Pace:
    """When the next transaction is due."""

    def __init__(self, rows_per_second: float) -> None:
        self._seconds_a_row = 1 / rows_per_second
        self._due = time.monotonic()

    def wrote(self, rows: int) -> None:
        self._due = max(self._due + rows * self._seconds_a_row, time.monotonic() - _CATCH_UP_SECONDS)

    def due_in(self) -> float:
        return max(0.0, self._due - time.monotonic())
