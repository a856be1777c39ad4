"""Where a group goes on when Kafka has forgotten it.

Brokers drop the committed offsets of a group that has had no member for `offsets.retention.minutes` (7 days). Such a
group would begin its topics anew, and an event whose key is remembered no more would have its effect again. So an inbox
also writes its positions to its own database, about once a second, and when it ends.

A position may lag: what was handled after it was written is known by its keys. Of the committed offset and our position
the greater one counts, so that an operator can still pass records over. Either counts only in the topic, by its id, in
which it was reached: one that was made anew has other records at the same offsets. With an offset, an inbox commits the
topic's id as its metadata; an offset with other metadata or none, as an operator or another consumer sets it, counts in
every topic of the name.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any

import psycopg
from confluent_kafka import Consumer, KafkaException
from confluent_kafka import TopicPartition as KafkaTopicPartition

from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.inbox.key_queues import PartitionPosition
from outbox_plugin.printable import logger_of
from outbox_plugin.schema.connection import connect, one_line
from outbox_plugin.schema.statements import statement
from outbox_plugin.settings import Settings

logger = logger_of("outbox_plugin.inbox")

LOCK_MILLISECONDS = 1_000  # A stop waits no longer than that for somebody's lock on the table.
ANSWER_SECONDS = 10.0
TROUBLE_SECONDS = 1.0
_TOPIC_ID = re.compile(r"[A-Za-z0-9_+/-]{22}(==)?")  # 16 bytes in Base64, of either alphabet.


class Positions:
    """A group's positions, in the database of its effects. `write` is for one thread at a time."""

    def __init__(self, settings: Settings, group: str) -> None:
        """Nothing is connected yet."""
        self._settings = settings
        self._group = group
        self._read, self._move, self._patience = (
            statement("inbox", name, settings.table) for name in ("positions", "move_positions", "patience")
        )
        self._written: Mapping[TopicPartition, PartitionPosition] = {}

    def read(self, connection: psycopg.Connection[Any], topic_ids: Mapping[str, str]) -> dict[TopicPartition, int]:
        """The group's positions in the topics with these names and ids.

        Raises:
            psycopg.Error: as psycopg says it.
        """
        asked = {"group": self._group, "topics": [*topic_ids], "topic_ids": [*topic_ids.values()]}
        with connection.transaction():
            connection.execute(self._patience, {"milliseconds": LOCK_MILLISECONDS})
            rows = connection.execute(self._read, asked).fetchall()
        return {TopicPartition(topic, partition): offset for topic, partition, offset in rows}

    def read_now(self, topic_ids: Mapping[str, str]) -> dict[TopicPartition, int]:
        """As `read`, on a connection of its own."""
        with closing(connect(self._settings, purpose="outbox inbox (positions)")) as connection:
            return self.read(connection, topic_ids)

    def write(self, connection: psycopg.Connection[Any], positions: Mapping[TopicPartition, PartitionPosition]) -> None:
        """Write all positions, if any of them has changed since they were last written.

        All, as another process, which had a partition before, may have written late.

        Raises:
            psycopg.Error: as psycopg says it.
        """
        if not positions or positions == self._written:
            return
        moved = {
            "group": self._group,
            "topics": [topic for topic, _ in positions],
            "partitions": [partition for _, partition in positions],
            "topic_ids": [position.topic_id for position in positions.values()],
            "next_offsets": [position.next_offset for position in positions.values()],
        }
        with connection.transaction():
            connection.execute(self._patience, {"milliseconds": LOCK_MILLISECONDS})
            connection.execute(self._move, moved)
        self._written = positions

    def write_last(self, positions: Mapping[TopicPartition, PartitionPosition]) -> None:
        """As `write`, on a connection of its own; without the database, where they were last written stands."""
        if not positions or positions == self._written:
            return
        try:
            with closing(connect(self._settings, purpose="outbox inbox (positions)")) as connection:
                self.write(connection, positions)
        except psycopg.Error as error:
            logger.warning("the last positions were not written: %s", one_line(error))


def start_offsets(
    positions: Positions,
    consumer: Consumer,
    partitions: Sequence[KafkaTopicPartition],
    look_up: Callable[[], Mapping[str, str]],
    stop: threading.Event,
) -> dict[TopicPartition, int] | None:
    """Where to go on in `partitions`, for those where the group has been before; None: `stop` was set first.

    Waits until Postgres and Kafka have answered for every partition: to go on without them could repeat what is
    forgotten. Where that takes longer than `max.poll.interval.ms`, Kafka gives the partitions to another member.

    Args:
        positions: the group's own.
        consumer: a member of the group, which knows its committed offsets.
        partitions: those that were assigned.
        look_up: asks Kafka for the ids of their topics; returns those that it has said now.
        stop: set where nothing will be handled any more.
    """
    while not stop.is_set():
        topic_ids = look_up()
        try:
            ours = positions.read_now(topic_ids)
            asked = [KafkaTopicPartition(each.topic, each.partition) for each in partitions]
            committed = consumer.committed(asked, ANSWER_SECONDS)
        except psycopg.Error as error:
            logger.warning("the partitions that were assigned wait for Postgres: %s", one_line(error))
        except KafkaException as error:
            logger.warning("the partitions that were assigned wait for Kafka: %s", error.args[0].str())
        else:
            silent = {each.topic for each in partitions} - topic_ids.keys()
            silent |= {each.topic for each in committed if each.error is not None}
            if not silent:
                theirs = {
                    TopicPartition(each.topic, each.partition): each.offset
                    for each in committed
                    if _counts_in(topic_ids[each.topic], each.metadata)
                }
                return _greater((TopicPartition(each.topic, each.partition) for each in partitions), theirs, ours)
            logger.warning(
                "the partitions that were assigned wait until Kafka says the ids and the committed offsets of %s",
                ", ".join(sorted(silent)),
            )
        stop.wait(TROUBLE_SECONDS)
    return None


def _counts_in(topic_id: str, metadata: str | None) -> bool:
    """Whether an offset that was committed with this metadata counts in the topic: it names no other topic's id."""
    return metadata == topic_id or _TOPIC_ID.fullmatch(metadata or "") is None


def _greater(
    partitions: Iterable[TopicPartition], theirs: Mapping[TopicPartition, int], ours: Mapping[TopicPartition, int]
) -> dict[TopicPartition, int]:
    """Of each place the greater offset; librdkafka's negative ones mean that there is none."""
    found = {tp: max(theirs.get(tp, -1), ours.get(tp, -1)) for tp in partitions}
    return {tp: offset for tp, offset in found.items() if offset >= 0}
