"""Reads the status that `outbox status` and Dagster's observations show, from Postgres and the leader topic."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import psycopg
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import PartitionMetadata

from outbox_plugin.adapters.kafka_clients import NO_LEADER_YET, connection_error, content
from outbox_plugin.adapters.kafka_names import KafkaNames
from outbox_plugin.adapters.kafka_reader import NotReadToEnd, OffsetSpan, PartitionReader, bounds, reader_config
from outbox_plugin.adapters.truncation_aware_reader import TruncatedWhileRead
from outbox_plugin.core.bad_rows import ParkedKey
from outbox_plugin.core.heartbeat_codec import HeartbeatCodec, LeaderRecord
from outbox_plugin.core.leader_heartbeat import LeaderHeartbeat, is_goharvests
from outbox_plugin.core.signing import Signer
from outbox_plugin.errors import ServerRefused
from outbox_plugin.printable import one_line
from outbox_plugin.schema.connection import connect, errors_as_refusals
from outbox_plugin.schema.statements import statement
from outbox_plugin.schema.table_name import with_schema
from outbox_plugin.settings import Settings
from outbox_plugin.threads.deadline_future import DeadlineFuture

FRESH_SECONDS = 2.0  # A leader is alive if its last heartbeat is at most this old: it sends three a second.
IGNORED_SECONDS = 60.0  # How long the status reports a record of the leader topic that is ignored.
_LISTEN_SECONDS = 1.0  # How long to wait for a heartbeat of a partition whose last one seems old: three are due.
_READ_SHARE = 0.8  # The share of the caller's time for reading the leader topic.
_TAIL_RECORDS = 64
_PARKED_LISTED = 100
COUNTED_ROWS = 20_000  # More rows are estimated: counting ten million takes seconds, and the result would be old.


@dataclass(frozen=True, slots=True)
class Leader:
    """The leader of a shard; `since` is in ISO 8601."""

    instance: str
    host: str
    pid: int
    leader_id: str
    since: str


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """One shard: its leader, if one sends heartbeats, and its state.

    Attributes:
        shard: its number.
        leader: None if none sends heartbeats.
        lag_records: how many rows wait.
        records_per_second: the leader's throughput.
        published: how many records the leader has published since it started.
        heartbeat_age_seconds: the age of the leader's last heartbeat.
        trouble: the last problem that the leader, or a harvester that waits to lead, has reported.
        paused: whether an operator has paused it.
        recovered_rows: how many rows the leader found published by the one before it, and deleted instead of repeating
            them.
        ignored_records: how many records of the leader topic, in the last minute, were not heartbeats signed by a
            harvester of this outbox. Harvesters ignore them, and `trouble` mentions them, too.
        live_first: whether new rows are published before a backlog.
        live_rows_waiting: how many of the new rows wait for the backlog, because it may have their keys.
    """

    shard: int
    leader: Leader | None
    lag_records: int
    records_per_second: float
    published: int
    heartbeat_age_seconds: float | None
    trouble: str | None
    paused: bool = False
    recovered_rows: int = 0
    ignored_records: int = 0
    live_first: bool = False
    live_rows_waiting: int = 0


@dataclass(frozen=True, slots=True)
class Status:
    """The outbox and its harvesters.

    Attributes:
        backlog: how many rows wait; None if Postgres does not answer.
        oldest_seconds: how long the oldest row has waited.
        shards: the shards.
        errors: a line for each server that does not answer.
        parked_keys: how many keys and topics wait behind a bad row.
        parked: the first of these keys.
        dead_letters: how many dead letters there are.
        backlog_is_estimated: whether `backlog` and each shard's `lag_records` are estimates. Up to 20,000 rows are
            counted. Beyond them, the density of ids in the later half of these rows is used for all further ids; the
            earlier half may have a few old rows, such as parked ones, which would distort it.
        is_at_rest: whether the outbox has neither rows nor a leader, which OUTBOX_TENANTS_REST allows.
    """

    backlog: int | None
    oldest_seconds: float | None
    shards: tuple[ShardStatus, ...]
    errors: tuple[str, ...]
    parked_keys: int = 0
    parked: tuple[ParkedKey, ...] = ()
    dead_letters: int = 0
    backlog_is_estimated: bool = False
    is_at_rest: bool = False

    def to_json(self) -> dict[str, Any]:
        """The status as plain values."""
        parked = [{**asdict(key), "since": key.since.isoformat()} for key in self.parked]
        return {**asdict(self), "parked": parked}


@dataclass(frozen=True, slots=True)
class _PartitionTail:
    """The last records of a shard's partition of the leader topic: its heartbeats, each with its age in seconds."""

    heartbeats: list[tuple[LeaderHeartbeat, float]] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)  # For each other record, why it is ignored.


@dataclass(frozen=True, slots=True)
class _Backlog:
    """The waiting rows, in all and by shard."""

    rows: int
    oldest_seconds: float | None
    by_shard: tuple[int, ...]
    is_estimated: bool


@dataclass(frozen=True, slots=True)
class _Table:
    """The part of the status that is read from Postgres."""

    backlog: _Backlog
    paused: frozenset[int]
    parked: tuple[ParkedKey, ...]
    dead_letters: int
    signer: Signer | None
    cannot_verify: str | None  # The reason why there is no signer.


def read_status(settings: Settings, timeout_seconds: float = 5.0) -> Status:
    """Read the status from both servers in parallel, within about `timeout_seconds`.

    It raises no exception: a server that does not answer in time is an entry in `errors`.
    """
    now = time.monotonic()
    deadline, read_deadline = now + timeout_seconds, now + _READ_SHARE * timeout_seconds
    store = DeadlineFuture(lambda: _read_table(settings, timeout_seconds))
    log = DeadlineFuture(lambda: _last_records(settings, read_deadline))
    table, store_error = store.result(deadline, "Postgres")
    read, log_error = log.result(deadline, "Kafka")
    records, unread, out_of_sync = read or ([], (), {})
    if unread:
        log_error = f"Kafka did not answer in time for {', '.join(map(str, unread))} of the leader topic's partitions"
    errors = tuple(error for error in (store_error, log_error) if error)
    count = len(table.backlog.by_shard) if table else settings.shards
    tails = _tails_by_shard(settings, records, table.signer if table else None)
    may_rest = settings.tenants_rest is not None and table is not None and not table.backlog.rows
    partition_problems = {} if may_rest else out_of_sync
    shards = tuple(
        _shard_status(shard, tails.get(shard, _PartitionTail()), table, partition_problems.get(shard))
        for shard in range(count)
    )
    if table is None:
        return Status(None, None, shards, errors)
    backlog, listed = table.backlog, table.parked[:_PARKED_LISTED]
    return Status(
        backlog.rows,
        backlog.oldest_seconds,
        shards,
        errors,
        len(table.parked),
        listed,
        table.dead_letters,
        backlog.is_estimated,
        is_at_rest=may_rest and all(shard.leader is None for shard in shards),
    )


def _shard_status(shard: int, tail: _PartitionTail, table: _Table | None, partition_problem: str | None) -> ShardStatus:
    """The status of one shard.

    Args:
        shard: its number.
        tail: the last records of its partition of the leader topic.
        table: the part of the status that is read from Postgres; None if Postgres does not answer.
        partition_problem: why the partition may take no heartbeat; it is of interest where none arrives. One of a
            harvester that only tries to lead shows that the partition takes them, too.
    """
    fresh = [(heartbeat, age) for heartbeat, age in tail.heartbeats if age <= FRESH_SECONDS]
    age = fresh[-1][1] if fresh else None
    leading = [heartbeat for heartbeat, _ in fresh if heartbeat.phase == "leader"]
    ended = {heartbeat.leader_id for heartbeat, _ in fresh if heartbeat.phase == "resigned"}
    leader = leading[-1] if leading and leading[-1].leader_id not in ended else None
    # The last heartbeat may be of one that only begins to take over, which reports no trouble.
    reported = [heartbeat.trouble for heartbeat, _ in fresh if heartbeat.trouble]
    trouble = leader.trouble if leader else next(reversed(reported), None)
    troubles = [trouble, table.cannot_verify if table else None]
    if not fresh:
        troubles.append(partition_problem)
    if tail.ignored:
        troubles.append(
            f"{len(tail.ignored)} records of the last minute on the leader topic are ignored: {tail.ignored[-1]}"
        )
    return ShardStatus(
        shard=shard,
        leader=Leader(leader.instance, leader.host, leader.pid, leader.leader_id, leader.since) if leader else None,
        lag_records=table.backlog.by_shard[shard] if table else 0,
        records_per_second=leader.records_per_second if leader else 0.0,
        published=leader.published if leader else 0,
        heartbeat_age_seconds=round(age, 3) if age is not None else None,
        trouble="; ".join(filter(None, troubles)) or None,
        paused=table is not None and shard in table.paused,
        recovered_rows=leader.recovered if leader else 0,
        ignored_records=len(tail.ignored),
        live_first=leader is not None and leader.live_first,
        live_rows_waiting=leader.live_rows_waiting if leader else 0,
    )


def _read_table(settings: Settings, seconds: float) -> _Table:
    table = settings.table
    with (
        errors_as_refusals(settings),
        closing(connect(settings, purpose="outbox status")) as connection,
        connection.transaction(),  # So that the time limit does not stay in a pooler's session.
    ):

        def ask(noun: str, name: str, **values: object) -> list[tuple[Any, ...]]:
            return connection.execute(statement(noun, name, place), {"table": table, **values}).fetchall()

        connection.execute(statement("window", "walk_by_id", table))
        connection.execute(statement("window", "limit_duration", table), {"milliseconds": int(seconds * 1000)})
        place = with_schema(connection, table)
        [(_, shards, _, paused, paused_shards)] = ask("control", "layout") or [(0, settings.shards, (), False, ())]
        earliest = [_Earliest(*row) for row in ask("window", "backlog", counted=COUNTED_ROWS, shards=shards)]
        parked = ask("control", "parked")
        [(letters,)] = ask("control", "count_dead_letters")
        signer, cannot_verify = None, None
        try:
            with connection.transaction():
                signer = next((Signer(secret) for (secret,) in ask("identity", "secret")), None)
            if signer is None:
                cannot_verify = f"no outbox is known as {table!r}; run `outbox migrate` first"
        except (psycopg.errors.InsufficientPrivilege, psycopg.errors.UndefinedTable) as error:
            cannot_verify = f"heartbeats cannot be verified: {one_line(error)}"
    return _Table(
        _backlog(earliest, shards, COUNTED_ROWS),
        frozenset(range(shards) if paused else paused_shards),
        tuple(ParkedKey(*row) for row in parked),
        letters,
        signer,
        cannot_verify,
    )


class _Earliest(NamedTuple):
    """The earliest rows, as far as they are of one shard: a row of the statement `backlog`."""

    shard: int
    rows: int
    oldest_seconds: float | None  # None if no row has a time of creation.
    middle_id: int | None  # Of the earliest rows of all shards; None if they are few.
    last_id: int  # Of the earliest rows of all shards.
    last_id_of_all: int


def _backlog(earliest: Sequence[_Earliest], shards: int, counted: int) -> _Backlog:
    """The number of waiting rows, estimated from the first `counted` of them if there are more."""
    if not earliest:
        return _Backlog(0, None, (0,) * shards, is_estimated=False)
    total, ages = sum(each.rows for each in earliest), [each.oldest_seconds for each in earliest]
    behind = _behind(earliest[0], counted) if total == counted else 0.0
    rows = {each.shard: round(each.rows * (1 + behind / total)) for each in earliest}
    return _Backlog(
        round(total + behind),
        round(max((0.0, *known)), 3) if (known := [age for age in ages if age is not None]) else None,
        tuple(rows.get(shard, 0) for shard in range(shards)),
        is_estimated=behind > 0,
    )


def _behind(one: _Earliest, counted: int) -> float:
    """An estimate of the number of rows behind the first `counted` ones."""
    if one.middle_id is None or one.last_id <= one.middle_id:
        return 0.0
    rows_per_id = (counted - 1 - counted // 2) / (one.last_id - one.middle_id)
    return (one.last_id_of_all - one.last_id) * rows_per_id


def _last_records(
    settings: Settings, deadline: float
) -> tuple[list[tuple[LeaderRecord, float]], tuple[int, ...], Mapping[int, str]]:
    """Read the last records of every shard's partition of the leader topic.

    If Kafka does not answer for a partition in time, only the leader of that shard is not found.

    A record's age is by this machine's clock and that of its sender, which may differ. So where the last record of a
    partition seems old, or is of the future, this waits a little for another one: what arrives is new.

    Returns:
        The records, each with its age in seconds; the partitions that were not read to their ends; and for each
        partition with replicas out of sync, what that means.
    """
    names = KafkaNames.of(settings)
    found: list[tuple[LeaderRecord, float]] = []
    problems: list[KafkaError] = []
    config = reader_config(settings, names.leader_group) | {"error_cb": problems.append}
    try:
        with closing(Consumer(config)) as consumer:
            topic = names.leader_topic
            listed = consumer.list_topics(topic, max(0.1, deadline - time.monotonic())).topics[topic]
            out_of_sync = {
                number: _out_of_sync_message(topic, partition)
                for number, partition in listed.partitions.items()
                if len(partition.isrs) < len(partition.replicas)
            }
            spans, unanswered = _tails(consumer, topic, list(listed.partitions), deadline)
            reader = PartitionReader(consumer, topic, spans)
            with suppress(NotReadToEnd, TruncatedWhileRead):  # The records read until then are shown.
                for message in chain.from_iterable(reader.batches(deadline=deadline)):
                    age = abs(time.time() - message.timestamp()[1] / 1000)
                    found.append((_leader_record(message), age))
            last_ages = {record.shard: age for record, age in found}
            doubtful = {shard: spans[shard].end for shard, age in last_ages.items() if age > FRESH_SECONDS}
            found += [(record, 0.0) for record in _arriving(consumer, topic, doubtful, deadline)]
            return found, tuple(sorted([*unanswered, *reader.unread])), out_of_sync
    except KafkaException as error:
        reason = error.args[0]
        if reason.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_PARTITION):
            return found, (), {}  # No harvester has ever run.
        raise ServerRefused(str(connection_error(problems[0] if problems else reason, settings))) from None


def _out_of_sync_message(topic: str, partition: PartitionMetadata) -> str:
    """What it means that replicas are out of sync. How many must be in sync is not asked: few roles may read that."""
    in_sync = f"{len(partition.isrs)} of {len(partition.replicas)} replicas in sync"
    return (
        f"partition {partition.id} of the topic {topic} has {in_sync}; if its min.insync.replicas asks for more, it "
        "takes no heartbeats, and nobody can lead"
    )


def _arriving(consumer: Consumer, topic: str, ends: Mapping[int, int], deadline: float) -> list[LeaderRecord]:
    """The records behind the ends of the partitions, as they arrive within a second.

    Ends when each partition has a heartbeat of a leader: others write there, too.
    """
    found: list[LeaderRecord] = []
    led: set[int] = set()
    deadline = min(deadline, time.monotonic() + _LISTEN_SECONDS)
    if ends:
        consumer.assign([TopicPartition(topic, partition, end) for partition, end in ends.items()])
    while len(led) < len(ends) and time.monotonic() < deadline:
        for message in consumer.consume(1, 0.1):
            if message.error() is None:
                found.append(record := _leader_record(message))
                heartbeat = LeaderHeartbeat.parse(record.value)
                if heartbeat is not None and heartbeat.phase in ("leader", "resigned"):
                    led.add(record.shard)
    return found


def _leader_record(message: Message) -> LeaderRecord:
    return LeaderRecord(message.partition() or 0, message.offset() or 0, *content(message))


def _tails(
    consumer: Consumer, topic: str, partitions: list[int], deadline: float
) -> tuple[dict[int, OffsetSpan], list[int]]:
    """The spans of the last records of the partitions, and the partitions whose ends Kafka does not return in time.

    Half of the time until the deadline is left for reading.

    Raises:
        KafkaException: Kafka returns the end of no partition, or refuses to.
    """
    spans: dict[int, OffsetSpan] = {}
    unanswered: dict[int, KafkaException] = {}
    half_time = (time.monotonic() + deadline) / 2
    for number, partition in enumerate(partitions):
        seconds = (half_time - time.monotonic()) / (len(partitions) - number)  # Shares the time left among the rest.
        try:
            first, end = bounds(consumer, TopicPartition(topic, partition), max(0.1, seconds))
        except KafkaException as error:
            if error.args[0].code() not in {KafkaError._TIMED_OUT, KafkaError._TRANSPORT, *NO_LEADER_YET}:
                raise
            unanswered[partition] = error
        else:
            spans[partition] = OffsetSpan(max(first, end - _TAIL_RECORDS), end)
    if unanswered and not spans:
        raise next(iter(unanswered.values()))
    return spans, list(unanswered)


def _tails_by_shard(
    settings: Settings, records: list[tuple[LeaderRecord, float]], signer: Signer | None
) -> dict[int, _PartitionTail]:
    """The last heartbeats and the ignored records of every shard. Without a signer, heartbeats are not verified."""
    codec = HeartbeatCodec(KafkaNames.of(settings).leader_topic, signer) if signer else None
    tails: dict[int, _PartitionTail] = {}
    for record, age in records:
        tail = tails.setdefault(record.shard, _PartitionTail())
        unverified = LeaderHeartbeat.parse(record.value)
        if unverified is not None and unverified.shard != record.shard:
            unverified = None
        heartbeat = codec.decode(record) if codec else unverified
        is_new = codec is None or codec.is_new(record, heartbeat)
        if heartbeat is not None:
            tail.heartbeats.extend([(heartbeat, age)] if is_new else [])
        elif age <= IGNORED_SECONDS and not (settings.leader_topic and is_goharvests(record.value)):
            why = "is no heartbeat of this shard" if unverified is None else "is signed by no harvester of this outbox"
            tail.ignored.append(f"the one at offset {record.offset} {why}")
    return tails
