"""Live events beside a batch: how long they take while a large transaction is written, and while it drains."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from statistics import quantiles
from typing import Any

from confluent_kafka import Consumer, TopicPartition
from psycopg import sql

from outbox_plugin.adapters.kafka_reader import bounds, reader_config
from outbox_plugin.bench.reader import LiveReader
from outbox_plugin.bench.relay_processes import NotRelayed, harvester, wait, write, write_while
from outbox_plugin.bench.temporary_outbox import (
    PATIENCE_SECONDS,
    Tell,
    connect,
    create_topic,
    insert,
    table_of,
    temporary_outbox,
)
from outbox_plugin.schema.statements import statement
from outbox_plugin.settings import Settings

WARMING_ROWS = 200
QUIET_SECONDS = 10.0
PARTITIONS = 3
_MIN_ROWS = 20  # The least number of rows for a percentile.


@dataclass(frozen=True)
class Phase:
    """Milliseconds from commit to receipt, of the live events that were committed in one phase."""

    name: str
    seconds: float
    events: int
    p50: float
    p99: float

    @classmethod
    def of(cls, name: str, seconds: float, late: Sequence[float]) -> Phase:
        """Make a phase from the delays of its events.

        Args:
            name: what the report calls the phase.
            seconds: how long the phase took.
            late: the delay of each of its events, in seconds.
        """
        cuts = quantiles(late, n=100) if len(late) >= _MIN_ROWS else [0.0] * 99
        return cls(name, seconds, len(late), cuts[49] * 1000, cuts[98] * 1000)


@dataclass(frozen=True)
class BesideReport:
    """The phases of one run, in their order; the first is quiet."""

    delivery: str
    rows: int
    events_per_second: float
    phases: tuple[Phase, ...]

    def lines(self) -> list[str]:
        """Each phase, with its ratios to the quiet one, as lines of text."""
        quiet = self.phases[0]
        return [
            f"{self.delivery}, {self.events_per_second:.0f} live events/s, a batch of {self.rows:,} rows",
            *(
                f"{each.name + ':':<10}p50 {each.p50:7.1f} ms ({_ratio(each.p50, quiet.p50)}), "
                f"p99 {each.p99:8.1f} ms ({_ratio(each.p99, quiet.p99)}); "
                f"{each.events} events in {each.seconds:.1f} s"
                for each in self.phases
            ),
        ]

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return asdict(self)


def _ratio(value: float, quiet: float) -> str:
    return f"{value / quiet:.1f} of quiet" if quiet else "-"


def beside(settings: Settings, rows: int, keys: int, events_per_second: float, tell: Tell) -> BesideReport:
    """Write live events at a steady pace; meanwhile commit a batch in one transaction, and wait until it has drained.

    Args:
        settings: the servers.
        rows: of the batch, about 200 bytes each.
        keys: of the batch; no live event has one of them.
        events_per_second: live events, each a transaction of its own.
        tell: is told how it goes.

    Raises:
        NotRelayed: what was written did not arrive within ten minutes.
    """
    with temporary_outbox(settings) as ours, harvester(ours):
        topics = f"{ours.group}-live", f"{ours.group}-batch"
        for topic in topics:
            create_topic(ours, topic, PARTITIONS)
        reader = LiveReader(ours, topics[0])
        with reader.reading():
            write(ours, topics[0], WARMING_ROWS, 200.0)
            wait(reader, WARMING_ROWS)
            committed: list[float] = []
            with ThreadPoolExecutor(1, "bench-writer") as pool:
                stop = threading.Event()
                written = pool.submit(
                    write_while, ours, topics[0], events_per_second, committed, lambda: not stop.is_set()
                )
                try:
                    times = _write_batch(ours, topics[1], rows, keys, tell)
                finally:
                    stop.set()
                written.result()
            wait(reader, WARMING_ROWS + len(committed))
        arrived = [(int(each.record.value.split(" ")[0]), each.at) for each in reader.arrivals[WARMING_ROWS:]]
    late = [(committed[number], at - committed[number]) for number, at in arrived]
    phases = [
        Phase.of(name, end - begin, [seconds for begun, seconds in late if begin <= begun < end])
        for name, begin, end in zip(("quiet", "written", "draining"), times, times[1:], strict=False)
    ]
    return BesideReport(settings.delivery, rows, events_per_second, tuple(phases))


def _write_batch(settings: Settings, topic: str, rows: int, keys: int, tell: Tell) -> list[float]:
    """Write the batch. Returns the times at which the phases began, and the last one ended."""
    times = [time.monotonic()]
    tell(f"quiet: {QUIET_SECONDS:.0f} s")
    time.sleep(QUIET_SECONDS)
    times.append(time.monotonic())
    tell(f"a batch of {rows:,} rows is written in one transaction")
    with closing(connect(settings)) as connection:
        insert(connection, settings, topic, rows, keys)
        connection.execute(statement("emit", "summarise_keys", settings.table, written=sql.Literal(rows)))
        connection.commit()
    times.append(time.monotonic())
    tell("the batch drains")
    _wait_until_drained(settings, topic, rows)
    return [*times, time.monotonic()]


def _wait_until_drained(settings: Settings, topic: str, rows: int) -> None:
    """Wait until Kafka has as many records as the batch has rows, and then until the table has none of them.

    The table is not queried before that, because the query is slow while many rows are left.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    query = sql.SQL("SELECT EXISTS (SELECT FROM {} WHERE kafka_topic = %s)").format(table_of(settings))
    with (
        closing(Consumer(reader_config(settings, "outbox-bench"))) as consumer,
        closing(connect(settings, autocommit=True)) as connection,
    ):
        partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
        while sum(bounds(consumer, each)[1] for each in partitions) < rows or connection.execute(
            query, (topic,)
        ).fetchone() != (False,):
            if time.monotonic() > deadline:
                raise NotRelayed(f"the batch did not drain in {PATIENCE_SECONDS:.0f} s")
            time.sleep(0.2)
