"""Many outboxes in one harvester: what they cost at rest, and how fast rows, backlogs and takeovers go."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from statistics import median
from typing import Any, NamedTuple

import psutil
from confluent_kafka.admin import AdminClient

from outbox_plugin.adapters.kafka_clients import client_config
from outbox_plugin.adapters.kafka_names import KafkaNames
from outbox_plugin.bench.idle import transactions
from outbox_plugin.bench.reader import LiveReader
from outbox_plugin.bench.relay_processes import KEYS, NotRelayed, harvester, wait, write
from outbox_plugin.bench.takeover import STEADY_SECONDS
from outbox_plugin.bench.temporary_outbox import (
    PATIENCE_SECONDS,
    Tell,
    connect,
    create_topic,
    insert,
    temporary_outboxes,
)
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.settings import Settings

_POLL_SECONDS = 0.2
_FALL_ASLEEP_SECONDS = 5.0


class AtRest(NamedTuple):
    """What a process takes while none of its outboxes has anything to publish."""

    cpu_per_second: float
    megabytes: float
    threads: int
    descriptors: int
    postgres_connections: int
    kafka_connections: int
    transactions_per_second: float


@dataclass(frozen=True)
class OutboxesReport:
    """Of one harvester with `count` outboxes. The backlogs are as large together as the single one."""

    count: int
    at_rest: AtRest
    first_milliseconds: list[float]
    rows_per_second_of_one_backlog: float
    rows_per_second_of_small_backlogs: float
    takeover_seconds: float

    @property
    def drain_ratio(self) -> float:
        """How fast many small backlogs drain, compared with one large one."""
        return self.rows_per_second_of_small_backlogs / self.rows_per_second_of_one_backlog

    def lines(self) -> list[str]:
        """The report as lines of text."""
        rest = self.at_rest
        return [
            f"first row of a quiet outbox: {median(self.first_milliseconds):.1f} ms in the median, "
            f"{max(self.first_milliseconds):.1f} ms at worst",
            f"drain: {self.rows_per_second_of_small_backlogs:,.0f} rows/s of {self.count} backlogs, "
            f"{self.rows_per_second_of_one_backlog:,.0f} of one as large, {self.drain_ratio:.2f} times",
            f"takeover of all after kill -9: {self.takeover_seconds:.2f} s until the last outbox's row arrived",
            f"{self.count} outboxes at rest: {rest.cpu_per_second:.3f} CPU s per second, {rest.megabytes:.0f} MB, "
            f"{rest.threads} threads, {rest.descriptors} descriptors, {rest.postgres_connections} connections to "
            f"Postgres, {rest.kafka_connections} to Kafka, {rest.transactions_per_second:.1f} transactions/s",
        ]

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return {**asdict(self), "at_rest": self.at_rest._asdict(), "drain_ratio": self.drain_ratio}


def outboxes(
    settings: Settings, count: int, seconds: float, times: int, rows: int, rest: float | None, tell: Tell
) -> OutboxesReport:
    """Let one `outbox harvest` have `count` outboxes, each in a schema of its own, that publish to one topic.

    Args:
        settings: of the servers. Nobody else may use them meanwhile.
        count: how many outboxes.
        seconds: how long the rest is that is measured.
        times: of how many rests the first row is measured, each of another outbox.
        rows: of all small backlogs together, and of the large one.
        rest: after how many seconds an outbox has no harvester; None: each always has one.
        tell: is told how it goes.

    Raises:
        NotRelayed: what was written did not arrive within ten minutes.
    """
    with temporary_outboxes(settings, count) as scratch:
        of_the_process, ours = _listed(scratch) if rest is None else _matched(scratch, rest)
        for outbox in ours:
            migrate(outbox, wake_up=True)
        tell(f"{count} outboxes are made")
        bench = _Bench(ours, f"{ours[0].group}-topic", may_rest=rest is not None)
        with harvester(of_the_process) as process, bench.reader.reading():
            bench.write_to_all(1)
            bench.wait()
            tell("all have published a row")
            at_rest = bench.rest(process, seconds)
            tell(str(at_rest))
            first = [bench.first_row(outbox) for outbox in islice(cycle(ours), times)]
            tell(f"first rows: {', '.join(f'{each:.1f}' for each in first)} ms")
            bench.drain(ours, rows // count)  # Not counted: it warms them up.
            of_one = bench.drain(ours[:1], rows)
            of_many = bench.drain(ours, rows // count)
            tell(f"rows/s: {of_one:,.0f} of one backlog, {of_many:,.0f} of {count}")
            takeover = bench.take_over(of_the_process, process)
    return OutboxesReport(count, at_rest, first, of_one, of_many, takeover)


def _listed(scratch: Sequence[Settings]) -> tuple[Settings, Sequence[Settings]]:
    """The settings of a process that harvests these outboxes, and theirs."""
    each = [{"table": outbox.table, "group": outbox.group} for outbox in scratch]
    return scratch[0].model_copy(update={"outboxes": each}), scratch


def _matched(scratch: Sequence[Settings], rest: float) -> tuple[Settings, Sequence[Settings]]:
    """The settings of a process that harvests these outboxes by a pattern, and theirs."""
    schemas = [outbox.table.partition(".")[0] for outbox in scratch]
    group, _, _ = schemas[0].rpartition("_")
    pattern = scratch[0].model_copy(update={"table": f"{group}_*.outbox", "group": group, "tenants_rest": rest})
    return pattern, [pattern.of_schema(schema) for schema in schemas]


class _Bench:
    """Writes rows to outboxes, and knows how many are to arrive."""

    def __init__(self, ours: Sequence[Settings], topic: str, *, may_rest: bool) -> None:
        create_topic(ours[0], topic, 1)
        self._may_rest = may_rest
        self._ours = ours
        self._topic = topic
        self._written = 0
        self._admin = AdminClient(client_config(ours[0]))
        self.reader = LiveReader(ours[0], topic)

    def wait(self) -> None:
        """Wait until all that was written has arrived."""
        wait(self.reader, self._written)

    def write_to_all(self, rows: int) -> None:
        """Write `rows` rows to each outbox, in one transaction."""
        self._write(self._ours, rows)

    def _write(self, some: Sequence[Settings], rows: int) -> None:
        with connect(some[0]) as connection:
            for outbox in some:
                insert(connection, outbox, self._topic, rows, KEYS)
        self._written += len(some) * rows

    def rest(self, process: psutil.Process, seconds: float) -> AtRest:
        """What `process` takes in `seconds` without rows."""
        time.sleep(_FALL_ASLEEP_SECONDS)
        if self._may_rest:
            self._wait_until(lambda: not self._sessions("outbox harvester%"), "the outboxes to rest")
        cpu, queries, at = _cpu_seconds(process), transactions(self._ours[0]), time.monotonic()
        time.sleep(seconds)
        took = time.monotonic() - at
        brokers = {broker.port for broker in self._admin.list_topics(timeout=PATIENCE_SECONDS).brokers.values()}
        with process.oneshot():
            return AtRest(
                (_cpu_seconds(process) - cpu) / took,
                process.memory_info().rss / 1e6,
                process.num_threads(),
                process.num_fds(),
                self._sessions("outbox %"),
                sum(bool(each.raddr) and each.raddr.port in brokers for each in process.net_connections("tcp")),
                (transactions(self._ours[0]) - queries - 1) / took,  # Without the query that counts them.
            )

    def _sessions(self, pattern: str) -> int:
        with connect(self._ours[0], autocommit=True) as connection:
            row = connection.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE %s", [pattern]
            ).fetchone()
        return int(row[0]) if row else 0

    def first_row(self, outbox: Settings) -> float:
        """The milliseconds from the commit of one row of a quiet outbox to its receipt."""
        [committed] = write(outbox, self._topic, 1, 1)
        self._written += 1
        self.wait()
        return (self.reader.arrivals[-1].at - committed) * 1000

    def drain(self, some: Sequence[Settings], rows: int) -> float:
        """How many rows a second arrive of backlogs of `rows` rows, which appear in all of `some` at once."""
        self._write(some, rows)
        committed = time.monotonic()
        self.wait()
        return len(some) * rows / (self.reader.arrivals[-1].at - committed)

    def take_over(self, settings: Settings, leader: psutil.Process) -> float:
        """The seconds from the leader's death by SIGKILL until a row of each outbox has arrived."""
        with harvester(settings):
            if self._may_rest:
                self._wait_until(lambda: self._sessions("outbox tenants (at rest)") == 2, "a second process")
            else:
                self._wait_for_members(2)
            time.sleep(STEADY_SECONDS)  # A standby that has not heard its leader yet waits for the group to miss it.
            leader.kill()
            killed = time.monotonic()
            self.write_to_all(1)
            self.wait()
            return self.reader.arrivals[-1].at - killed

    @staticmethod
    def _wait_until(condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise NotRelayed(f"waited in vain for {what}, {PATIENCE_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)

    def _wait_for_members(self, count: int) -> None:
        """Wait until each leader group has `count` members."""
        missing = {KafkaNames.of(outbox).leader_group for outbox in self._ours}
        deadline = time.monotonic() + PATIENCE_SECONDS
        while missing:
            if time.monotonic() > deadline:
                raise NotRelayed(f"{len(missing)} standbys did not join their groups in {PATIENCE_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)
            groups = self._admin.describe_consumer_groups(list(missing), request_timeout=PATIENCE_SECONDS)
            missing -= {name for name, group in groups.items() if len(group.result().members) >= count}


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
