"""Notices offsets that Kafka has deleted before an inbox has read them.

The inbox was stopped for longer than the topic's retention, or is too slow. librdkafka goes on at the first record that
is left, and says nothing that a program could notice. A gap between two records proves nothing: transaction markers,
aborted records and compaction leave gaps, too. What is missing below the low watermark was deleted.

A single offset does not count: as a rule, it is the marker behind the last record that was read. Several markers can
stand there, if several transactions have ended. While an inbox runs, it knows that it has passed them, because
librdkafka tells the offset at which it has reached the end of the partition. An inbox that starts does not know it.
"""

from __future__ import annotations

from collections.abc import Callable

from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.inbox.events import Observer, OffsetsDeletedUnread, ignore
from outbox_plugin.printable import logger_of

logger = logger_of("outbox_plugin.inbox")

MIN_OFFSETS = 2  # Fewer are not counted.


class UnreadDeletions:
    """Compares what an inbox reads with the low watermark. Only the thread that polls may use it."""

    def __init__(self, low_watermark: Callable[[TopicPartition], int], observe: Observer = ignore) -> None:
        """Nothing was read yet.

        Args:
            low_watermark: returns the offset at which a partition began when it was last fetched; negative if unknown.
            observe: is called with what was deleted.
        """
        self._low_watermark = low_watermark
        self._observe = observe
        self._next: dict[TopicPartition, int] = {}  # The first offset that is not read.

    def start(self, tp: TopicPartition, next_offset: int | None) -> None:
        """Expect the records of a partition from an offset on; None, or 0, stands for its beginning."""
        if next_offset:
            self._next[tp] = next_offset
        else:
            self._next.pop(tp, None)

    def reached(self, tp: TopicPartition, offset: int, next_offset: int) -> None:
        """Log and count what was deleted before a record was read, or before the end of the partition was reached.

        Args:
            tp: the partition.
            offset: the record's, or the end.
            next_offset: the first offset that is not read now.
        """
        expected, self._next[tp] = self._next.get(tp), next_offset
        if expected is None or offset - expected < MIN_OFFSETS:
            return
        low_watermark = self._low_watermark(tp)
        if (deleted := min(low_watermark, offset) - expected) < MIN_OFFSETS:
            return
        logger.warning(
            "%s [%d]: %d offsets were deleted before this group read them: it was at %d, and the partition begins at "
            "%d. Their events are not handled (of a few offsets, all may be transaction markers). Kafka kept the "
            "records for less time than the inbox was behind: keep them longer (retention.ms, retention.bytes), or "
            "let the inbox catch up sooner. `outbox replay` emits events again that the outbox has kept",
            *tp,
            deleted,
            expected,
            low_watermark,
        )
        self._observe(OffsetsDeletedUnread(tp.topic, deleted))
