"""A steady writer on several connections, which remembers what it did and survives the restarts of Postgres."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import psycopg
from psycopg import sql

from outbox_plugin.bench.judge import Place, Transaction, value_of
from outbox_plugin.settings import Settings

HOT_KEYS, KEYS = 3, 1_000
PADDING = "x" * 150
_RETRY_SECONDS = 0.1
_CATCH_UP_SECONDS = 1.0  # What an outage has kept it from writing for longer than this is not made up for.


@dataclass(frozen=True, slots=True)
class Mix:
    """What the transactions are like. Shares are from 0 to 1.

    `held` transactions stay open for up to three seconds after their rows have been inserted, so that their ids become
    visible late; half of all rows are of the hot keys.
    """

    rows_per_second: float = 400.0
    connections: int = 6
    most_rows: int = 12
    rolled_back: float = 0.1
    held: float = 0.01


class Writer:
    """Writes rows into the outbox, and into a ledger which transactions have committed; on threads of its own."""

    def __init__(self, settings: Settings, topic: str, mix: Mix, seed: int) -> None:
        """Nothing is written yet."""
        self._dsn = settings.dsn.get_secret_value()
        *schema, table = settings.table.split(".")
        self._ledger = sql.Identifier(*schema, "bench_ledger")
        self._insert = sql.SQL(
            "INSERT INTO {} (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values) "
            "VALUES (clock_timestamp(), {}, %s, %s, '{{}}', '{{}}')"
        ).format(sql.Identifier(*schema, table), sql.Literal(topic))
        self._mix = mix
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

    def committed(self) -> dict[int, Transaction]:
        """All transactions that committed: those that were told so, and those of the ledger; after the writing."""
        with closing(psycopg.connect(self._dsn)) as connection:
            ledger = {
                number for (number,) in connection.execute(sql.SQL("SELECT transaction FROM {}").format(self._ledger))
            }
        return {number: self._attempted[number] for number in sorted(self._acknowledged | ledger)}

    def _write(self, number: int, chance: random.Random) -> None:
        undecided: int | None = None
        pace = _Pace(self._mix.rows_per_second / self._mix.connections)
        try:
            while not self._stop.is_set():
                try:
                    with closing(psycopg.connect(self._dsn, connect_timeout=5, autocommit=True)) as connection:
                        self._decided(undecided)  # Whatever it was: a Postgres that has recovered has decided.
                        while not self._stop.wait(pace.due_in()):
                            undecided, number = number, number + self._mix.connections
                            pace.wrote(self._transaction(connection, undecided, chance))
                            undecided = None
                except (psycopg.OperationalError, psycopg.InterfaceError):
                    self._stop.wait(_RETRY_SECONDS)
        except BaseException as error:
            self._error = error

    def _transaction(self, connection: psycopg.Connection[tuple[int]], number: int, chance: random.Random) -> int:
        count = chance.randint(1, self._mix.most_rows)
        keys = [_key(chance) for _ in range(count)]
        rolls_back, is_held = chance.random() < self._mix.rolled_back, chance.random() < self._mix.held
        hold_seconds = chance.uniform(0.2, 3.0) if is_held else 0.0
        self._attempted[number] = Transaction(count, began=time.monotonic())
        with connection.transaction(force_rollback=rolls_back), connection.cursor() as cursor:
            cursor.executemany(
                self._insert, [(key, value_of(Place(number, place), key, PADDING)) for place, key in enumerate(keys)]
            )
            cursor.execute(sql.SQL("INSERT INTO {} VALUES (%s)").format(self._ledger), (number,))
            self._stop.wait(hold_seconds)
        if rolls_back:
            with self._lock:
                self.rolled_back += 1
            return count
        self._decided(number)
        with self._lock:
            self._acknowledged.add(number)
            self.rows += count
        return count

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
