"""Where a group goes on when Kafka has forgotten it.

Brokers drop the committed offsets of a group that has had no member for `offsets.retention.minutes` (7 days). Such a
group would read its topics from the beginning, and events whose keys are forgotten would have their effects again. So
an inbox also writes its positions to its own database, about once a second and when it ends.

A position may lag: events that were handled after it was written are known by their keys. The greater of the committed
offset and our position counts, so an operator can still skip records. Each counts only in the topic in which it was
reached, by the topic's id, because a topic that was made anew has other records at the same offsets. An inbox commits
the topic's id as the offset's metadata. An offset with other metadata or none, as an operator or another consumer
commits it, counts in every topic of that name.
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

LOCK_MILLISECONDS = 1_000  # How long a stop waits for a lock on the table.
ANSWER_SECONDS = 10.0
TROUBLE_SECONDS = 1.0
_TOPIC_ID = re.compile(r"[A-Za-z0-9_+/-]{22}(==)?")  # 16 bytes in Base64, of either alphabet.


class Positions:
    """A group's positions, in the database of its effects. Only one thread at a time may write."""

    def __init__(self, settings: Settings, group: str) -> None:
        """Prepare the statements; nothing is connected yet."""
        self._settings = settings
        self._group = group
        self._read, self._move, self._patience = (
            statement("inbox", name, settings.table) for name in ("positions", "move_positions", "patience")
        )
        self._written: Mapping[TopicPartition, PartitionPosition] = {}

    def read(self, connection: psycopg.Connection[Any], topic_ids: Mapping[str, str]) -> dict[TopicPartition, int]:
        """Return the group's positions in topics.

        Raises:
            psycopg.Error: as psycopg says it.
        """
        asked = {"group": self._group, "topics": [*topic_ids], "topic_ids": [*topic_ids.values()]}
        with connection.transaction():
            connection.execute(self._patience, {"milliseconds": LOCK_MILLISECONDS})
            rows = connection.execute(self._read, asked).fetchall()
        return {TopicPartition(topic, partition): offset for topic, partition, offset in rows}

    def read_now(self, topic_ids: Mapping[str, str]) -> dict[TopicPartition, int]:
        """Return the group's positions in topics, by their names and ids, read on a new connection."""
        with closing(connect(self._settings, purpose="outbox inbox (positions)")) as connection:
            return self.read(connection, topic_ids)

    def write(self, connection: psycopg.Connection[Any], positions: Mapping[TopicPartition, PartitionPosition]) -> None:
        """Write all positions, if any has changed since the last call.

        It writes those that have not changed, too: a process that had a partition before may have written late.

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
        """Write all positions on a new connection; if the database is away, the last ones that were written stay."""
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
    """Return the offsets at which to go on, for partitions where the group has been before; None if `stop` is set.

    Waits until Postgres and Kafka have answered for every partition: without their answers, events whose keys are
    forgotten could have their effects again. If that takes longer than `max.poll.interval.ms`, Kafka gives the
    partitions to another member.

    Args:
        positions: the group's positions in Postgres.
        consumer: a member of the group, which knows its committed offsets.
        partitions: the partitions that were assigned.
        look_up: asks Kafka for the ids of their topics, and returns those that it got.
        stop: is set when the inbox stops.
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
            unanswered = {each.topic for each in partitions} - topic_ids.keys()
            unanswered |= {each.topic for each in committed if each.error is not None}
            if not unanswered:
                theirs = {
                    TopicPartition(each.topic, each.partition): each.offset
                    for each in committed
                    if _is_for_topic(topic_ids[each.topic], each.metadata)
                }
                return _greater((TopicPartition(each.topic, each.partition) for each in partitions), theirs, ours)
            logger.warning(
                "the partitions that were assigned wait until Kafka returns the ids and the committed offsets of %s",
                ", ".join(sorted(unanswered)),
            )
        stop.wait(TROUBLE_SECONDS)
    return None


def _is_for_topic(topic_id: str, metadata: str | None) -> bool:
    """Whether a committed offset counts in the topic: its metadata is not the id of another topic."""
    return metadata == topic_id or _TOPIC_ID.fullmatch(metadata or "") is None


def _greater(
    partitions: Iterable[TopicPartition], theirs: Mapping[TopicPartition, int], ours: Mapping[TopicPartition, int]
) -> dict[TopicPartition, int]:
    """Return the greater offset of each partition; librdkafka's negative offsets mean that there is none."""
    found = {tp: max(theirs.get(tp, -1), ours.get(tp, -1)) for tp in partitions}
    return {tp: offset for tp, offset in found.items() if offset >= 0}
