"""What tests of the harvester share: writing rows, running harvesters as a user would, and reading what arrived."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psycopg
from confluent_kafka import Consumer, KafkaError, KafkaException, Message
from confluent_kafka.admin import AdminClient, NewTopic
from psycopg import sql

from outbox_plugin.adapters.harvester_registration import HarvesterRegistration
from outbox_plugin.adapters.kafka_names import KafkaNames
from outbox_plugin.adapters.progress_reader import ProgressReader
from outbox_plugin.core.progress import ProgressRecord
from outbox_plugin.core.shards import Slice
from outbox_plugin.core.signing import Signer
from outbox_plugin.errors import LogUnavailable, TopicMissing
from outbox_plugin.settings import Settings
from tests.support import PATIENCE, eventually

DRAIN_SECONDS = 60.0


class Record(NamedTuple):
    """A record as a `read_committed` consumer sees it."""

    key: str
    value: str | None
    headers: list[tuple[str, str]]
    partition: int
    offset: int


def environment(settings: Settings) -> dict[str, str]:
    """The environment of a process that is to use `settings`."""
    return {**os.environ, **settings.environment()}


def run_outbox(*arguments: str, env: Mapping[str, str], seconds: float = 60) -> subprocess.CompletedProcess[str]:
    """Run `outbox` to its end."""
    command = [sys.executable, "-m", "outbox_plugin", *arguments]
    limit = seconds * PATIENCE
    return subprocess.run(command, env=dict(env), capture_output=True, text=True, timeout=limit, check=False)


class HarvesterProcess:
    """`outbox harvest` as a process that can be killed, paused and woken up."""

    def __init__(self, settings: Settings, log: Path, arguments: Sequence[str] = ()) -> None:
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "outbox_plugin", "harvest", *arguments], env=environment(settings), stderr=output
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text()

    def leads(self) -> bool:
        """Whether the last line of its log about leadership says that it leads."""
        words = [line for line in self.log.splitlines() if "leading" in line]
        return bool(words) and "leading as" in words[-1]

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.wait(10 * PATIENCE)

    def terminate(self, seconds: float = 30) -> int:
        """SIGTERM; returns the exit code."""
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        return self._process.wait(seconds * PATIENCE)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None


@contextmanager
def harvesters(
    settings: Settings, folder: Path, count: int = 1, arguments: Sequence[str] = ()
) -> Iterator[list[HarvesterProcess]]:
    """`count` harvester processes. Those that still run at the end are killed."""
    folder.mkdir(exist_ok=True)
    running = [HarvesterProcess(settings, folder / f"harvester-{number}.log", arguments) for number in range(count)]
    try:
        yield running
    finally:
        for process in running:
            process.signal(signal.SIGCONT)
            process.kill()


def create_topic(settings: Settings, topic: str, partitions: int = 3) -> str:
    """Make `topic`, and wait until the broker shows it."""
    admin = AdminClient({"bootstrap.servers": settings.bootstrap_servers})
    [future] = admin.create_topics([NewTopic(topic, num_partitions=partitions)]).values()
    future.result(20 * PATIENCE)
    eventually(lambda: topic in admin.list_topics(timeout=10 * PATIENCE).topics, 20)
    return topic


def delete_topic(settings: Settings, topic: str) -> None:
    """Delete `topic`, and wait until the broker shows it no more."""
    admin = AdminClient({"bootstrap.servers": settings.bootstrap_servers})
    [future] = admin.delete_topics([topic]).values()
    future.result(60)
    eventually(lambda: topic not in admin.list_topics(timeout=30).topics, 20)


def insert(settings: Settings, topic: str, events: Iterable[tuple[str, str | None]]) -> None:
    """Write (key, value) rows as plain SQL would, in one transaction."""
    query = sql.SQL(
        "INSERT INTO {} (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys,"
        " kafka_header_values) VALUES (now(), %s, %s, %s, '{{}}', '{{}}')"
    )
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        table = sql.Identifier(*settings.table.split("."))
        connection.cursor().executemany(query.format(table), [(topic, key, value) for key, value in events])


def insert_numbered(settings: Settings, topic: str, first: int, count: int, keys: int = 100) -> None:
    """Write rows whose value is their number, in one statement; ascending within each key."""
    query = sql.SQL(
        "INSERT INTO {} (kafka_topic, kafka_key, kafka_value) "
        "SELECT %s, 'key-' || i %% %s, i FROM generate_series(%s::bigint, %s::bigint) AS i"
    )
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        table = sql.Identifier(*settings.table.split("."))
        connection.execute(query.format(table), (topic, keys, first, first + count - 1))


def backlog(settings: Settings) -> int:
    """The number of rows in the outbox."""
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        query = sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(*settings.table.split(".")))
        row = connection.execute(query).fetchone()
    return int(row[0]) if row else 0


def drained(settings: Settings, seconds: float = DRAIN_SECONDS) -> None:
    """Wait until the outbox is empty."""
    eventually(lambda: backlog(settings) == 0, seconds)


def members(settings: Settings, group: str | None = None) -> list[str]:
    """The members of a group; of the leader group, if none is named."""
    admin = AdminClient({"bootstrap.servers": settings.bootstrap_servers})
    [described] = admin.describe_consumer_groups([group or KafkaNames.of(settings).leader_group]).values()
    return [each.member_id for each in described.result(20 * PATIENCE).members]


def named_by_progress(settings: Settings) -> int:
    """How many rows the last progress record names; 0 while there is none."""
    with suppress(LogUnavailable, TopicMissing):
        if record := last_progress(settings):
            return sum(len(each.ids) for each in record.publications)
    return 0


def signer_of(settings: Settings) -> Signer:
    """A signer with the outbox's secret, as anyone has who may read it."""
    with psycopg.connect(settings.dsn.get_secret_value()) as connection, closing(connection):
        return HarvesterRegistration(settings, connection).signer()


def last_progress(settings: Settings, *, to_the_end: bool = False) -> ProgressRecord | None:
    """The last committed progress record of the only shard."""
    with closing(ProgressReader(settings, KafkaNames.of(settings), signer_of(settings))) as reader:
        return reader.read(Slice(0, 1), to_the_end=to_the_end).record


def publish_but_kill_before_the_purge(settings: Settings, folder: Path) -> None:
    """Publish all rows, and kill the leader before it deletes one: only the progress record says what was published."""
    rows = backlog(settings)
    with psycopg.connect(settings.dsn.get_secret_value()) as holder:
        table = sql.Identifier(*settings.table.split("."))
        holder.execute(sql.SQL("SELECT FROM {} FOR SHARE").format(table))  # The purge waits for these row locks.
        with harvesters(settings, folder) as [leader]:
            eventually(lambda: named_by_progress(settings) == rows, 60)
            leader.kill()
        holder.execute(  # Postgres would still carry out the purge that a dead client sent.
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name LIKE 'outbox harvester%'"
        )
    assert backlog(settings) == rows


def consume(settings: Settings, topic: str) -> list[Record]:
    """All records that a `read_committed` consumer sees in `topic`, from its beginning to its end."""
    config: dict[str, str | int | float | bool] = {
        "bootstrap.servers": settings.bootstrap_servers,
        "group.id": f"{settings.group}-test",
        "enable.auto.commit": False,
        "auto.offset.reset": "earliest",
        "isolation.level": "read_committed",
        "enable.partition.eof": True,
    }
    records: list[Record] = []
    deadline = time.monotonic() + DRAIN_SECONDS * PATIENCE
    with closing(Consumer(config)) as consumer:
        unread = set(consumer.list_topics(topic, timeout=20).topics[topic].partitions)
        consumer.subscribe([topic])
        while unread:
            assert time.monotonic() < deadline, f"{topic} was not read to its end in {DRAIN_SECONDS * PATIENCE:.0f} s"
            for message in consumer.consume(10_000, 0.2):
                partition = message.partition()
                assert partition is not None
                if (error := message.error()) is None:
                    records.append(_record(message))
                elif error.code() == KafkaError._PARTITION_EOF:
                    unread.discard(partition)
                elif not error.retriable():
                    raise KafkaException(error)
    return records


def _record(message: Message) -> Record:
    headers = [(each[0], _text(each[1]) or "") for each in message.headers() or []]
    return Record(
        _text(message.key()) or "", _text(message.value()), headers, message.partition() or 0, message.offset() or 0
    )


def _text(body: str | bytes | None) -> str | None:
    return body.decode() if isinstance(body, bytes) else body


def by_key(records: Iterable[Record]) -> dict[str, list[str | None]]:
    """The values of each key, in the order in which a consumer sees them."""
    values: dict[str, list[str | None]] = defaultdict(list)
    for record in sorted(records, key=lambda each: (each.partition, each.offset)):
        values[record.key].append(record.value)
    return dict(values)


def assert_exactly_once_in_order(records: Iterable[Record], first: int, count: int) -> None:
    """Check that every number from `first` on arrived once, ascending within each key."""
    seen = by_key(records)
    numbers = Counter(int(value or -1) for values in seen.values() for value in values)
    wanted = range(first, first + count)
    lost = [number for number in wanted if number not in numbers]
    repeated = {number: times for number, times in numbers.items() if times > 1}
    assert (len(lost), len(repeated), len(numbers)) == (0, 0, count), f"lost {lost[:5]}, repeated {list(repeated)[:5]}"
    misplaced = {key: values for key, values in seen.items() if [*values] != sorted(values, key=lambda v: int(v or -1))}
    assert not misplaced, f"out of order: {list(misplaced)[:5]}"


def assert_first_appearances_in_order(records: Iterable[Record], first: int, count: int) -> None:
    """Check that each number from `first` on arrived, and for the first time after the smaller numbers of its key."""
    seen: set[int] = set()
    for key, values in by_key(records).items():
        appearances = list(dict.fromkeys(int(value or -1) for value in values))
        assert appearances == sorted(appearances), f"{key} was overtaken"
        seen.update(appearances)
    assert seen == set(range(first, first + count))
