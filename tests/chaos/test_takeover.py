"""Promises 1 to 5 while harvesters are killed, paused and replaced, on the real servers."""

from __future__ import annotations

import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from outbox_plugin import Settings
from outbox_plugin.status.reader import read_status
from tests.harvesting import (
    HarvesterProcess,
    assert_exactly_once_in_order,
    backlog,
    consume,
    drained,
    harvesters,
    insert_numbered,
    members,
    publish_but_kill_before_the_purge,
)
from tests.support import eventually

pytestmark = pytest.mark.chaos

ROWS = 60_000


def the_leader(running: list[HarvesterProcess]) -> HarvesterProcess:
    """Wait until one of them leads, and no other: who joins late may take the shard over."""
    found: list[list[HarvesterProcess]] = []  # To ask again may give another answer.

    def is_clear() -> bool:
        found.append([process for process in running if process.alive and process.leads()])
        return len(found[-1]) == 1

    eventually(is_clear, 60)
    return found[-1][0]


def in_mid_drain(settings: Settings, before: int) -> bool:
    return 0 < backlog(settings) < before


def test_five_leaders_killed_in_mid_drain(settings: Settings, topic: str, tmp_path: Path) -> None:
    """kill -9 of the leader with a standby running, five times: nothing lost, repeated or out of order."""
    with harvesters(settings, tmp_path, 2) as running:
        for round_ in range(5):
            the_leader(running)
            insert_numbered(settings, topic, round_ * ROWS, ROWS)
            eventually(lambda: in_mid_drain(settings, ROWS), 60)
            leader = the_leader(running)
            leader.kill()
            running.remove(leader)
            running.append(HarvesterProcess(settings, tmp_path / f"replacement-{round_}.log"))
            drained(settings)
    assert_exactly_once_in_order(consume(settings, topic), 0, 5 * ROWS)


def test_a_leader_that_was_paused_wakes_up_and_harms_nothing(settings: Settings, topic: str, tmp_path: Path) -> None:
    """SIGSTOP past every time-out: a standby takes over, and the zombie's open transaction comes to nothing."""
    with harvesters(settings, tmp_path, 2) as running:
        eventually(lambda: len(members(settings)) == 2, 60)
        zombie = the_leader(running)
        [standby] = [process for process in running if process is not zombie]
        insert_numbered(settings, topic, 0, ROWS)
        eventually(lambda: in_mid_drain(settings, ROWS), 60)
        zombie.signal(signal.SIGSTOP)
        eventually(standby.leads, 60)
        drained(settings)
        insert_numbered(settings, topic, ROWS, ROWS)
        zombie.signal(signal.SIGCONT)
        eventually(lambda: not zombie.leads(), 60)
        drained(settings)
        assert zombie.alive
        assert standby.leads()
    assert_exactly_once_in_order(consume(settings, topic), 0, 2 * ROWS)


def test_sigterm_hands_over_at_once(settings: Settings, topic: str, tmp_path: Path) -> None:
    with harvesters(settings, tmp_path, 2) as running:
        eventually(lambda: len(members(settings)) == 2, 60)
        leader = the_leader(running)
        [standby] = [process for process in running if process is not leader]
        insert_numbered(settings, topic, 0, ROWS)
        eventually(lambda: in_mid_drain(settings, ROWS), 60)
        assert leader.terminate() == 0
        eventually(standby.leads, 60)
        drained(settings)
        assert "handed over" in leader.log
        assert "Traceback" not in leader.log
    assert_exactly_once_in_order(consume(settings, topic), 0, ROWS)


def test_killed_after_the_commit_and_before_the_purge(settings: Settings, topic: str, tmp_path: Path) -> None:
    """The instant that only the progress record can tell: published, not deleted, and the leader is gone."""
    insert_numbered(settings, topic, 0, 1_000)
    publish_but_kill_before_the_purge(settings, tmp_path)
    with harvesters(settings, tmp_path / "successor") as [successor]:
        drained(settings)
        eventually(lambda: "(1000 published rows of the last leader deleted)" in successor.log, 30)
        eventually(lambda: read_status(settings).shards[0].recovered_rows == 1_000, 30)
    assert_exactly_once_in_order(consume(settings, topic), 0, 1_000)


def test_killed_again_and_again_under_a_steady_writer(settings: Settings, topic: str, tmp_path: Path) -> None:
    """One harvester only, killed at random moments and started again, while rows keep coming."""
    stop, written = threading.Event(), 0

    def write() -> None:
        nonlocal written
        while not stop.is_set():
            insert_numbered(settings, topic, written, 50, keys=7)
            written += 50
            time.sleep(0.005)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for round_ in range(4):
            with harvesters(settings, tmp_path) as [harvester]:
                eventually(harvester.leads, 60)
                enough = written + 500 * (1 + round_ % 2)
                eventually(partial(lambda wanted: written > wanted, enough), 60)
    finally:
        stop.set()
        writer.join()
    with harvesters(settings, tmp_path / "successor"):
        drained(settings)
    assert_exactly_once_in_order(consume(settings, topic), 0, written)
