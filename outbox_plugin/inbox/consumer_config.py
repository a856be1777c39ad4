"""The configuration of an inbox's Kafka consumer."""

from __future__ import annotations

from typing import Any

from outbox_plugin.adapters.kafka_clients import client_config
from outbox_plugin.adapters.kafka_connection_warnings import ConnectionWarnings
from outbox_plugin.printable import logger_of
from outbox_plugin.settings import Settings

logger = logger_of("outbox_plugin.inbox")

SESSION_TIMEOUT_MS = 6_000  # Kafka gives a killed process's partitions to others after this time.
QUEUED_KILOBYTES = 16_384  # What librdkafka may fetch ahead. Its own default is 64 MB.


def consumer_config(settings: Settings, group: str) -> dict[str, Any]:
    """Return librdkafka's configuration for a member of the consumer group `group`."""
    config = client_config(
        settings,
        group_id=group,
        isolation_level="read_committed",
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        session_timeout_ms=SESSION_TIMEOUT_MS,
        heartbeat_interval_ms=1_000,
        topic_metadata_refresh_interval_ms=5_000,
        fetch_wait_max_ms=100,
        queued_max_messages_kbytes=QUEUED_KILOBYTES,
        fetch_max_bytes=QUEUED_KILOBYTES * 1_024,  # One answer of a broker can exceed the queue by so much.
    )
    # The inbox's callbacks need the first two, and it must know that it has passed transaction markers at the end of a
    # partition. So OUTBOX_KAFKA cannot change them.
    return config | {
        "partition.assignment.strategy": "cooperative-sticky",
        "enable.auto.offset.store": False,
        "enable.partition.eof": True,
        "error_cb": ConnectionWarnings(logger),
    }
