"""Live rows go before a large batch, and each key keeps its order."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import psycopg
import pytest

from outbox_plugin import Harvester, Settings
from outbox_plugin.adapters.postgres_window_store import PostgresWindowStore
from outbox_plugin.core import adaptive_read_limit, backlog, rows_beside_live
from outbox_plugin.errors import StoreUnavailable
from outbox_plugin.relay import live_rows
from outbox_plugin.relay.events import HarvestEvent, KeysSummarised, LiveRowsJoined, LiveRowsLeftOut, TermFinished
from outbox_plugin.status.command import described
from outbox_plugin.status.reader import ShardStatus, read_status
from tests.harvesting import (
    assert_exactly_once_in_order,
    consume,
    create_topic,
    drained,
    insert_numbered,
)
from tests.support import eventually

pytestmark = pytest.mark.integration
ROWS = 60_000


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a batch of this size take long."""
    monkeypatch.setattr(backlog, "MIN_BACKLOG_IDS", 5_000)
    monkeypatch.setattr(adaptive_read_limit, "ROWS_PER_WINDOW", 500)
    monkeypatch.setattr(rows_beside_live, "MIN_ROWS", 200)
    monkeypatch.setattr(rows_beside_live, "MAX_ROWS", 200)


class LiveRows:
    """Rows that are written one by one beside a test, numbered from `first` on, until the end of `writing`."""

    def __init__(self, settings: Settings, topic: str, first: int) -> None:
        self._settings = settings
        self._topic = topic
        self._first = first
        self._stop = threading.Event()
        self.count = 0
        self.name = "live"  # What keys begin with that the batch has not.
        self.shares_a_key = False  # Whether every other row has a key of the batch's.

    @contextmanager
    def writing(self) -> Iterator[None]:
        thread = threading.Thread(target=self._write)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def _write(self) -> None:
        with psycopg.connect(self._settings.dsn.get_secret_value(), autocommit=True) as connection:
            while not self._stop.wait(0.005):
                number = self._first + self.count
                key = "key-3" if self.shares_a_key and number % 2 else f"{self.name}-{number % 10}"
                connection.execute(
                    "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value) VALUES (%s, %s, %s)",
                    (self._topic, key, str(number)),
                )
                self.count += 1


def harvest_batch_beside_live_rows(settings: Settings, topic: str, until: type[HarvestEvent]) -> list[HarvestEvent]:
    """All rows are numbered, and ascend within each key in the order of their commits. Returns what was observed."""
    events: list[HarvestEvent] = []
    live = LiveRows(settings, topic, ROWS + 1)
    with Harvester(settings, observe=events.append):
        with live.writing():
            eventually(lambda: live.count > 20, 30)
            insert_numbered(settings, topic, 1, ROWS)
            live.shares_a_key = True
            eventually(lambda: any(isinstance(event, until) for event in events), 60)
        drained(settings)
    assert_exactly_once_in_order(consume(settings, topic), 1, ROWS + live.count)
    assert not [event for event in events if isinstance(event, TermFinished) and event.reason]
    return events


def summaries(events: list[HarvestEvent]) -> list[KeysSummarised]:
    return [event for event in events if isinstance(event, KeysSummarised)]


def test_live_rows_go_before_a_batch_and_each_key_keeps_its_order(settings: Settings) -> None:
    topic = create_topic(settings, f"{settings.group}-mixed", partitions=1)
    [summary, *_] = summaries(harvest_batch_beside_live_rows(settings, topic, LiveRowsJoined))
    assert summary.error is None
    assert summary.rows > ROWS // 2
    records = consume(settings, topic)
    end_of_batch = max(record.offset for record in records if int(record.value or 0) <= ROWS)
    live = [record for record in records if record.key.startswith("live-")]
    assert sum(record.offset < end_of_batch for record in live) > 30


def test_where_keys_cannot_be_read_live_rows_wait_in_line(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: PostgresWindowStore, bound: int, rows: int) -> Generator[bytes]:
        yield b""
        raise StoreUnavailable(f"Postgres: too many connections to read keys up to {bound}")

    monkeypatch.setattr(PostgresWindowStore, "key_hashes_up_to", refuse)
    topic = create_topic(settings, f"{settings.group}-mixed", partitions=1)
    [summary, *_] = summaries(harvest_batch_beside_live_rows(settings, topic, KeysSummarised))
    assert "too many connections" in (summary.error or "")
    assert "too many connections" in summary.message()


def test_live_rows_go_on_after_too_many_had_to_wait(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """An open transaction keeps reads of live rows from beginning above those that wait."""
    monkeypatch.setattr(live_rows, "MAX_WAITING_RANGES", 5)
    topic = create_topic(settings, f"{settings.group}-mixed", partitions=1)
    events: list[HarvestEvent] = []
    live = LiveRows(settings, topic, ROWS + 1)
    with Harvester(settings, observe=events.append):
        with live.writing(), psycopg.connect(settings.dsn.get_secret_value()) as open_writer:
            eventually(lambda: live.count > 20, 30)
            insert_numbered(settings, topic, 1, ROWS)
            live.name, live.shares_a_key = "later", True
            eventually(lambda: bool(summaries(events)), 60)
            open_writer.execute("INSERT INTO outbox (kafka_topic, kafka_key) VALUES (%s, 'open')", (topic,))
            before = live.count
            eventually(lambda: live.count > before + 50, 30)
            open_writer.rollback()
            after = live.count
            eventually(lambda: any(isinstance(event, LiveRowsJoined) for event in events), 60)
        drained(settings)
    records = consume(settings, topic)
    assert_exactly_once_in_order(records, 1, ROWS + live.count)
    end_of_batch = max(record.offset for record in records if int(record.value or 0) <= ROWS)
    assert sum(record.offset < end_of_batch for record in records if int(record.value or 0) > ROWS + after) > 10


def test_the_status_says_how_many_live_rows_wait_for_the_batch(settings: Settings) -> None:
    topic = create_topic(settings, f"{settings.group}-mixed", partitions=1)
    left_out: list[int] = []
    seen = threading.Event()
    live = LiveRows(settings, topic, ROWS + 1)

    def hold_the_reads(event: HarvestEvent) -> None:
        """Read nothing more once live rows have been left out, until the test has seen the status."""
        if isinstance(event, LiveRowsLeftOut):
            left_out.append(event.waiting)
            assert seen.wait(600)

    def shard() -> ShardStatus:
        return read_status(settings).shards[0]

    with Harvester(settings, observe=hold_the_reads):
        with live.writing():
            eventually(lambda: live.count > 20, 30)
            insert_numbered(settings, topic, 1, ROWS)
            live.shares_a_key = True
            eventually(lambda: left_out, 60)
            eventually(lambda: (shard().live_first, shard().live_rows_waiting) == (True, left_out[0]), 60)
            shown = described({"outbox": read_status(settings)})
            seen.set()
        drained(settings)
        eventually(lambda: (shard().live_first, shard().live_rows_waiting) == (False, 0), 60)
    assert f"new rows go before the backlog; {left_out[0]} wait for it, as their keys may be in it" in shown
    assert_exactly_once_in_order(consume(settings, topic), 1, ROWS + live.count)
