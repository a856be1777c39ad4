"""An inbox is ready where it makes progress or has nothing to do: each rule, at its threshold and past it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outbox_plugin.core.readiness import NotReady, Ready
from outbox_plugin.inbox.inbox_readiness import (
    ALIVE_SECONDS,
    DONE_SECONDS,
    KAFKA_SECONDS,
    POLLED_SECONDS,
    POSTGRES_SECONDS,
    DispatcherFacts,
    InboxFacts,
    is_alive,
    readiness,
)

NOW = 1_000.0
WELL = InboxFacts(polled_at=NOW, postgres_at=NOW, kafka_at=NOW, positions_at=NOW, partitions=1)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (WELL, "idle"),
        (replace(WELL, partitions=0), "has no partitions"),
        (replace(WELL, dispatcher=DispatcherFacts(NOW, NOW)), "handles records"),
        (replace(WELL, polled_at=NOW - POLLED_SECONDS), "idle"),
        (replace(WELL, postgres_at=NOW - POSTGRES_SECONDS, postgres_error="gone"), "idle"),
        (replace(WELL, kafka_at=NOW - KAFKA_SECONDS, kafka_error="gone"), "idle"),
        (replace(WELL, positions_at=NOW - DONE_SECONDS), "idle"),
        (replace(WELL, dispatcher=DispatcherFacts(NOW - DONE_SECONDS, NOW - DONE_SECONDS)), "handles records"),
    ],
)
def test_who_makes_progress_is_ready(facts: InboxFacts, reason: str) -> None:
    assert readiness(facts, NOW) == Ready(reason)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (InboxFacts(), "the inbox is starting"),
        (replace(WELL, polled_at=NOW - POLLED_SECONDS - 1), "it has not polled for 31 s"),
        (replace(WELL, postgres_at=None), "Postgres has not answered yet"),
        (replace(WELL, postgres_at=NOW - POSTGRES_SECONDS - 1), "Postgres has not answered for 16 s"),
        (
            replace(WELL, postgres_at=NOW - POSTGRES_SECONDS - 1, postgres_error="gone"),
            "Postgres has not answered for 16 s: gone",
        ),
        (replace(WELL, kafka_at=None, kafka_error="gone"), "Kafka has not answered yet: gone"),
        (replace(WELL, kafka_at=NOW - KAFKA_SECONDS - 1), "Kafka has not answered for 16 s"),
        (
            replace(WELL, positions_at=NOW - DONE_SECONDS - 1),
            "partitions have waited for their positions for 61 s",
        ),
        (
            replace(WELL, dispatcher=DispatcherFacts(NOW - DONE_SECONDS - 1, NOW)),
            "a handler has not finished for 61 s",
        ),
        (
            replace(WELL, dispatcher=DispatcherFacts(None, NOW - DONE_SECONDS - 1)),
            "none of the records that wait was done for 61 s",
        ),
    ],
)
def test_who_makes_none_is_not(facts: InboxFacts, reason: str) -> None:
    assert readiness(facts, NOW) == NotReady(reason)


@pytest.mark.parametrize(
    ("runs", "polled_at", "alive"),
    [
        (True, None, True),
        (True, NOW - ALIVE_SECONDS, True),
        (True, NOW - ALIVE_SECONDS - 1, False),
        (False, NOW, False),
    ],
)
def test_alive_is_who_polls(runs: bool, polled_at: float | None, alive: bool) -> None:
    assert is_alive(runs=runs, polled_at=polled_at, now=NOW) is alive
