"""An event has its effect once, in its key's order, whatever fails and whoever is killed."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer

from outbox_plugin import Event, Outbox, Settings
from outbox_plugin.errors import InvalidSetting, SchemaMissing, ServerRefused
from outbox_plugin.inbox import Inbox, Received, Retry
from outbox_plugin.inbox.dead_letters import DeadLetters
from outbox_plugin.inbox.retention import Retention, clean
from outbox_plugin.schema.connection import connect
from tests.harvesting import environment, run_outbox
from tests.inbox_support import effects, produce, query, record_effect, values_by_key
from tests.inbox_worker import end_workers, start_worker
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.integration

CHECKOUT = Path(__file__).resolve().parents[2]
SOON = 30.0
IMPATIENT = Retry(attempts=3, first_seconds=0.05, most_seconds=0.1)


def test_an_event_has_its_effect_once_though_it_is_delivered_twice(ready: Settings, topic: str, group: str) -> None:
    sent = produce(ready, topic, [("a", "1"), ("b", "2"), (None, "3")])
    produce(ready, topic, [("a", "1"), ("b", "2"), (None, "3")], identities=sent)
    with Inbox(ready, group=group, topics=[topic], handler=record_effect):
        last = produce(ready, topic, [("a", "end"), ("b", "end"), ("c", "end"), ("d", "end")])
        eventually(lambda: {*last} <= {event for event, _, _ in effects(ready)}, SOON)
    assert sorted(event for event, _, _ in effects(ready)) == sorted(sent + last)


def test_offsets_are_committed_and_another_start_goes_on_from_there(ready: Settings, topic: str, group: str) -> None:
    produce(ready, topic, [(f"k{each}", "1") for each in range(20)])
    with Inbox(ready, group=group, topics=[topic], handler=record_effect):
        eventually(lambda: len(effects(ready)) == 20, SOON)
    query(ready, "DELETE FROM outbox_inbox")  # Now only offsets tell.
    more = produce(ready, topic, [("k0", "2")])
    with Inbox(ready, group=group, topics=[topic], handler=record_effect):
        eventually(lambda: {*more} <= {event for event, _, _ in effects(ready)}, SOON)
    assert len(effects(ready)) == 21


def test_each_group_has_its_own_effects(ready: Settings, topic: str, group: str) -> None:
    produce(ready, topic, [("a", "1")])
    with Inbox(ready, group=group, topics=[topic], handler=record_effect):
        eventually(lambda: len(effects(ready)) == 1, SOON)
    with Inbox(ready, group=f"{group}-other", topics=[topic], handler=record_effect):
        eventually(lambda: len(effects(ready)) == 2, SOON)


def test_a_failing_record_is_tried_again_in_its_place_while_other_keys_flow(
    ready: Settings, topic: str, group: str
) -> None:
    failures: list[float] = []
    others_done = threading.Event()

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        record_effect(connection, event)
        if event.value == b"fails" and not others_done.is_set():
            failures.append(1)
            raise RuntimeError("not yet")

    produce(ready, topic, [("bad", "first"), ("bad", "fails"), ("bad", "last")])
    produce(ready, topic, [(f"good-{each}", "1") for each in range(50)])
    retry = Retry(attempts=10_000, first_seconds=0.02, most_seconds=0.05)
    with Inbox(ready, group=group, topics=[topic], handler=handle, retry=retry):
        eventually(lambda: len(values_by_key(ready)) == 51, SOON)
        eventually(lambda: len(failures) > 2, SOON)
        assert values_by_key(ready)["bad"] == ["first"]
        others_done.set()
        eventually(lambda: len(values_by_key(ready)["bad"]) == 3, SOON)
    assert values_by_key(ready)["bad"] == ["first", "fails", "last"]


def test_keys_are_handled_side_by_side_and_one_key_is_not(ready: Settings, topic: str, group: str) -> None:
    meeting = threading.Barrier(3)

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        meeting.wait(SOON * PATIENCE)  # Only passed by three at once.
        record_effect(connection, event)

    produce(ready, topic, [("a", "1"), ("b", "1"), ("c", "1"), ("a", "2"), ("b", "2"), ("c", "2")])
    with Inbox(ready, group=group, topics=[topic], handler=handle, concurrency=3):
        eventually(lambda: len(effects(ready)) == 6, SOON)
    assert values_by_key(ready) == {key: ["1", "2"] for key in "abc"}


def test_a_handler_emits_in_the_same_transaction(ready: Settings, topic: str, group: str) -> None:
    outbox = Outbox()
    failed = threading.Event()

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        record_effect(connection, event)
        outbox.emit(connection, Event(topic="replies", key="k", value=event.json()))
        if not failed.is_set():
            failed.set()
            raise RuntimeError("once")

    produce(ready, topic, [("a", '{"n": 1}')])
    with Inbox(ready, group=group, topics=[topic], handler=handle, retry=IMPATIENT):
        eventually(lambda: effects(ready), SOON)
    assert query(ready, "SELECT kafka_value FROM outbox") == [('{"n":1}',)]


def test_async_handlers_run_in_the_callers_event_loop(ready: Settings, topic: str, group: str) -> None:
    loops: set[asyncio.AbstractEventLoop] = set()

    async def handle(connection: psycopg.AsyncConnection[Any], event: Received) -> None:
        loops.add(asyncio.get_running_loop())
        await connection.execute(
            "INSERT INTO effect (event, key, value) VALUES (%s, %s, %s)", (event.idempotency_key, event.key_text, "")
        )

    async def live() -> None:
        async with Inbox(ready, group=group, topics=[topic], handler=handle):
            while len(await asyncio.to_thread(effects, ready)) < 200:
                await asyncio.sleep(0.02)
        assert loops == {asyncio.get_running_loop()}

    produce(ready, topic, [(f"k{each % 10}", "") for each in range(200)])
    asyncio.run(asyncio.wait_for(live(), SOON * PATIENCE))
    assert len(effects(ready)) == 200


def test_what_keeps_failing_becomes_a_dead_letter_and_is_tried_again_when_asked(
    ready: Settings, topic: str, group: str
) -> None:
    mended = threading.Event()

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        record_effect(connection, event)
        if event.value == b"bad" and not mended.is_set():
            raise RuntimeError("it is bad\nindeed")

    produce(ready, topic, [("k", "1"), ("k", "bad"), ("k", "2"), ("other", "bad")])
    with Inbox(ready, group=group, topics=[topic], handler=handle, retry=IMPATIENT):
        eventually(lambda: values_by_key(ready).get("k") == ["1", "2"], SOON)
        eventually(lambda: len(DeadLetters(ready).list()) == 2, SOON)
        letters = {letter.key: letter for letter in DeadLetters(ready).list(group)}
        assert letters[b"k"].attempts == 3
        assert "RuntimeError: it is bad\nindeed" in letters[b"k"].error

        DeadLetters(ready).retry(None)  # It fails again, and stays.
        eventually(lambda: [each.attempts for each in DeadLetters(ready).list()] == [6, 6], SOON)
        assert [each.retry_at for each in DeadLetters(ready).list()] == [None, None]

        mended.set()
        assert DeadLetters(ready).retry([letters[b"k"].id, 12345]) == [letters[b"k"].id]
        eventually(lambda: values_by_key(ready)["k"] == ["1", "2", "bad"], SOON)
        eventually(lambda: [each.key for each in DeadLetters(ready).list()] == [b"other"], SOON)
    assert DeadLetters(ready).discard([letters[b"other"].id]) == [letters[b"other"].id]
    assert DeadLetters(ready).list() == []
    assert "other" not in values_by_key(ready)


def test_a_dead_letter_comes_back_as_it_was(ready: Settings, topic: str, group: str) -> None:
    seen: list[Received] = []

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        seen.append(event)
        if len(seen) == 1:
            raise RuntimeError("once")

    headers: list[tuple[str, str | bytes | None]] = [("idempotency-key", b"1"), ("raw", b"\xff\x00"), ("none", None)]
    producer = Producer({"bootstrap.servers": ready.bootstrap_servers})
    producer.produce(topic, b"\x00\xfe", b"\x00\xff", headers=headers)
    producer.flush(30)
    producer.close()
    with Inbox(ready, group=group, topics=[topic], handler=handle, retry=Retry(attempts=1)):
        eventually(lambda: DeadLetters(ready).list(), SOON)
        DeadLetters(ready).retry(None)
        eventually(lambda: len(seen) == 2, SOON)
    first, again = seen
    assert replace(again, dead_letter=None) == first
    assert again.headers == (("idempotency-key", b"1"), ("raw", b"\xff\x00"), ("none", None))


def test_dead_letters_from_the_command_line(ready: Settings, topic: str, group: str) -> None:
    def refuse(connection: psycopg.Connection[Any], event: Received) -> None:
        raise RuntimeError("no")

    produce(ready, topic, [("k", "1"), ("k", "2")])
    with Inbox(ready, group=group, topics=[topic], handler=refuse, retry=Retry(attempts=1)):
        eventually(lambda: len(DeadLetters(ready).list()) == 2, SOON)
    env = environment(ready)

    listed = run_outbox("inbox", "list", "--group", group, env=env)
    assert listed.returncode == 0
    assert f"{group}  {topic}/" in listed.stdout
    assert "1 attempts" in listed.stdout
    assert "RuntimeError: no\n2 dead letters" in listed.stdout
    letters = json.loads(run_outbox("inbox", "list", "--json", env=env).stdout)
    assert [letter["key"] for letter in letters] == ["k", "k"]

    assert "1 dead letters are tried again" in run_outbox("inbox", "retry", str(letters[0]["id"]), env=env).stdout
    assert "is being tried again" in run_outbox("inbox", "list", env=env).stdout
    nothing = run_outbox("inbox", "retry", env=env)
    assert (nothing.returncode, nothing.stderr.count("\n")) == (2, 1)
    missing = run_outbox("inbox", "discard", "999", env=env)
    assert (missing.returncode, missing.stderr) == (2, "outbox: there is no dead letter 999\n")
    assert "2 dead letters discarded" in run_outbox("inbox", "discard", "--all", env=env).stdout
    assert run_outbox("inbox", "list", env=env).stdout == "0 dead letters\n"


@pytest.mark.parametrize("patience", [20.0, 0.2], ids=["waited for", "not waited for"])
def test_a_rebalance_in_mid_handler_neither_loses_nor_repeats_an_effect(
    ready: Settings, topic: str, group: str, patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox_plugin.inbox.assignments.RELEASE_SECONDS", patience)
    working, go_on = threading.Semaphore(0), threading.Event()

    def slow(connection: psycopg.Connection[Any], event: Received) -> None:
        record_effect(connection, event)
        working.release()
        assert go_on.wait(SOON * PATIENCE)

    sent = produce(ready, topic, [(f"k{each % 20}", str(each)) for each in range(60)])
    with Inbox(ready, group=group, topics=[topic], handler=slow, concurrency=3) as first:
        for _ in range(3):
            assert working.acquire(timeout=SOON * PATIENCE)
        with Inbox(ready, group=group, topics=[topic], handler=record_effect) as second:
            if patience < 1:
                eventually(lambda: second.partitions, SOON)  # While the first still handles.
            go_on.set()
            eventually(lambda: len(effects(ready)) == 60, SOON)
            eventually(lambda: len(second.partitions) + len(first.partitions) == 3 and second.partitions, SOON)
    assert sorted(event for event, _, _ in effects(ready)) == sorted(sent)
    assert values_by_key(ready) == {f"k{key}": [str(each) for each in range(key, 60, 20)] for key in range(20)}


def test_kill_9_in_the_middle_neither_loses_nor_repeats_an_effect(ready: Settings, topic: str, group: str) -> None:
    running = [start_worker(ready, group, topic, "2") for _ in range(2)]
    try:
        sent = produce(ready, topic, [(f"k{each % 50}", str(each)) for each in range(3_000)])
        for number, enough in enumerate((200, 1_200)):
            eventually(lambda enough=enough: len(effects(ready)) >= enough, 60)  # type: ignore[misc]
            running[number % 2].kill()
            running[number % 2].communicate(timeout=90)
            running[number % 2] = start_worker(ready, group, topic, "2")
        eventually(lambda: len(effects(ready)) >= 3_000, 60)
    finally:
        codes = end_workers(running)
    assert sorted(event for event, _, _ in effects(ready)) == sorted(sent)
    assert values_by_key(ready) == {f"k{key}": [str(each) for each in range(key, 3_000, 50)] for key in range(50)}
    assert codes == [0, 0]


def test_an_inbox_that_is_told_to_end_while_it_starts_ends_in_good_order(
    ready: Settings, topic: str, group: str
) -> None:
    assert end_workers([start_worker(ready, group, topic, "2")]) == [0]


def test_an_inbox_whose_place_another_one_takes_ends(ready: Settings, topic: str, group: str) -> None:
    """Kafka lets only one consumer have a `group.instance.id`. The former one would never get a record again."""
    named = ready.model_copy(update={"kafka": {"group.instance.id": "one"}})
    produce(ready, topic, [("k", "1")])
    first, second = (Inbox(named, group=group, topics=[topic], handler=record_effect) for _ in range(2))
    with first:
        eventually(lambda: first.partitions, SOON)
        with second:
            eventually(lambda: not first.alive, SOON)
    assert "fenced by other consumer" in str(first.error)
    assert second.error is None


def test_a_session_that_postgres_ends_costs_nothing(ready: Settings, topic: str, group: str) -> None:
    sent = produce(ready, topic, [(f"k{each % 7}", str(each)) for each in range(2_000)])
    with Inbox(ready, group=group, topics=[topic], handler=record_effect, retry=Retry(1, 0.05, 0.1)):
        for enough in (1, 700, 1_400):
            eventually(lambda enough=enough: len(effects(ready)) >= enough, SOON)  # type: ignore[misc]
            query(
                ready,
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND application_name LIKE 'outbox inbox%%'",
            )
        eventually(lambda: len(effects(ready)) >= 2_000, SOON)
    assert sorted(event for event, _, _ in effects(ready)) == sorted(sent)
    assert DeadLetters(ready).list() == []


@pytest.mark.parametrize(
    ("misuse", "said"),
    [
        (lambda connection: connection.commit(), "commit"),
        (lambda connection: _swallow(connection), "went on after a failed statement"),
    ],
    ids=["commit", "swallowed"],
)
def test_what_a_handler_must_not_do_with_its_transaction(
    ready: Settings, topic: str, group: str, misuse: Callable[[psycopg.Connection[Any]], None], said: str
) -> None:
    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        misuse(connection)

    produce(ready, topic, [("k", "1")])
    with Inbox(ready, group=group, topics=[topic], handler=handle, retry=Retry(attempts=1)):
        eventually(lambda: DeadLetters(ready).list(), SOON)
    [letter] = DeadLetters(ready).list()
    assert said in letter.error


def test_a_handler_that_commits_by_itself_harms_no_other_event(
    ready: Settings, topic: str, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Their keys are recorded by one statement, so its COMMIT records others as handled that are not."""

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        record_effect(connection, event)
        if event.value == b"commits":
            connection.execute("COMMIT")

    values = ["commits" if number in (0, 1_500, 1_501, 2_400) else "good" for number in range(3_000)]
    sent = produce(ready, topic, [(f"k{number % 10}", value) for number, value in enumerate(values)])
    with Inbox(ready, group=group, topics=[topic], handler=handle, concurrency=1):
        eventually(lambda: len(effects(ready)) >= 3_000, SOON)
    assert sorted(event for event, _, _ in effects(ready)) == sorted(sent)
    assert "the handler ended the transaction" in caplog.text


def _swallow(connection: psycopg.Connection[Any]) -> None:
    with suppress(psycopg.Error):
        connection.execute("SELECT 1 / 0")


def test_what_has_outlived_its_time_is_removed_in_small_batches_by_one_process(
    ready: Settings, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox_plugin.inbox.retention.ROWS_AT_A_TIME", 100)
    query(
        ready,
        "INSERT INTO outbox_inbox (consumer_group, idempotency_key, handled_at) "
        "SELECT kept_by, i::text, now() - interval '1 hour' * i "
        "FROM generate_series(0, 999) AS i, unnest(ARRAY[%s, 'another group']) AS kept_by",
        group,
    )
    keep = Retention(timedelta(hours=500, minutes=-1), timedelta(hours=1))

    def remembered() -> int:
        [(count,)] = query(ready, "SELECT count(*) FROM outbox_inbox WHERE consumer_group = %s", group)
        return int(count)

    with connect(ready) as one, connect(ready) as other:
        with other.transaction():
            assert clean(other, ready, group, keep)
            assert not clean(one, ready, group, keep)  # Another process is cleaning.
        assert remembered() == 900
    with Inbox(ready, group=group, topics=[topic], handler=record_effect, keep=keep.handled):
        eventually(lambda: remembered() == 500, SOON)
    assert query(ready, "SELECT count(*) FROM outbox_inbox WHERE consumer_group <> %s", group) == [(1_000,)]


def test_starting_and_stopping_is_safe_in_any_order(ready: Settings, topic: str, group: str) -> None:
    never_started = Inbox(ready, group=group, topics=[topic], handler=record_effect)
    never_started.stop()
    inbox = Inbox(ready, group=group, topics=[topic], handler=record_effect)
    inbox.start()
    inbox.start()
    inbox.stop()
    inbox.stop()
    assert not inbox.alive
    # A connection that was being made when it stopped ends by itself.
    eventually(lambda: not [each.name for each in threading.enumerate() if each.name.startswith("outbox-")], 10)


def test_an_inbox_says_at_start_what_is_missing(unmigrated: Settings, settings: Settings, group: str) -> None:
    query(settings, "DROP TABLE outbox_inbox_dead_letter")
    with pytest.raises(SchemaMissing, match="run `outbox migrate` first"):
        Inbox(settings, group=group, topics=["t"], handler=record_effect).start()
    silent = settings.model_copy(update={"bootstrap_servers": "127.0.0.1:1"})
    with pytest.raises(ServerRefused, match=r"127\.0\.0\.1:1"):
        Inbox(silent, group=group, topics=["t"], handler=record_effect).start()
    with pytest.raises(InvalidSetting, match="expected a group, a list of topics"):
        Inbox(settings, group=group, topics="t", handler=record_effect)


def test_handlers_that_deadlock_over_rows_they_share_are_tried_again_and_not_blamed(
    ready: Settings, topic: str, group: str
) -> None:
    both = threading.Barrier(2)
    met = threading.Event()

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        """The first two take the shared rows in opposite orders, and meet in between."""
        for number in (0, 1) if event.key == b"a" else (1, 0):
            connection.execute("UPDATE shared SET times = times + 1 WHERE number = %s", (number,))
            if not met.is_set():
                both.wait(SOON * PATIENCE)
                met.set()

    query(ready, "CREATE TABLE shared AS SELECT number, 0 AS times FROM generate_series(0, 1) AS number")
    produce(ready, topic, [("a", "1"), ("b", "1")])
    with Inbox(ready, group=group, topics=[topic], handler=handle, concurrency=2, retry=Retry(1, 0.05, 0.1)):
        eventually(lambda: query(ready, "SELECT sum(times) FROM shared") == [(4,)], SOON)
    assert met.is_set()
    assert DeadLetters(ready).list() == []
