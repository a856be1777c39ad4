"""What tests of handlers that use an object-relational mapper share: the events, and how their effects are seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg

from outbox_plugin import Settings
from outbox_plugin.inbox import Inbox, Received, Retry
from outbox_plugin.inbox.dead_letters import DeadLetters
from tests.inbox_support import query
from tests.integration.test_inbox_faults import letters, numbered
from tests.support import eventually

EVENTS = 60
GUILTY = set(range(0, EVENTS, 10))


class Misuse(Exception):
    """What a handler fails by."""


def name(event: Received) -> str:
    """What a handler writes for an event."""
    return str(event.idempotency_key)


def effects(settings: Settings) -> list[str]:
    """What handlers have written."""
    return [event for (event,) in query(settings, "SELECT event FROM order_effect ORDER BY event")]


def are_all_ended(settings: Settings) -> bool:
    """Whether each event has its effect, or is a dead letter."""
    return len(effects(settings)) + len(letters(settings)) >= EVENTS


def handle_all(
    settings: Settings,
    topic: str,
    group: str,
    handler: Callable[[psycopg.Connection[Any], Received], None],
    seconds: float = 30,
) -> list[str]:
    """Send the events, of which some are guilty, and let an inbox handle them.

    Args:
        settings: of the inbox.
        topic: where the events are sent to.
        group: the inbox's.
        handler: the inbox's.
        seconds: how long that may take.

    Returns:
        What the handler writes for each of the events.
    """
    sent = numbered(settings, topic, GUILTY, EVENTS)
    with Inbox(settings, group=group, topics=[topic], handler=handler, retry=Retry(attempts=1)):
        eventually(lambda: are_all_ended(settings), seconds)
    return sent


def check_effects(settings: Settings, sent: list[str]) -> None:
    """Check that each event has one effect and one emitted event, or is a dead letter, as the guilty are."""
    good = sorted(set(sent) - set(letters(settings)))
    assert len(good) == EVENTS - len(GUILTY)
    assert effects(settings) == good
    assert sorted(key for (key,) in query(settings, "SELECT kafka_key FROM outbox")) == good
    assert all("Misuse" in letter.error for letter in DeadLetters(settings).list())
