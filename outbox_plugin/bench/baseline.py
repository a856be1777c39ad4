"""The baseline: the minimum that a relay must do, in bare loops without election, recovery or error handling.

`python -m outbox_plugin.bench.baseline` runs the one-by-one loop as a process, until SIGTERM.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any

import psycopg
from confluent_kafka import Producer
from psycopg import sql

from outbox_plugin.adapters.kafka_clients import producer_config
from outbox_plugin.bench.temporary_outbox import connect, table_of
from outbox_plugin.core.window import ROWS_PER_WINDOW
from outbox_plugin.settings import Settings
from outbox_plugin.threads.signals import stop_on

POLL_SECONDS = 0.002
_Row = tuple[int, str, str, str | None, list[str], list[str]]


@contextmanager
def ready_to_relay(settings: Settings, transactional_id: str) -> Iterator[Callable[[], None]]:
    """Yield a function that relays all rows of the table in transactional windows and deletes them. Call it repeatedly.

    Read, publish and delete run overlapped on three threads, as in the harvester.
    """
    with (
        closing(Producer(producer_config(settings, transactional_id=transactional_id))) as producer,
        closing(connect(settings, autocommit=True)) as reader,
        closing(connect(settings, autocommit=True)) as deleter,
    ):
        producer.init_transactions()
        yield lambda: _relay_backlog(settings, reader, producer, deleter)


def _relay_backlog(
    settings: Settings, reader: psycopg.Connection[Any], producer: Producer, deleter: psycopg.Connection[Any]
) -> None:
    read: queue.Queue[Sequence[_Row]] = queue.Queue(maxsize=1)
    published: queue.Queue[tuple[int, int] | None] = queue.Queue()
    over = threading.Event()

    def read_windows() -> None:
        last = 0
        while not over.is_set() and (rows := _read(reader, settings, last)):
            last = rows[-1][0]
            read.put(rows)
        read.put([])

    def delete_windows() -> None:
        while bounds := published.get():
            _delete(deleter, settings, *bounds)

    stages = [threading.Thread(target=work, daemon=True) for work in (read_windows, delete_windows)]
    try:
        for stage in stages:
            stage.start()
        while rows := read.get():
            producer.begin_transaction()
            _produce(producer, rows)
            producer.commit_transaction()
            published.put((rows[0][0], rows[-1][0]))
    finally:  # The caller closes their connections.
        over.set()
        published.put(None)
        try:
            _wait_for(stages, read)
        except BaseException:  # A signal, which does not end them.
            _wait_for(stages, read)
            raise


def _wait_for(stages: Sequence[threading.Thread], read: queue.Queue[Sequence[_Row]]) -> None:
    """Wait for the end of the stages, and make room for what the first one has read."""
    while any(stage.is_alive() for stage in stages):
        with suppress(queue.Empty):
            read.get(timeout=POLL_SECONDS)


def relay_one_by_one(settings: Settings, stop: threading.Event) -> None:
    """Relay rows as they come until `stop`, on one thread: poll every 2 ms, publish the rows found, delete them.

    Each read is one transaction of the delivery `exactly-once`, or one flush of `at-least-once`.
    """
    transactional = settings.delivery == "exactly-once"
    ours = {"transactional_id": f"{settings.group}-baseline"} if transactional else {"enable_idempotence": True}
    with (
        closing(Producer(producer_config(settings, **ours))) as producer,
        closing(connect(settings, autocommit=True)) as connection,
    ):
        if transactional:
            producer.init_transactions()
        while not stop.is_set():
            rows = _read(connection, settings, 0)
            if not rows:
                time.sleep(POLL_SECONDS)
                continue
            if transactional:
                producer.begin_transaction()
            _produce(producer, rows)
            if transactional:
                producer.commit_transaction()
            else:
                producer.flush()
            _delete(connection, settings, rows[0][0], rows[-1][0])


def _read(connection: psycopg.Connection[Any], settings: Settings, last: int) -> Sequence[_Row]:
    query = sql.SQL(
        "SELECT id, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values "
        "FROM {} WHERE id > %s ORDER BY id LIMIT %s"
    ).format(table_of(settings))
    return connection.cursor(binary=True).execute(query, (last, ROWS_PER_WINDOW)).fetchall()


def _produce(producer: Producer, rows: Sequence[_Row]) -> None:
    for _, topic, key, value, names, texts in rows:
        producer.produce(topic, value, key, headers=list(zip(names, texts, strict=True)))


def _delete(connection: psycopg.Connection[Any], settings: Settings, first: int, last: int) -> None:
    connection.execute(sql.SQL("DELETE FROM {} WHERE id BETWEEN %s AND %s").format(table_of(settings)), (first, last))


def main() -> None:
    """Relay one by one until SIGTERM."""
    stop = threading.Event()
    stop_on((signal.SIGTERM,), stop)
    relay_one_by_one(Settings(), stop)


if __name__ == "__main__":
    main()
