"""Consumes ranges of a topic: the effects of a range and the position after it are committed together in Postgres.

So a range has its effects once, however often it is retried, run again, or run by two at once. `core/topic_ranges.py`
decides which part of a range has not been consumed yet.

    positions   each consumer's position, in Postgres
    topic_state where a topic begins and ends, in Kafka
    records     a range's records, read in this process
    consume     a range with a handler, in this process
    spark       a range, or a stream's batch, with Spark; import it by its own name, because it needs Spark
"""

from __future__ import annotations

from outbox_plugin.consuming.consume import Consumed, consume_range
from outbox_plugin.consuming.positions import set_position
from outbox_plugin.core.topic_ranges import TopicRange
from outbox_plugin.inbox.received import Received

__all__ = ["Consumed", "Received", "TopicRange", "consume_range", "set_position"]
