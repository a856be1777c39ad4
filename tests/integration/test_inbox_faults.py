"""What a handler may do wrong, and what a group must bear: no other event is lost, and nothing stands still."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer

from outbox_plugin import Settings
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.embedded.kafka import EmbeddedKafka
from outbox_plugin.errors import InvalidSetting, OutboxError
from outbox_plugin.inbox import Inbox, Received, Retry, poll_loop
from outbox_plugin.inbox.dead_letters import DeadLetters
from outbox_plugin.inbox.handling import Handling
from outbox_plugin.inbox.handover import Handover
from outbox_plugin.inbox.key_queues import KeyQueues
from outbox_plugin.inbox.positions import Positions
from outbox_plugin.inbox.retry import MAX_LOSSES
from outbox_plugin.schema.watched_connection import NoAnswer
from tests.harvesting import create_topic
from tests.inbox_support import effects, produce, query, record_effect
from tests.postgres_sessions import sessions_waiting_for_a_lock
from tests.processes import paused
from tests.scraping import listening
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.integration

SOON = 60.0
AT_ONCE = Retry(attempts=1)


def numbered(settings: Settings, topic: str, guilty: set[int], count: int = 300) -> list[str]:
    """Send events of ten keys, of which some are `guilty` and the others `good`; returns their idempotency keys."""
    values = ["guilty" if number in guilty else "good" for number in range(count)]
    return produce(settings, topic, [(f"k{number % 10}", value) for number, value in enumerate(values)])


def letters(settings: Settings) -> list[str]:
    """The idempotency keys of the dead letters."""
    return sorted(letter.idempotency_key for letter in DeadLetters(settings).list())


@pytest.mark.parametrize("leaves", [asyncio.CancelledError, SystemExit, KeyboardInterrupt])
def test_whatever_a_handler_lets_out_is_the_failure_of_its_event(
    ready: Settings, topic: str, group: str, leaves: type[BaseException]
) -> None:
    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        record_effect(connection, event)
        if event.value == b"guilty":
            raise leaves

    sent = numbered(ready, topic, {3, 30})
    with Inbox(ready, group=group, topics=[topic], handler=handle, concurrency=1, retry=AT_ONCE) as inbox:
        eventually(lambda: len(effects(ready)) == 298, SOON)
        eventually(lambda: letters(ready) == sorted([sent[3], sent[30]]), SOON)
        assert inbox.alive
    assert leaves.__name__ in DeadLetters(ready).list()[0].error


class Unspeakable(Exception):
    """An error that fails to say what it is."""

    def __str__(self) -> str:
        raise RuntimeError


class Numbered(Exception):
    """An error whose state is no SQLSTATE."""

    sqlstate = 40_001


class Stateless(Exception):
    """An error that fails to say what its state is."""

    @property
    def sqlstate(self) -> str:
        """There is none."""
        raise RuntimeError


@pytest.mark.parametrize(
    "error",
    [ValueError("unknown \ud800"), Unspeakable(), Numbered(), Stateless()],
    ids=["no text", "unspeakable", "a number for a state", "no state"],
)
def test_an_error_of_any_class_makes_a_dead_letter(ready: Settings, topic: str, group: str, error: Exception) -> None:
    """Such as one that quotes half a surrogate pair out of a JSON value."""

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        if event.value == b"guilty":
            raise error
        record_effect(connection, event)

    sent = numbered(ready, topic, {3}, 20)
    with Inbox(ready, group=group, topics=[topic], handler=handle, concurrency=1, retry=AT_ONCE) as inbox:
        eventually(lambda: letters(ready) == [sent[3]], SOON)
        eventually(lambda: len(effects(ready)) == 19, SOON)
        assert inbox.alive


def test_what_an_async_handler_lets_out_too(ready: Settings, topic: str, group: str) -> None:
    async def handle(connection: psycopg.AsyncConnection[Any], event: Received) -> None:
        if event.value == b"guilty":
            raise asyncio.CancelledError
        await connection.execute("INSERT INTO effect (event) VALUES (%s)", (event.idempotency_key,))

    async def live() -> None:
        async with Inbox(ready, group=group, topics=[topic], handler=handle, concurrency=1, retry=AT_ONCE):
            while len(await asyncio.to_thread(effects, ready)) < 298:
                await asyncio.sleep(0.02)

    sent = numbered(ready, topic, {3, 30})
    asyncio.run(asyncio.wait_for(live(), SOON * PATIENCE))
    assert letters(ready) == sorted([sent[3], sent[30]])


@pytest.mark.parametrize("last_step", ["_poll_loop", "_start"], ids=["while it connects", "when it has started"])
def test_an_inbox_whose_start_is_cancelled_stops(
    ready: Settings, topic: str, group: str, monkeypatch: pytest.MonkeyPatch, last_step: str
) -> None:
    """As by a timeout around `async with`. Its port is closed, too."""
    stepped, go_on, step = threading.Event(), threading.Event(), getattr(Inbox, last_step)

    def step_slowly(*args: Any) -> Any:
        result = step(*args)
        stepped.set()
        assert go_on.wait(SOON * PATIENCE)
        return result

    async def handle(connection: psycopg.AsyncConnection[Any], event: Received) -> None:
        pass

    async def live() -> None:
        entering = asyncio.create_task(inbox.__aenter__())
        assert await asyncio.to_thread(stepped.wait, SOON * PATIENCE)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
        go_on.set()
        await asyncio.get_running_loop().shutdown_default_executor()  # What runs in its threads ends.
        assert not inbox.alive
        assert inbox._telemetry is None

    monkeypatch.setattr(Inbox, last_step, step_slowly)
    inbox = Inbox(listening(ready), group=group, topics=[topic], handler=handle)
    try:
        asyncio.run(live())
    finally:
        go_on.set()
        inbox.stop()


def test_an_inbox_whose_worker_ends_says_so_and_ends(
    ready: Settings, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of our own: the others would go on, with less and less."""

    async def broken(*_: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(Handling, "handle", broken)
    numbered(ready, topic, set(), 1)
    inbox = Inbox(ready, group=group, topics=[topic], handler=record_effect)
    inbox.start()
    try:
        eventually(lambda: not inbox.alive, SOON)
        assert isinstance(inbox.error, OutboxError)
        assert "ours" in str(inbox.error)
    finally:
        inbox.stop()


@pytest.mark.parametrize("misuse", ["COMMIT AND CHAIN", "COMMIT; BEGIN", "SELECT 1; COMMIT; BEGIN; SELECT 1"])
def test_a_handler_that_commits_and_goes_on_has_its_effects_and_harms_no_other_event(
    ready: Settings, topic: str, group: str, misuse: str, caplog: pytest.LogCaptureFixture
) -> None:
    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        if event.value == b"guilty":
            connection.execute("INSERT INTO effect (event) VALUES ('before')")
            connection.execute(misuse.encode())
        record_effect(connection, event)

    sent = numbered(ready, topic, {0, 150, 151, 299})
    with Inbox(ready, group=group, topics=[topic], handler=handle, concurrency=1, retry=AT_ONCE):
        eventually(lambda: len(effects(ready)) >= 304, SOON)
    assert sorted(event for event, _, _ in effects(ready)) == sorted([*sent, *["before"] * 4])
    assert DeadLetters(ready).list() == []
    assert "the handler ended the transaction" in caplog.text


@pytest.mark.parametrize("misuse", ["ROLLBACK", "ROLLBACK AND CHAIN", "ROLLBACK; BEGIN"])
def test_a_handler_that_rolls_back_fails_and_harms_no_other_event(
    ready: Settings, topic: str, group: str, misuse: str
) -> None:
    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        if event.value == b"guilty":
            connection.execute(misuse.encode())
        record_effect(connection, event)

    sent = numbered(ready, topic, {0, 150, 151, 299})
    guilty = [sent[number] for number in (0, 150, 151, 299)]
    with Inbox(ready, group=group, topics=[topic], handler=handle, concurrency=1, retry=AT_ONCE):
        eventually(lambda: letters(ready) == sorted(guilty), SOON)
        eventually(lambda: {event for event, _, _ in effects(ready)} >= {*sent} - {*guilty}, SOON)
    by_event = [event for event, _, _ in effects(ready) if event not in guilty]
    assert sorted(by_event) == sorted({*sent} - {*guilty})
    assert "rolled the transaction back" in DeadLetters(ready).list()[0].error


def test_a_handler_that_commits_and_then_fails_is_tried_again(ready: Settings, topic: str, group: str) -> None:
    """Its COMMIT has recorded the event as handled, and all others of its batch."""

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        if event.value == b"guilty":
            connection.execute("COMMIT AND CHAIN")
            raise RuntimeError("after the COMMIT")
        record_effect(connection, event)

    sent = numbered(ready, topic, {0, 150, 299})
    with Inbox(ready, group=group, topics=[topic], handler=handle, concurrency=1, retry=Retry(2, 0.05, 0.1)):
        eventually(lambda: letters(ready) == sorted([sent[0], sent[150], sent[299]]), SOON)
        eventually(lambda: len(effects(ready)) >= 297, SOON)
    assert len(effects(ready)) == len({event for event, _, _ in effects(ready)}) == 297


def test_savepoints_and_settings_are_the_handlers_own(ready: Settings, topic: str, group: str) -> None:
    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        connection.execute("SET application_name = 'mine'")
        record_effect(connection, event)
        connection.execute("SAVEPOINT mine")
        connection.execute("DELETE FROM effect")
        connection.execute("ROLLBACK TO SAVEPOINT mine")
        with connection.transaction():
            connection.execute("RESET ALL")

    sent = numbered(ready, topic, set())
    with Inbox(ready, group=group, topics=[topic], handler=handle, concurrency=2, retry=AT_ONCE):
        eventually(lambda: len(effects(ready)) >= 300, SOON)
    assert sorted(event for event, _, _ in effects(ready)) == sorted(sent)


@pytest.mark.parametrize("how", ["killed", "idle too long"])
def test_a_handler_that_loses_its_connection_each_time_ends_as_a_dead_letter(
    ready: Settings, topic: str, group: str, how: str
) -> None:
    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        if event.value == b"guilty":
            if how == "killed":
                connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")
            time.sleep(0.8)
        record_effect(connection, event)

    query(
        ready,
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %%I SET idle_in_transaction_session_timeout = 300', "
        "current_database()); END $$",
        *(),
    )
    sent = numbered(ready, topic, {7}, 30)
    with Inbox(ready, group=group, topics=[topic], handler=handle, retry=Retry(2, 0.05, 0.1)) as inbox:
        eventually(lambda: letters(ready) == [sent[7]], SOON)
        eventually(lambda: len(effects(ready)) == 29, SOON)
        assert inbox.alive
    assert DeadLetters(ready).list()[0].attempts == 6  # More than an error has: it may be an outage.


def test_a_server_that_does_not_answer_in_time_is_no_records_fault(ready: Settings, topic: str, group: str) -> None:
    """As one that is busy, or a pooler that has no connection to spare, however often it happens."""
    tries = 0

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        nonlocal tries
        if event.value == b"slow" and (tries := tries + 1) <= 2 * MAX_LOSSES:
            connection.close()
            raise NoAnswer("the server does not answer: it hangs, or the network path to it is broken")
        record_effect(connection, event)

    produce(ready, topic, [("a", "slow"), ("b", "quick")])
    with Inbox(ready, group=group, topics=[topic], handler=handle, retry=Retry(2, 0.05, 0.1)):
        eventually(lambda: len(effects(ready)) == 2, SOON)
    assert letters(ready) == []


class OrderFailed(Exception):
    """A handler's own error, which wraps that of the database."""


def test_a_deadlock_is_nobodys_fault_though_the_handler_wraps_its_error(
    ready: Settings, topic: str, group: str
) -> None:
    """As SQLAlchemy and Django do."""
    deadlocks = [0]

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        record_effect(connection, event)
        if event.value == b"guilty" and deadlocks[0] < 4:
            deadlocks[0] += 1
            try:
                connection.execute("DO $$ BEGIN RAISE 'deadlock' USING ERRCODE = '40P01'; END $$")
            except psycopg.Error as error:
                raise OrderFailed from error

    sent = numbered(ready, topic, {3}, 20)
    with Inbox(ready, group=group, topics=[topic], handler=handle, concurrency=1, retry=AT_ONCE):
        eventually(lambda: {*sent} <= {event for event, _, _ in effects(ready)} | {*letters(ready)}, SOON)
    assert letters(ready) == []
    assert sorted(event for event, _, _ in effects(ready)) == sorted(sent)


@pytest.mark.parametrize("sqlstate", ["08001", "08006"])
def test_a_server_that_only_the_handler_talks_to_is_its_own_affair(
    ready: Settings, topic: str, group: str, sqlstate: str
) -> None:
    """As a foreign table says it."""

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        connection.execute(f"DO $$ BEGIN RAISE 'could not connect' USING ERRCODE = '{sqlstate}'; END $$".encode())

    sent = produce(ready, topic, [("k", "1")])
    with Inbox(ready, group=group, topics=[topic], handler=handle, retry=Retry(2, 0.05, 0.1)):
        eventually(lambda: letters(ready) == sent, SOON)


@pytest.mark.parametrize("sqlstate", ["53200", "57P03", "58030"])
def test_a_shortage_that_does_not_end_is_the_events_affair(
    ready: Settings, topic: str, group: str, sqlstate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a server that only the handler talks to. While it lasts no longer, it does not count as an attempt."""
    monkeypatch.setattr("outbox_plugin.inbox.retry.MAX_SHORTAGES", 6)
    tries: Counter[bytes | None] = Counter()

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        tries[event.value] += 1
        if event.value == b"endless" or (event.value == b"short" and tries[event.value] < 6):
            connection.execute(f"DO $$ BEGIN RAISE 'short' USING ERRCODE = '{sqlstate}'; END $$".encode())
        record_effect(connection, event)

    endless, short, behind = produce(ready, topic, [("a", "endless"), ("b", "short"), ("a", "behind")])
    with Inbox(ready, group=group, topics=[topic], handler=handle, concurrency=1, retry=Retry(2, 0.05, 0.1)):
        eventually(lambda: letters(ready) == [endless], SOON)
        eventually(lambda: sorted(event for event, _, _ in effects(ready)) == sorted([short, behind]), SOON)
    assert letters(ready) == [endless]


def test_handlers_that_share_rows_do_not_deadlock_by_the_batch(
    ready: Settings, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each locks one of 20 rows, so one by one none could; a batch locks many, in the order of its events."""
    monkeypatch.setattr("outbox_plugin.inbox.batch_limit.DEADLOCK_CAUTION_SECONDS", 3_600.0)  # Longer than the test.
    deadlocks: list[float] = []

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        try:
            connection.execute("UPDATE shared SET times = times + 1 WHERE number = %s", (int(event.value or b"0"),))
        except psycopg.errors.DeadlockDetected:
            deadlocks.append(time.monotonic())
            raise

    query(ready, "CREATE TABLE shared AS SELECT number, 0 AS times FROM generate_series(0, 19) AS number")
    produce(ready, topic, [(f"k{each % 500}", str(each * 7919 % 20)) for each in range(9_000)])
    with Inbox(ready, group=group, topics=[topic], handler=handle):
        eventually(lambda: query(ready, "SELECT sum(times) FROM shared") == [(9_000,)], 240)
    assert len(deadlocks) <= 10  # Of the first lot: four batches, and what is handled one by one between them.


def test_an_inbox_that_stops_leaves_its_partitions_to_others_though_a_handler_goes_on(
    ready: Settings, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox_plugin.inbox.consumer.RELEASE_SECONDS", 1.0)
    working, go_on = threading.Event(), threading.Event()

    def slow(connection: psycopg.Connection[Any], event: Received) -> None:
        record_effect(connection, event)
        working.set()
        assert go_on.wait(2 * SOON * PATIENCE)

    sent = produce(ready, topic, [(f"k{each}", "1") for each in range(10)])
    first = Inbox(ready, group=group, topics=[topic], handler=slow, concurrency=1)
    first.start()
    stopping = threading.Thread(target=first.stop)
    try:
        assert working.wait(SOON * PATIENCE)
        with Inbox(ready, group=group, topics=[topic], handler=record_effect) as second:
            stopping.start()
            eventually(lambda: len(second.partitions) == 3, SOON)
            assert stopping.is_alive()  # It waits for its handler.
            go_on.set()
            eventually(lambda: len(effects(ready)) == 10, SOON)
    finally:
        go_on.set()
        first.stop()
    stopping.join(SOON * PATIENCE)
    assert sorted(event for event, _, _ in effects(ready)) == sorted(sent)


def test_only_what_is_being_handled_waits_for_the_handlers_of_an_inbox_that_stops(
    ready: Settings, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox_plugin.inbox.consumer.RELEASE_SECONDS", 10 * SOON * PATIENCE)
    working, go_on = threading.Event(), threading.Event()
    busy: list[TopicPartition] = []

    def slow(connection: psycopg.Connection[Any], event: Received) -> None:
        record_effect(connection, event)
        busy.append(TopicPartition(event.topic, event.partition))
        working.set()
        assert go_on.wait(10 * SOON * PATIENCE)

    sent = produce(ready, topic, [("slow", "1")])
    first = Inbox(ready, group=group, topics=[topic], handler=slow)
    first.start()
    stopping = threading.Thread(target=first.stop)
    try:
        assert working.wait(SOON * PATIENCE)
        stopping.start()
        with Inbox(ready, group=group, topics=[topic], handler=record_effect) as second, ExitStack() as ended:
            ended.callback(go_on.set)  # Else a failed assertion would wait for the handler.
            others = {TopicPartition(topic, number) for number in range(3)} - {*busy}
            eventually(lambda: {*second.partitions} == others, SOON)
            sent += produce(ready, topic, [(f"k{each}", "1") for each in range(30)])  # Of the busy partition, too.
            eventually(lambda: len(effects(ready)) > 0, SOON)
            assert stopping.is_alive()
            assert {*second.partitions} == others
            go_on.set()
            eventually(lambda: len(second.partitions) == 3, SOON)
            eventually(lambda: len(effects(ready)) == 31, SOON)
    finally:
        go_on.set()
        first.stop()
    stopping.join(SOON * PATIENCE)
    assert sorted(event for event, _, _ in effects(ready)) == sorted(sent)
    assert len(busy) == 1


def test_what_an_inbox_has_locked_for_its_handlers_is_free_once_it_is_killed(
    ready: Settings, topic: str, group: str
) -> None:
    partition, other = TopicPartition(topic, 0), TopicPartition(topic, 1)
    positions = Positions(ready, group)
    with Handover(ready, group).locked([partition, other]) as unlock:
        assert positions.still_handled([partition, other]) == {partition, other}
        assert Positions(ready, "another").still_handled([partition]) == set()
        unlock([other])
        assert positions.still_handled([partition, other]) == {partition}
        # As when the process is killed, or its session is lost.
        [(ended,)] = query(
            ready,
            "SELECT count(pg_terminate_backend(pid)) FROM pg_locks JOIN pg_database AS found ON found.oid = database "
            "WHERE locktype = 'advisory' AND datname = current_database()",
        )
        assert ended == 1
        eventually(lambda: positions.still_handled([partition, other]) == set(), SOON)
        unlock([partition])
    assert positions.still_handled([partition, other]) == set()


@pytest.mark.parametrize(("size", "headers"), [(500_000, 0), (0, 3_300)], ids=["large values", "many headers"])
def test_large_records_are_held_up_to_a_bound_of_bytes(
    ready: Settings, topic: str, group: str, monkeypatch: pytest.MonkeyPatch, size: int, headers: int
) -> None:
    monkeypatch.setattr(poll_loop, "MEMORY_LIMIT", replace(poll_loop.MEMORY_LIMIT, size=10_000_000))
    go_on = threading.Event()

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        assert go_on.wait(SOON * PATIENCE)
        connection.execute("INSERT INTO effect (event) VALUES (%s)", (event.idempotency_key,))

    producer = Producer({"bootstrap.servers": ready.bootstrap_servers})
    for number in range(200):
        producer.produce(topic, b"x" * size, f"k{number}", headers=[("a", b"b")] * headers)
        producer.flush(30)
    producer.close()
    with Inbox(ready, group=group, topics=[topic], handler=handle) as inbox:
        held = [0]

        def settled() -> bool:
            held.append(inbox._dispatcher._queues.held)
            time.sleep(0.1)
            return held[-1] > 0 and len(held) > 30 and len({*held[-30:]}) == 1

        eventually(settled, SOON)
        assert 5 <= max(held) <= 21
        go_on.set()
        eventually(lambda: len(effects(ready)) == 200, SOON)


def test_one_key_on_two_topics_and_of_two_types_is_as_many_events(ready: Settings, topic: str, group: str) -> None:
    """Each has its effect once, also where the records come twice, and where all of them fail."""

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        if event.value == b"guilty":
            raise RuntimeError("it is guilty")
        connection.execute("INSERT INTO effect (event, key) VALUES (%s, %s)", (event.topic, event.type))

    other = create_topic(ready, f"{topic}-other")
    producer = Producer({"bootstrap.servers": ready.bootstrap_servers})
    kinds: list[list[tuple[str, str | bytes | None]]] = [[], [("event-type", "Placed")], [("event-type", "Paid")]]
    for value, name in (("good", "17"), ("guilty", "18")):
        for place in (topic, other, topic, other):
            for kind in kinds:
                producer.produce(place, value, "k", headers=[("idempotency-key", name), *kind])
    producer.flush(30)
    producer.close()
    with Inbox(ready, group=group, topics=[topic, other], handler=handle, retry=AT_ONCE):
        eventually(lambda: len(letters(ready)) == len(effects(ready)) == 6, SOON)
        assert query(ready, "SELECT count(DISTINCT (event, key)) FROM effect") == [(6,)]
        produce(ready, topic, [("k", "good")])
        eventually(lambda: len(effects(ready)) == 7, SOON)
    assert letters(ready) == ["18"] * 6


def test_what_the_version_before_has_handled_is_left_out_on_every_topic(
    ready: Settings, topic: str, group: str
) -> None:
    """It did not remember of which topic the event was."""
    query(ready, "INSERT INTO outbox_inbox (consumer_group, idempotency_key) VALUES (%s, 'known')", group)
    produce(ready, topic, [("k", "1"), ("k", "2")], identities=["known", "new"])
    with Inbox(ready, group=group, topics=[topic], handler=record_effect):
        eventually(lambda: [event for event, _, _ in effects(ready)] == ["new"], SOON)


def test_an_inbox_that_stops_does_not_wait_for_housekeeping(ready: Settings, topic: str, group: str) -> None:
    query(
        ready,
        "INSERT INTO outbox_inbox (consumer_group, idempotency_key, handled_at) "
        "VALUES (%s, 'old', now() - '1 year'::interval)",
        group,
    )
    with psycopg.connect(ready.dsn.get_secret_value()) as holder:
        holder.execute("SELECT FROM outbox_inbox FOR UPDATE")
        inbox = Inbox(ready, group=group, topics=[topic], handler=record_effect)
        inbox.start()
        eventually(lambda: sessions_waiting_for_a_lock(ready), SOON)
        began = time.monotonic()
        inbox.stop()
        assert time.monotonic() - began < 5 * PATIENCE
    assert not [each.name for each in threading.enumerate() if each.name.startswith("outbox-inbox")]


@pytest.mark.parametrize("commits_before", [False, True])
def test_an_inbox_ends_soon_though_kafka_does_not_answer_its_commit(
    ready: Settings, group: str, kafka: EmbeddedKafka, monkeypatch: pytest.MonkeyPatch, commits_before: bool
) -> None:
    """librdkafka would wait for the answer for minutes, in the last commit as in the close."""
    away = threading.Event()
    commits: list[float] = []
    commit_and_note = poll_loop.PollLoop.commit_and_note

    def counted(loop: poll_loop.PollLoop) -> None:
        commit_and_note(loop)
        commits.append(time.monotonic())

    monkeypatch.setattr(poll_loop.PollLoop, "commit_and_note", counted)

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        assert away.wait(SOON)
        record_effect(connection, event)

    elsewhere = ready.model_copy(update={"bootstrap_servers": kafka.bootstrap_servers})
    create_topic(elsewhere, "orders", 1)
    produce(elsewhere, "orders", [("k", "1")])
    inbox = Inbox(elsewhere, group=group, topics=["orders"], handler=handle)
    inbox.start()
    eventually(lambda: inbox._dispatcher.locked(KeyQueues.busy), SOON)
    with paused(kafka.pid):
        away.set()
        eventually(lambda: effects(ready), SOON)
        sent = len(commits)
        eventually(lambda: not commits_before or len(commits) > sent + 1, SOON)
        ending = threading.Thread(target=inbox.stop, daemon=True)
        ending.start()
        ending.join(10 * PATIENCE)
        assert not ending.is_alive()
    ending.join(SOON)
    eventually(lambda: not [each for each in threading.enumerate() if each.name == "outbox-consumer-close"], SOON)


def test_a_start_that_would_pass_over_events_is_refused(ready: Settings, topic: str, group: str) -> None:
    produce(ready, topic, [("k", "1")])
    latest = ready.model_copy(update={"kafka": {"auto.offset.reset": "latest"}})
    with pytest.raises(InvalidSetting, match=r"^OUTBOX_KAFKA: auto\.offset\.reset=latest would let .*$"):
        Inbox(latest, group=group, topics=[topic], handler=record_effect).start()
    earliest = ready.model_copy(update={"kafka": {"auto.offset.reset": "smallest"}})
    with Inbox(earliest, group=group, topics=[topic], handler=record_effect):
        eventually(lambda: len(effects(ready)) == 1, SOON)
