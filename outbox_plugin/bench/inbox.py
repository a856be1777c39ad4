"""Inbox: how fast it handles a topic, against bare loops that run the same SQL.

The baseline consumes and updates in one bare loop per connection, on as many connections as the inbox has, in
transactions as large as the inbox's can become. It remembers no keys, keeps no order and recovers from no error. For a
handler of batches, the baseline is a bare consumer that upserts the records of each poll, with the same statement.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import psycopg
from confluent_kafka import Consumer, Message, Producer
from confluent_kafka.admin import AdminClient, NewTopic
from psycopg import sql

from outbox_plugin.adapters.kafka_clients import client_config
from outbox_plugin.bench.temporary_outbox import PATIENCE_SECONDS, Tell, median_ratio, temporary_outbox
from outbox_plugin.inbox import Inbox, Received
from outbox_plugin.inbox.batch_limit import MAX_BATCH_RECORDS
from outbox_plugin.schema.connection import connect
from outbox_plugin.settings import Settings

PARTITIONS = 6
VALUE = b"x" * 200
_UPSERT = """
INSERT INTO {} AS known (key, times, value)
SELECT key, count(*), max(value) FROM unnest(%s::text[], %s::text[]) AS each (key, value) GROUP BY key ORDER BY key
ON CONFLICT (key) DO UPDATE SET times = known.times + excluded.times, value = excluded.value
"""


@dataclass(frozen=True)
class InboxReport:
    """Records per second of baseline and inbox, in turn; `ratio` compares each pair, and is the median of them."""

    records: int
    keys: int
    baseline: list[float]
    inbox: list[float]

    @property
    def ratio(self) -> float:
        """The inbox's records per second over the baseline's."""
        return median_ratio(self.inbox, self.baseline)

    def lines(self) -> list[str]:
        """The report as lines of text."""
        return [
            f"baseline  {median(self.baseline):8,.0f} records/s (median of {len(self.baseline)})",
            f"inbox     {median(self.inbox):8,.0f} records/s",
            f"ratio     {self.ratio:8.2f} of the baseline",
        ]

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return {**asdict(self), "ratio": self.ratio}


class _Done:
    """Counts handled records, from any thread, and measures the time from the first to the last."""

    def __init__(self, records: int) -> None:
        self._left = records
        self._records = records
        self._lock = threading.Lock()
        self._began = 0.0
        self._rate = 0.0
        self._over = threading.Event()

    def count(self, records: int = 1) -> None:
        with self._lock:
            self._began = self._began or time.perf_counter()
            self._left -= records
            if self._left == 0:
                self._rate = self._records / (time.perf_counter() - self._began)
                self._over.set()

    def rate(self) -> float:
        if not self._over.wait(PATIENCE_SECONDS):
            raise TimeoutError(f"{self._left} records were not handled in {PATIENCE_SECONDS} s")
        return self._rate


def bench_inbox(
    settings: Settings, records: int, keys: int, rounds: int, concurrency: int, tell: Tell, batch: int | None = None
) -> InboxReport:
    """Handle a topic, each record an UPDATE of its key's row, with the baseline and with an inbox, in turn.

    Args:
        settings: how to reach the user's servers; the benchmark makes an outbox of its own there.
        records: how many records the topic has.
        keys: how many keys the records have.
        rounds: how many times each side is measured, in turn.
        concurrency: how many events the inbox handles at once.
        tell: is called with each line of progress.
        batch: how many records are handled at once, by one upsert of their keys' rows; None for one by one.
    """
    report = InboxReport(records, keys, [], [])
    with temporary_outbox(settings) as scratch:
        schema = scratch.table.split(".")[0]
        table = sql.Identifier(schema, "effect")
        update = sql.SQL("UPDATE {} SET times = times + 1 WHERE key = %s").format(table)
        with connect(scratch) as connection:
            upsert = sql.SQL(_UPSERT).format(table)
            create = "CREATE TABLE {} (key TEXT PRIMARY KEY, times BIGINT, value TEXT) WITH (fillfactor = 50)"
            connection.execute(sql.SQL(create).format(table))
            connection.execute(
                sql.SQL("INSERT INTO {} SELECT 'key-' || i, 0 FROM generate_series(0, %s) AS i").format(table),
                (keys - 1,),
            )
            topic = f"{schema}-events"
            _fill(scratch, topic, records, keys)
            for number in range(rounds):
                if batch is None:
                    report.baseline.append(_baseline(scratch, topic, records, concurrency, update))
                else:
                    report.baseline.append(_batch_baseline(scratch, topic, records, batch, upsert))
                tell(f"round {number + 1}: baseline  {report.baseline[-1]:8,.0f} records/s")
                connection.execute(sql.SQL("VACUUM {}").format(table))
                group = f"{schema}-{number}"
                if batch is None:
                    report.inbox.append(_inbox(scratch, group, topic, records, concurrency, update))
                else:
                    report.inbox.append(_batch_inbox(scratch, group, topic, records, concurrency, batch, upsert))
                tell(f"round {number + 1}: inbox     {report.inbox[-1]:8,.0f} records/s")
                connection.execute(sql.SQL("VACUUM {}").format(table))
            _check(connection, table, records * rounds * 2)
    return report


def _inbox(settings: Settings, group: str, topic: str, records: int, concurrency: int, update: sql.Composed) -> float:
    done = _Done(records)

    def handle(connection: psycopg.Connection[Any], received: Received) -> None:
        connection.execute(update, (received.key_text,))
        done.count()

    with Inbox(settings, group=group, topics=[topic], handler=handle, concurrency=concurrency):
        return done.rate()


def _batch_inbox(
    settings: Settings, group: str, topic: str, records: int, concurrency: int, batch: int, upsert: sql.Composed
) -> float:
    done = _Done(records)

    def handle(connection: psycopg.Connection[Any], events: list[Received]) -> None:
        keys = [event.key_text for event in events]
        connection.execute(upsert, (keys, [event.value.decode() if event.value else "" for event in events]))
        done.count(len(events))

    with Inbox(settings, group=group, topics=[topic], handler=handle, batch_size=batch, concurrency=concurrency):
        return done.rate()


def _batch_baseline(settings: Settings, topic: str, records: int, batch: int, upsert: sql.Composed) -> float:
    done = _Done(records)
    consumer = Consumer(
        client_config(settings, group_id=f"{topic}-{uuid.uuid4().hex[:6]}", auto_offset_reset="earliest")
    )
    with closing(consumer), closing(connect(settings)) as connection:
        consumer.subscribe([topic])
        seen = 0
        while seen < records:
            messages = [message for message in consumer.consume(batch, 0.05) if message.error() is None]
            if messages:
                values = [(message.value() or b"").decode() for message in messages]
                connection.execute(upsert, ([_key(message) for message in messages], values))
                seen += len(messages)
                done.count(len(messages))
    return done.rate()


def _baseline(settings: Settings, topic: str, records: int, concurrency: int, update: sql.Composed) -> float:
    done = _Done(records)
    queues: list[deque[Message | None]] = [deque() for _ in range(concurrency)]
    arrived = threading.Condition()

    def work(mine: deque[Message | None]) -> None:
        with closing(connect(settings)) as connection:
            left = True
            while left:
                with arrived:
                    arrived.wait_for(lambda: mine)
                    batch = [mine.popleft() for _ in range(min(len(mine), MAX_BATCH_RECORDS))]
                with connection.transaction():
                    for message in batch:
                        if message is None:
                            left = False
                        else:
                            connection.execute(update, (_key(message),))
                            done.count()

    threads = [threading.Thread(target=work, args=(queue,), daemon=True) for queue in queues]

    def end_workers() -> None:
        with arrived:
            for queue in queues:
                queue.clear()  # Something is left only where the benchmark ends early.
                queue.append(None)
            arrived.notify_all()
        for thread in threads:
            thread.join()

    for thread in threads:
        thread.start()
    consumer = Consumer(
        client_config(settings, group_id=f"{topic}-{uuid.uuid4().hex[:6]}", auto_offset_reset="earliest")
    )
    with ExitStack() as opened:
        opened.callback(end_workers)
        opened.enter_context(closing(consumer))
        consumer.subscribe([topic])
        seen = 0
        while seen < records:
            messages = [message for message in consumer.consume(1_000, 0.05) if message.error() is None]
            seen += len(messages)
            with arrived:
                for message in messages:
                    queues[hash(message.key()) % concurrency].append(message)
                arrived.notify_all()
        return done.rate()


def _key(message: Message) -> str:
    key = message.key()
    return key.decode() if isinstance(key, bytes) else key or ""


def _fill(settings: Settings, topic: str, records: int, keys: int) -> None:
    admin = AdminClient(client_config(settings))
    [future] = admin.create_topics([NewTopic(topic, num_partitions=PARTITIONS)]).values()
    future.result(20)
    config = client_config(settings, linger_ms=20, queue_buffering_max_messages=records + 1)
    with closing(Producer(config)) as producer:
        for number in range(records):
            headers: list[tuple[str, str | bytes | None]] = [("idempotency-key", str(uuid.uuid4()).encode())]
            producer.produce(topic, VALUE, f"key-{number % keys}".encode(), headers=headers)
        producer.flush(60)


def _check(connection: psycopg.Connection[Any], table: sql.Identifier, effects: int) -> None:
    [(found,)] = connection.execute(sql.SQL("SELECT sum(times)::bigint FROM {}").format(table)).fetchall()
    if found != effects:
        raise RuntimeError(f"{found} effects were found where {effects} were due")
