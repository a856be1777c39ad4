"""Where Kafka does not say in time where a topic begins and ends, the error says which setting names Kafka."""

from __future__ import annotations

import pytest

from outbox_plugin import Settings
from outbox_plugin.consuming.topic_state import topic_state
from outbox_plugin.errors import LogUnavailable

SETTINGS = Settings(dsn="postgresql://127.0.0.1:1/db", bootstrap_servers="127.0.0.1:1")


@pytest.mark.parametrize("seconds", [0.0, 0.2, 0.5])
def test_a_late_answer_is_told_with_the_setting(seconds: float) -> None:
    with pytest.raises(LogUnavailable, match=r"^Kafka, as OUTBOX_BOOTSTRAP_SERVERS names it \(127\.0\.0\.1:1\): "):
        topic_state(SETTINGS, "orders", seconds)
