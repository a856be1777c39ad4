"""Where a group goes on when Kafka has forgotten it.

Brokers drop the committed offsets of a group that has had no member for `offsets.retention.minutes` (7 days). Such a
group would read its topics from the beginning, and events whose keys are forgotten would have their effects again. So
an inbox also writes its positions to its own database, about once a second and when it ends.

Both may lag: events that were handled after they were written are known by their keys. Each counts only in the topic
in which it was reached, by the topic's id, because a topic that was recreated has other records at the same offsets.

Beside the offset, a row has the positions with leader epochs that the group has reached (`leader_epochs`): the present
one, and those from before a truncation while the partition is read again. They are kept by the topic's id, because an
inbox of an earlier version moves the offset and leaves them as they are.

    the committed offset                        what counts
    has the topic's id as metadata              the committed offset
    has other metadata or none                  the greater of it and our position
    has the id of another topic, or is gone     our position

An inbox commits the topic's id as the metadata, and with it the leader epoch of the record before the offset, which
shows whether the partition was truncated. Our position would hide a truncation if it counted whenever it is greater:
Kafka may be away while handlers go on. It then tells which old records were handled. An offset without our metadata is
an operator's or another consumer's. It can skip records, in every topic of that name.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import psycopg
from confluent_kafka import Consumer, KafkaException
from confluent_kafka import TopicPartition as KafkaTopicPartition

from outbox_plugin.core.leader_epochs import GroupPosition, HandledPosition
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.inbox.handover import handover_locks
from outbox_plugin.printable import logger_of, one_line
from outbox_plugin.schema.connection import connect
from outbox_plugin.schema.statements import statement
from outbox_plugin.settings import Settings

logger = logger_of("outbox_plugin.inbox")

LOCK_MILLISECONDS = 1_000  # How long a stop waits for a lock on the table.
ANSWER_SECONDS = 10.0
_TOPIC_ID = re.compile(r"[A-Za-z0-9_+/-]{22}(==)?")  # 16 bytes in Base64, of either alphabet.

# None stands for the beginning of a partition.
FoundPositions = Mapping[TopicPartition, GroupPosition | None]


class PositionInTopic(NamedTuple):
    """Where a group is in a partition, of the topic with this id."""

    topic_id: str
    position: GroupPosition


PartitionPositions = Mapping[TopicPartition, PositionInTopic]


class Positions:
    """A group's positions, in the database of its effects. Any thread may write."""

    def __init__(self, settings: Settings, group: str) -> None:
        """Prepare the statements; nothing is connected yet."""
        self._settings = settings
        self._group = group
        self._read, self._move, self._patience, self._still_handled = (
            statement("inbox", name, settings.table)
            for name in ("positions", "move_positions", "patience", "still_handled")
        )
        self._writing = threading.Lock()  # So that positions that were reached later are written later.
        self._written: PartitionPositions = {}

    def read(
        self, connection: psycopg.Connection[Any], topic_ids: Mapping[str, str]
    ) -> dict[TopicPartition, GroupPosition]:
        """Return the group's positions in topics.

        Raises:
            psycopg.Error: as psycopg says it.
        """
        asked = {"group": self._group, "topics": [*topic_ids], "topic_ids": [*topic_ids.values()]}
        with connection.transaction():
            connection.execute(self._patience, {"milliseconds": LOCK_MILLISECONDS})
            rows = connection.execute(self._read, asked).fetchall()
        return {
            TopicPartition(topic, partition): _position(offset, json.loads(known))
            for topic, partition, offset, known in rows
        }

    def read_now(self, topic_ids: Mapping[str, str]) -> dict[TopicPartition, GroupPosition]:
        """Return the group's positions in topics, by their names and ids, read on a new connection."""
        with closing(connect(self._settings, purpose="outbox inbox (positions)")) as connection:
            return self.read(connection, topic_ids)

    def still_handled(self, partitions: Collection[TopicPartition]) -> set[TopicPartition]:
        """Return the partitions whose records are still being handled by an inbox that has left the group.

        Raises:
            psycopg.Error: as psycopg says it.
        """
        asked = handover_locks(self._settings.table, self._group, partitions)
        with closing(connect(self._settings, purpose="outbox inbox (handover)")) as connection:
            return {TopicPartition(*row) for row in connection.execute(self._still_handled, asked).fetchall()}

    def write(
        self, connection: psycopg.Connection[Any], reached: Callable[[], PartitionPositions], *, unchanged: bool = True
    ) -> None:
        """Write all positions that `reached` returns: a process that had a partition before may have written late.

        Args:
            connection: to the database.
            reached: returns the positions.
            unchanged: whether to write them even if none has changed since the last call.

        Raises:
            psycopg.Error: as psycopg says it.
        """
        with self._writing:
            if unchanged or reached() != self._written:
                self._move_to(connection, reached())

    def write_now(self, reached: Callable[[], PartitionPositions]) -> bool:
        """Write all positions on a new connection. Returns False if the database is away: the last ones stay.

        It does not wait for long where another thread writes them, so that the inbox goes on polling.
        """
        if not reached():
            return True
        if not self._writing.acquire(timeout=ANSWER_SECONDS):
            logger.warning("positions were not written: Postgres has not answered another thread that writes them")
            return False
        try:
            with closing(connect(self._settings, purpose="outbox inbox (positions)")) as connection:
                self._move_to(connection, reached())
        except psycopg.Error as error:
            logger.warning("positions were not written: %s", one_line(error))
            return False
        finally:
            self._writing.release()
        return True

    def _move_to(self, connection: psycopg.Connection[Any], positions: PartitionPositions) -> None:
        if not positions:
            return
        moved = {
            "group": self._group,
            "topics": [topic for topic, _ in positions],
            "partitions": [partition for _, partition in positions],
            "topic_ids": [each.topic_id for each in positions.values()],
            "next_offsets": [each.position.next_offset for each in positions.values()],
            "leader_epochs": [json.dumps({each.topic_id: _known(each.position)}) for each in positions.values()],
        }
        with connection.transaction():
            connection.execute(self._patience, {"milliseconds": LOCK_MILLISECONDS})
            connection.execute(self._move, moved)
        self._written = positions


def _known(position: GroupPosition) -> list[HandledPosition]:
    """What is written of a position beside its offset: the positions that have an epoch, with their epochs."""
    here = [] if position.leader_epoch is None else [HandledPosition(position.next_offset, position.leader_epoch)]
    return [*here, *position.handled]


def _position(next_offset: int, known: Iterable[Sequence[int]]) -> GroupPosition:
    """Read a position. An inbox of an earlier version may have moved the offset alone: then it has no epoch."""
    reached = [HandledPosition(*each) for each in known]
    epochs = [each.leader_epoch for each in reached if each.next_offset == next_offset]
    return GroupPosition(next_offset, max(epochs, default=None)).and_handled(GroupPosition(0, None, tuple(reached)))


def find_positions(
    positions: Positions,
    consumer: Consumer,
    partitions: Collection[TopicPartition],
    look_up: Callable[[Collection[str]], Mapping[str, str]],
) -> FoundPositions:
    """Return where to go on in partitions: None stands for the beginning, where the group has not been before.

    A partition for which Postgres or Kafka has not answered is left out; ask again later. Without their answers, events
    whose keys are forgotten could have their effects again. A partition is left out, too, while an inbox that has left
    the group still handles its records.

    Args:
        positions: the group's positions in Postgres.
        consumer: a member of the group, which knows its committed offsets.
        partitions: the partitions.
        look_up: asks Kafka for the ids of topics, and returns those that it got.
    """
    topic_ids = look_up({tp.topic for tp in partitions})
    answered = [tp for tp in partitions if tp.topic in topic_ids]
    try:
        if busy := positions.still_handled(answered):
            logger.info("%d partitions wait for the handlers of an inbox that stops", len(busy))
        answered = [tp for tp in answered if tp not in busy]
        ours = positions.read_now(topic_ids)
        asked = [KafkaTopicPartition(*tp) for tp in answered]
        committed = consumer.committed(asked, ANSWER_SECONDS) if asked else []
    except psycopg.Error as error:
        logger.warning("partitions that were assigned wait for Postgres: %s", one_line(error))
        return {}
    except KafkaException as error:
        logger.warning("partitions that were assigned wait for Kafka: %s", error.args[0].str())
        return {}
    theirs = {TopicPartition(each.topic, each.partition): each for each in committed if each.error is None}
    if silent := {*partitions} - theirs.keys() - busy:
        logger.warning(
            "partitions that were assigned wait until Kafka returns the ids and the committed offsets of %s",
            ", ".join(sorted({tp.topic for tp in silent})),
        )
    return {
        tp: start_position(
            GroupPosition(each.offset, each.leader_epoch), each.metadata, topic_ids[tp.topic], ours.get(tp)
        )
        for tp, each in theirs.items()
    }


def start_position(
    committed: GroupPosition, metadata: str | None, topic_id: str, ours: GroupPosition | None
) -> GroupPosition | None:
    """Return where to go on in a partition; None for its beginning, where the group has not been before.

    Args:
        committed: Kafka's committed offset; a negative one stands for none.
        metadata: the committed offset's metadata.
        topic_id: the id of the partition's topic.
        ours: the position in Postgres, of this topic; None if there is none.
    """
    if committed.next_offset < 0 or (metadata != topic_id and _TOPIC_ID.fullmatch(metadata or "")):
        return ours
    if metadata == topic_id:
        return committed.and_handled(ours)
    if ours is not None and ours.next_offset >= committed.next_offset:
        return ours
    # Another consumer may commit an offset behind a transaction marker, which an epoch would let seem to be a
    # truncation.
    return GroupPosition(committed.next_offset).and_handled(ours)
