"""Whether a harvester is ready: the rules by themselves, and the facts that they are given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outbox_plugin.core.harvester_readiness import (
    ALIVE_SECONDS,
    LED_SECONDS,
    MOVED_SECONDS,
    POSTGRES_SECONDS,
    STEP_SECONDS,
    ShardFacts,
    is_alive,
    readiness,
)
from outbox_plugin.core.readiness import NotReady, Ready
from outbox_plugin.observe.harvester_facts import HarvesterFacts
from outbox_plugin.relay.events import (
    BeginsAgain,
    HarvestEvent,
    RowsRead,
    ShardStepped,
    TermBegan,
    TermFinished,
    WindowPublished,
)

NOW = 1_000.0
LEADS = ShardFacts(stepped_at=NOW, leads=True, led_at=NOW, moved_at=NOW, postgres_at=NOW)
STANDS_BY = ShardFacts(stepped_at=NOW, led_at=NOW, postgres_at=NOW)


@pytest.mark.parametrize("facts", [LEADS, STANDS_BY])
@pytest.mark.parametrize(
    ("known", "why"),
    [
        ({"stepped_at": None}, "the harvester is starting"),
        ({"stepped_at": NOW - STEP_SECONDS - 1}, "the supervisor has done nothing for 11 s"),
        ({"postgres_error": "Postgres: no"}, "Postgres: no"),
        ({"postgres_at": None}, "Postgres has not answered yet"),
        ({"postgres_at": NOW - POSTGRES_SECONDS - 1}, "Postgres has not answered for 16 s"),
    ],
)
def test_what_every_harvester_must_be(facts: ShardFacts, known: dict[str, Any], why: str) -> None:
    assert readiness(replace(facts, **known), NOW) == NotReady(why)


@pytest.mark.parametrize(
    ("known", "verdict"),
    [
        ({}, Ready("leads")),
        ({"paused": True}, Ready("leads, paused")),
        ({"moved_at": NOW - MOVED_SECONDS}, Ready("leads")),
        ({"moved_at": None}, NotReady("leads, and has sent none of the rows that wait yet")),
        ({"moved_at": NOW - 61}, NotReady("leads, and has sent none of the rows that wait for 61 s")),
        (
            {"moved_at": NOW - 61, "trouble": "topic t is held back"},
            NotReady("leads, and has sent none of the rows that wait for 61 s: topic t is held back"),
        ),
        ({"led_at": None}, Ready("leads")),
    ],
)
def test_a_leader_makes_progress(known: dict[str, Any], verdict: object) -> None:
    assert readiness(replace(LEADS, **known), NOW) == verdict


@pytest.mark.parametrize(
    ("known", "verdict"),
    [
        ({}, Ready("stands by")),
        ({"moved_at": None}, Ready("stands by")),
        ({"moved_at": 0.0}, Ready("stands by")),
        ({"led_at": NOW - LED_SECONDS}, Ready("stands by")),
        ({"led_at": None}, NotReady("no leader has been heard yet")),
        ({"led_at": NOW - 11}, NotReady("no leader has been heard for 11 s")),
        ({"led_at": NOW - 11, "trouble": "Kafka: away"}, NotReady("no leader has been heard for 11 s: Kafka: away")),
    ],
)
def test_a_standby_hears_a_leader(known: dict[str, Any], verdict: object) -> None:
    assert readiness(replace(STANDS_BY, **known), NOW) == verdict


@pytest.mark.parametrize(
    ("runs", "stepped_at", "alive"),
    [
        (True, None, True),
        (True, NOW - ALIVE_SECONDS, True),
        (True, NOW - ALIVE_SECONDS - 1, False),
        (False, NOW, False),
    ],
)
def test_alive_is_who_steps(runs: bool, stepped_at: float | None, alive: bool) -> None:
    assert is_alive(runs=runs, stepped_at=stepped_at, now=NOW) is alive


class Harvest:
    """A harvester of one shard, whose supervisor steps and whose table is looked at every second."""

    def __init__(self) -> None:
        self.now = NOW
        self.watch = HarvesterFacts(lambda: self.now)

    def happens(self, *events: HarvestEvent) -> None:
        for event in events:
            self.watch.observe(event)

    def goes_on(self, seconds: int, *, leads: bool, waiting: set[int] | None, paused: bool = False) -> None:
        for _ in range(seconds):
            self.now += 1.0
            self.happens(ShardStepped(0, "leader" if leads else "waiting", None if leads else self.now, None))
            self.watch.table_looked_at(waiting, {0} if paused else set())

    def verdict(self) -> object:
        return self.watch.readiness()[0]


def leader() -> Harvest:
    harvest = Harvest()
    harvest.happens(TermBegan(0, "leader", 0))
    harvest.goes_on(1, leads=True, waiting=set())
    assert harvest.verdict() == Ready("leads")
    return harvest


def test_a_leader_that_has_halted_is_not_ready_although_its_threads_live() -> None:
    """Its supervisor steps, its heartbeats go out and Postgres answers; it only sends no rows."""
    harvest = leader()
    harvest.goes_on(60, leads=True, waiting={0})
    assert harvest.verdict() == Ready("leads")
    harvest.goes_on(1, leads=True, waiting={0})
    assert harvest.verdict() == NotReady("leads, and has sent none of the rows that wait for 61 s")
    harvest.happens(WindowPublished(0, 0, 0.1, 0.0, ()))  # All of its rows were held back.
    assert isinstance(harvest.verdict(), NotReady)
    harvest.happens(WindowPublished(0, 5, 0.1, 0.0, ()))
    assert harvest.verdict() == Ready("leads")


def test_a_leader_whose_terms_begin_again_and_again_without_a_row_is_not_ready() -> None:
    """As where a topic's partition is away: each term alone would have time to send."""
    harvest = leader()
    for _ in range(8):
        harvest.goes_on(10, leads=True, waiting={0})
        harvest.happens(TermFinished(0, "leader", "Kafka: away", "OutcomeUnknown"))
        harvest.goes_on(1, leads=False, waiting={0})
        harvest.happens(TermBegan(0, "leader", 0))
    harvest.goes_on(1, leads=True, waiting={0})
    assert isinstance(harvest.verdict(), NotReady)
    harvest.happens(WindowPublished(0, 5, 0.1, 0.0, ()))
    assert harvest.verdict() == Ready("leads")
    harvest.goes_on(1_000, leads=False, waiting={0})  # Another leads.
    harvest.happens(TermBegan(0, "leader", 0))
    harvest.goes_on(60, leads=True, waiting={0})
    assert harvest.verdict() == Ready("leads")


def test_rows_that_nobody_can_see_may_wait_too() -> None:
    """A read that hangs on a lock, and looks that are given up for the same reason."""
    harvest = leader()
    harvest.goes_on(61, leads=True, waiting=None)
    assert isinstance(harvest.verdict(), NotReady)


def test_reads_that_find_nothing_count_where_a_look_takes_too_long() -> None:
    """Behind an old snapshot, millions of purged rows are slow to pass by who begins at the first."""
    harvest = leader()
    for _ in range(10):
        harvest.happens(RowsRead(0, 0, 0.001))
        harvest.goes_on(30, leads=True, waiting=None)
    assert harvest.verdict() == Ready("leads")
    harvest.happens(RowsRead(0, 1, 0.001))
    harvest.goes_on(61, leads=True, waiting=None)
    assert isinstance(harvest.verdict(), NotReady)


@pytest.mark.parametrize("known", [{"waiting": set()}, {"waiting": {1}}, {"waiting": {0}, "paused": True}])
def test_a_leader_that_has_nothing_to_send_is_ready(known: dict[str, Any]) -> None:
    harvest = leader()
    harvest.goes_on(1_000, leads=True, **known)
    assert isinstance(harvest.verdict(), Ready)


def test_who_is_resumed_has_time_to_send() -> None:
    harvest = leader()
    harvest.goes_on(1_000, leads=True, waiting={0}, paused=True)
    harvest.goes_on(60, leads=True, waiting={0})
    assert isinstance(harvest.verdict(), Ready)
    harvest.goes_on(1, leads=True, waiting={0})
    assert isinstance(harvest.verdict(), NotReady)


def test_a_standby_is_ready_while_rows_wait_for_another() -> None:
    harvest = Harvest()
    harvest.goes_on(1_000, leads=False, waiting={0})
    assert harvest.verdict() == Ready("stands by")


def test_who_has_led_is_ready_for_as_long_as_a_takeover_may_last() -> None:
    harvest = leader()
    harvest.happens(TermFinished(0, "leader", "Kafka: away", "LogUnavailable"))
    for _ in range(11):
        harvest.happens(ShardStepped(0, "waiting", None, "Kafka: away"))
        harvest.watch.table_looked_at({0}, set())
        last, harvest.now = harvest.verdict(), harvest.now + 1.0
    assert last == Ready("stands by")
    harvest.happens(ShardStepped(0, "candidate", None, "Kafka: away"))
    assert harvest.verdict() == NotReady("no leader has been heard for 11 s: Kafka: away")


def test_a_read_that_succeeds_disproves_a_look_that_failed() -> None:
    """Postgres may allow no more connections: that harms nobody who has one."""
    harvest = leader()
    harvest.watch.table_unavailable("Postgres: too many clients")
    assert harvest.verdict() == NotReady("Postgres: too many clients")
    harvest.happens(RowsRead(0, 0, 0.001))
    assert harvest.verdict() == Ready("leads")


def test_who_begins_again_is_alive_and_not_ready() -> None:
    harvest = leader()
    for _ in range(1_000):
        harvest.now += 10.0
        harvest.happens(BeginsAgain(0, "Kafka: away"))
    assert harvest.verdict() == NotReady("beginning again: Kafka: away")
    assert harvest.watch.is_alive(runs=True)
    harvest.goes_on(1, leads=False, waiting=set())
    assert harvest.verdict() == Ready("stands by")
