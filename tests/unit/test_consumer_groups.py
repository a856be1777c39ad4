"""A group's name reaches Kafka as it is, or is refused: two groups must not share the records of one."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import Consumer

from outbox_plugin import Settings, coordination
from outbox_plugin.adapters.kafka_clients import is_group_name
from outbox_plugin.errors import UserError
from outbox_plugin.inbox import Inbox

SETTINGS = Settings(dsn="postgresql://127.0.0.1:1/db", bootstrap_servers="127.0.0.1:1")
QUIET: dict[str, Any] = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0, "error_cb": lambda _: None}


@pytest.mark.parametrize("group", ["billing", "billing ", "ä", "a\nb", " billing", "\tbilling", "\nbilling"])
def test_only_a_name_that_the_client_takes_as_it_is_is_whole(group: str) -> None:
    with closing(Consumer({**QUIET, "group.id": group})) as consumer:
        taken = bytes(consumer.consumer_group_metadata())
    assert is_group_name(group) == (group.encode() in taken)


@pytest.mark.parametrize("group", [" ", "\n", " billing"])
def test_a_group_that_the_client_would_not_take_as_it_is_is_refused(group: str) -> None:
    """Of white space alone, it would end the process."""
    with pytest.raises(UserError, match="expected a group that begins with no white space"):
        Inbox(SETTINGS, group=group, topics=["orders"], handler=lambda *_: None)
    with pytest.raises(UserError, match="group_id: expected a name that begins with no white space"):
        coordination.Consumer(["orders"], group, "one", bootstrap_servers="127.0.0.1:1")
