"""The floor: the least that any exactly-once relay must do, in a bare loop without election, recovery or errors."""

from __future__ import annotations

import queue
import threading
from contextlib import closing

import psycopg
from confluent_kafka import Producer
from psycopg import sql

WINDOW_ROWS = 5_000


def relay_bare(dsn: str, bootstrap_servers: str, table: sql.Identifier, transactional_id: str) -> int:
    """Relay all rows of `table` in transactional windows and delete them; returns how many.

    Read, publish and delete run overlapped on three threads, as in the harvester.
    """
    read: queue.Queue[list[tuple[int, str, str, str | None, list[str], list[str]]]] = queue.Queue(maxsize=1)
    published: queue.Queue[tuple[int, int] | None] = queue.Queue()

    def read_windows() -> None:
        query = sql.SQL(
            "SELECT id, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values "
            "FROM {} WHERE id > %s ORDER BY id LIMIT %s"
        ).format(table)
        last = 0
        with closing(psycopg.connect(dsn, autocommit=True)) as connection:
            while rows := connection.cursor(binary=True).execute(query, (last, WINDOW_ROWS)).fetchall():
                last = rows[-1][0]
                read.put(rows)
        read.put([])

    def delete_windows() -> None:
        query = sql.SQL("DELETE FROM {} WHERE id BETWEEN %s AND %s").format(table)
        with closing(psycopg.connect(dsn, autocommit=True)) as connection:
            while bounds := published.get():
                connection.execute(query, bounds)

    stages = [threading.Thread(target=work, daemon=True) for work in (read_windows, delete_windows)]
    for stage in stages:
        stage.start()
    producer = Producer(
        {
            "bootstrap.servers": bootstrap_servers,
            "transactional.id": transactional_id,
            "linger.ms": 0,
            "batch.size": 1_000_000,
            "batch.num.messages": 50_000,
            "queue.buffering.max.messages": 1_000_000,
            "delivery.report.only.error": True,
        }
    )
    producer.init_transactions()
    relayed = 0
    while rows := read.get():
        producer.begin_transaction()
        for _, topic, key, value, names, texts in rows:
            producer.produce(topic, value, key, headers=list(zip(names, texts, strict=True)))
        producer.commit_transaction()
        published.put((rows[0][0], rows[-1][0]))
        relayed += len(rows)
    published.put(None)
    for stage in stages:
        stage.join()
    producer.close()
    return relayed
