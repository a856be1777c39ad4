"""What was deleted before it was read is told from other gaps by the low watermark."""

from __future__ import annotations

import pytest
from confluent_kafka import OFFSET_INVALID

from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.inbox.events import InboxEvent, OffsetsDeletedUnread
from outbox_plugin.inbox.unread_deletions import UnreadDeletions

PARTITION = TopicPartition("orders", 0)


@pytest.mark.parametrize(
    ("start", "offset", "low_watermark", "deleted"),
    [
        (10, 15, 15, 5),  # Librdkafka went on at the first record that is left.
        (10, 17, 15, 5),  # That is followed by a gap of another kind.
        (10, 15, 90, 5),  # More was deleted since the record was fetched.
        (10, 15, 10, 0),  # Transaction markers, aborted records, compaction.
        (10, 15, 4, 0),
        (10, 11, 11, 0),  # Perhaps the marker behind the last record.
        (10, 10, 90, 0),
        (10, 9, 90, 0),  # The last record is fetched again, and compared.
        (10, 15, OFFSET_INVALID, 0),
        (None, 15, 15, 0),  # The group has not been here.
        (0, 15, 15, 0),  # Nor has it if that is its position.
    ],
)
def test_what_is_missing_below_the_low_watermark_was_deleted(
    start: int | None, offset: int, low_watermark: int, deleted: int
) -> None:
    observed: list[InboxEvent] = []
    unread = UnreadDeletions(lambda _: low_watermark, observed.append)
    unread.start(PARTITION, start)
    unread.reached(PARTITION, offset, offset + 1)
    unread.reached(PARTITION, offset + 1, offset + 2)
    assert observed == ([OffsetsDeletedUnread("orders", deleted)] if deleted else [])


def test_what_stands_before_the_end_that_was_reached_was_passed() -> None:
    observed: list[InboxEvent] = []
    low_watermark = 0
    unread = UnreadDeletions(lambda _: low_watermark, observed.append)
    unread.start(PARTITION, 10)
    unread.reached(PARTITION, 14, 14)
    low_watermark = 14
    unread.reached(PARTITION, 14, 15)
    assert observed == []


def test_a_partition_that_is_read_from_its_beginning_again_misses_nothing() -> None:
    observed: list[InboxEvent] = []
    unread = UnreadDeletions(lambda _: 50, observed.append)
    unread.start(PARTITION, 10)
    unread.start(PARTITION, None)
    unread.reached(PARTITION, 50, 51)
    assert observed == []
