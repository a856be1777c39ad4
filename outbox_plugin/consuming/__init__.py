"""Consumes ranges of a topic: the effects of a range and the position after it are committed together in Postgres.

So a range has its effects once, however often it is retried, run again, or run by two at once. `core/ranges.py` says
which part of a range is still to be consumed.

    positions   where a consumer stands, in Postgres
    topics      where a topic begins and ends, in Kafka
    records     a range's records, read in this process
    consume     a range with a handler, in this process
    spark       a range, or a stream's batch, with Spark; imported by its own name, as it needs Spark
"""

from __future__ import annotations

from outbox_plugin.consuming.consume import Consumed, consume_range
from outbox_plugin.consuming.positions import set_position
from outbox_plugin.core.ranges import TopicRange
from outbox_plugin.inbox.received import Received

__all__ = ["Consumed", "Received", "TopicRange", "consume_range", "set_position"]
