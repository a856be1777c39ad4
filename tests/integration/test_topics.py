"""Topics that are not there, or are not for events: their rows wait or are put aside, and nobody else notices."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

from outbox_plugin import Harvester, Settings, operate
from outbox_plugin.adapters import writable_topics
from outbox_plugin.relay.events import HarvestEvent, TermBegan, TermFinished
from outbox_plugin.schema.migrate import migrate
from tests.harvesting import backlog, by_key, consume, create_topic, drained, insert
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.integration


@pytest.fixture(params=["exactly-once", "at-least-once"])
def either(settings: Settings, request: pytest.FixtureRequest) -> Settings:
    return settings.model_copy(update={"delivery": request.param})


@contextmanager
def leading(settings: Settings) -> Iterator[list[HarvestEvent]]:
    """A harvester that leads when the body begins, and never loses a term in it."""
    events: list[HarvestEvent] = []
    with Harvester(settings, observe=events.append):
        eventually(lambda: any(isinstance(event, TermBegan) for event in events), 30)
        yield events
        assert not [event for event in events if isinstance(event, TermFinished)]


def left_after(settings: Settings, topic: str) -> float:
    """Seconds until no row of `topic` waits."""
    began = time.monotonic()
    with psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection:

        def left() -> bool:
            return not connection.execute("SELECT 1 FROM outbox WHERE kafka_topic = %s", (topic,)).fetchone()

        eventually(left, 60)
    return time.monotonic() - began


def test_eight_missing_topics_cost_a_good_row_nothing(
    either: Settings, strict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writable_topics, "UNKNOWN_TOPIC_SECONDS", 10.0)  # A busy machine is slow, too.
    settings = either.model_copy(update={"bootstrap_servers": strict})
    there = create_topic(settings, f"{settings.group}-there")
    with leading(settings):
        for number in range(8):
            insert(settings, f"{settings.group}-missing-{number}", [("k", "1"), ("k", "2")])
        insert(settings, there, [("k", "1")])
        assert left_after(settings, there) < 8.0
        eventually(lambda: len(operate.parked_keys(settings)) == 8, 30)
        assert all(parked_key.key is None for parked_key in operate.parked_keys(settings))
        found = create_topic(settings, f"{settings.group}-missing-3")
        operate.release(settings)
        eventually(lambda: backlog(settings) == 14, 30)
    assert by_key(consume(settings, found)) == {"k": ["1", "2"]}


@pytest.mark.slow
def test_ever_new_names_starve_nobody(either: Settings, strict: str) -> None:
    settings = either.model_copy(update={"bootstrap_servers": strict})
    there = create_topic(settings, f"{settings.group}-there")
    done = threading.Event()
    written = 0

    def write() -> None:
        nonlocal written
        with psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection:
            while not done.wait(0.1):
                connection.execute(
                    "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value) "
                    "SELECT 'never-' || i, 'k', 'v' FROM generate_series(%s::int, %s::int) AS i",
                    (written, written + 19),
                )
                written += 20

    with leading(settings):
        writer = threading.Thread(target=write)
        writer.start()
        try:
            slowest = 0.0
            for number in range(16):
                insert(settings, there, [("k", str(number))])
                slowest = max(slowest, left_after(settings, there))
                time.sleep(0.2)
        finally:
            done.set()
            writer.join()
        assert slowest < 4.0 * PATIENCE
        eventually(lambda: len(operate.parked_keys(settings)) == written, 60)
    assert by_key(consume(settings, there)) == {"k": [str(number) for number in range(16)]}


def test_rows_for_the_topics_of_harvesters_and_of_kafka_are_refused(either: Settings, topic: str) -> None:
    settings = either
    migrate(settings.model_copy(update={"table": "other"}))
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute("UPDATE outbox_identity SET harvest_group = 'another' WHERE table_name = 'other'")
        connection.execute("CREATE SCHEMA elsewhere")
    migrate(settings.model_copy(update={"table": "elsewhere.outbox"}))
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute("UPDATE elsewhere.outbox_identity SET harvest_group = 'third'")
    ours = [f"{each}-{what}" for each in (settings.group, "another", "third") for what in ("progress", "leader")]
    with leading(settings):
        for name in (*ours, "__consumer_offsets", "__transaction_state", "__marshal"):
            insert(settings, name, [("0/1", "x")])
        insert(settings, topic, [("k", "1")])
        eventually(lambda: backlog(settings) == 9, 30)
        reasons = {parked_key.topic: parked_key.reason for parked_key in operate.parked_keys(settings)}
        assert all("own topic" in reason for reason in reasons.values())
        assert len(reasons) == 9
        insert(settings, topic, [("k", "2")])
        eventually(lambda: backlog(settings) == 9, 30)
    with leading(settings):  # What was refused cannot have killed who comes next.
        insert(settings, topic, [("k", "3")])
        eventually(lambda: backlog(settings) == 9, 30)
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute("DELETE FROM outbox")
    drained(settings)
    assert by_key(consume(settings, topic)) == {"k": ["1", "2", "3"]}
