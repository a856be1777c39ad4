"""Why a running client cannot connect is logged, and not a hundred times a second."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, TopicCollection

from outbox_plugin import Settings
from outbox_plugin.adapters import kafka_connection_warnings
from outbox_plugin.adapters.kafka_admin import KafkaAdmin
from outbox_plugin.adapters.kafka_connection_warnings import WARN_SECONDS, ConnectionWarnings
from tests.support import eventually


def test_each_reason_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(kafka_connection_warnings, "time", SimpleNamespace(monotonic=lambda: now[0]))
    warn = ConnectionWarnings(logging.getLogger("outbox_plugin.inbox"))
    for _ in range(3):
        for code in (KafkaError._SSL, KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT):
            warn(KafkaError(code, f"code {code}"))
    assert [each.getMessage() for each in caplog.records] == [
        f"Kafka, while consuming: code {code}" for code in (KafkaError._SSL, KafkaError._ALL_BROKERS_DOWN)
    ]
    now[0] = WARN_SECONDS
    warn(KafkaError(KafkaError._SSL, "again"))
    assert caplog.records[-1].getMessage() == "Kafka, while consuming: again"


def test_what_an_admin_client_has_to_say_does_not_pile_up_while_kafka_is_away() -> None:
    """An inbox asks for its topics' ids once a second, for as long as it runs."""
    admin: Any = KafkaAdmin(Settings(dsn="postgresql://x", bootstrap_servers="127.0.0.1:1"))
    try:
        admin.client.describe_topics(TopicCollection(["orders"]), request_timeout=30)
        eventually(lambda: len(admin._client) > 20, 30)
        assert len(admin.client) < 20
    finally:
        admin.close()
