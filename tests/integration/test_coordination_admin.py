"""An operator looks at a group of consumers, pauses it, moves it and lets it go on."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest
from confluent_kafka.admin import AdminClient

from outbox_plugin.coordination import Admin, ReleaseGroup
from outbox_plugin.coordination.log import CoordinationLog
from outbox_plugin.errors import UserError
from tests.harvesting import run_outbox
from tests.integration.test_coordination import (
    INTERVAL,
    PARTITIONS,
    Running,
    forget_the_log,
    held,
    orders,
    start,
    write,
)
from tests.support import eventually

pytestmark = pytest.mark.integration
__all__ = ["orders", "start", "write"]  # Fixtures.


@pytest.fixture
def admin(bootstrap_servers: str, group: str) -> Admin:
    return Admin(
        bootstrap_servers=bootstrap_servers, coordination_topic=f"{group}-claims", heartbeat_interval_seconds=INTERVAL
    )


@pytest.fixture
def outbox(bootstrap_servers: str, group: str) -> Callable[..., CompletedProcess[str]]:
    """Runs `outbox consumers …`."""
    env = {**os.environ, "OUTBOX_BOOTSTRAP_SERVERS": bootstrap_servers}
    options = ("--coordination-topic", f"{group}-claims", "--heartbeat-interval", str(INTERVAL))
    return lambda *arguments: run_outbox("consumers", *options, *arguments, env=env)


def test_pause_set_position_and_resume(
    start: Callable[..., Running], write: Callable[[range], None], admin: Admin, group: str, orders: str
) -> None:
    """Consumption stops within two heartbeats everywhere, and goes on at exactly the offsets that were set."""
    write(range(600))
    one, two = start("one"), start("two")
    eventually(lambda: len(one.seen) + len(two.seen) >= 600 and held(one, two) == [3, 3], 20)
    began = time.monotonic()
    assert admin.pause(group) == []
    assert time.monotonic() - began < 2 * INTERVAL
    assert held(one, two) == [0, 0]
    known = admin.world(group)
    assert known.pauses[group].by == "outbox-admin"
    assert {row.state for row in known.rows} == {"paused"}
    assert [row.offset for row in known.rows] == [100] * PARTITIONS
    assert group in admin.world().pauses

    one.seen.clear()
    two.seen.clear()
    write(range(600, 660))
    admin.set_position(group, {(orders, partition): 10 * partition for partition in range(PARTITIONS - 1)})
    third = start("three")
    time.sleep(2 * INTERVAL)  # That nothing happens can only be waited for.
    assert [*one.seen, *two.seen, *third.seen] == []

    admin.resume(group)
    wanted = [10 * partition for partition in range(PARTITIONS - 1)] + [100]
    total = sum(110 - offset for offset in wanted)
    eventually(lambda: len(one.seen) + len(two.seen) + len(third.seen) >= total, 30)
    seen = [*one.seen, *two.seen, *third.seen]
    assert [min(at for partition, at, _ in seen if partition == each) for each in range(PARTITIONS)] == wanted
    assert len(seen) == len(set(seen)) == total


def test_a_pause_ends_by_itself(
    start: Callable[..., Running], write: Callable[[range], None], admin: Admin, group: str
) -> None:
    one = start("one")
    eventually(lambda: held(one) == [PARTITIONS], 20)
    admin.pause(group, seconds=2 * INTERVAL)  # It returns when all have stopped, which is sooner.
    assert held(one) == [0]
    eventually(lambda: held(one) == [PARTITIONS], 20)


def test_of_two_operators_the_one_whom_the_log_has_last_counts_for_those_who_come_later(
    admin: Admin, bootstrap_servers: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pauses the group, and is slow to keep that; another resumes it meanwhile."""
    keep, resumes = CoordinationLog.keep_pause, [admin.resume]

    def slowly(log: CoordinationLog, message: ReleaseGroup) -> None:
        while resumes:
            resumes.pop()(group)
        keep(log, message)

    monkeypatch.setattr(CoordinationLog, "keep_pause", slowly)
    admin.pause(group)
    assert admin.world(group).pauses == {}
    forget_the_log(AdminClient({"bootstrap.servers": bootstrap_servers}), f"{group}-claims")
    assert admin.world(group).pauses == {}


def test_the_lag_is_shown_in_records_and_in_time(
    start: Callable[..., Running],
    write: Callable[[range], None],
    admin: Admin,
    outbox: Callable[..., CompletedProcess[str]],
    group: str,
    orders: str,
) -> None:
    write(range(60))
    one = start("one")
    eventually(lambda: len(one.seen) == 60, 20)
    eventually(lambda: {lag.records for lag in admin.world(group).lags.values()} == {0}, 30)
    assert {lag.seconds for lag in admin.world(group).lags.values()} == {0.0}
    admin.pause(group)
    began = time.time()
    write(range(60, 120))
    eventually(lambda: [lag.records for lag in admin.world(group).lags.values()] == [10] * PARTITIONS, 20)
    listed = json.loads(outbox("list", group, "--json").stdout)["partitions"]
    assert [each["lag_records"] for each in listed] == [10] * PARTITIONS
    assert all(0 < each["lag_seconds"] < time.time() - began + 1 for each in listed)
    header = outbox("list", group).stdout
    assert "lag" in header
    assert "behind" in header


def test_a_group_that_is_not_paused_is_not_moved(admin: Admin, group: str, orders: str) -> None:
    with pytest.raises(UserError, match="is not paused; expected: `outbox consumers pause"):
        admin.set_position(group, {(orders, 0): 0})


def test_only_what_is_there_can_be_a_position(
    admin: Admin, group: str, orders: str, write: Callable[[range], None]
) -> None:
    write(range(6))
    admin.pause(group)
    with pytest.raises(UserError, match=f"no partition {PARTITIONS} of {orders}: it has {PARTITIONS}"):
        admin.set_position(group, {(orders, PARTITIONS): 0})
    with pytest.raises(UserError, match="cannot be consumed from 2: expected an offset from 0, its first record, to 1"):
        admin.set_position(group, {(orders, 0): 2})


def test_the_command_line(
    start: Callable[..., Running],
    write: Callable[[range], None],
    outbox: Callable[..., CompletedProcess[str]],
    group: str,
    orders: str,
) -> None:
    write(range(60))
    one = start("one")
    eventually(lambda: len(one.seen) == 60, 20)
    instance = one.consumer.instance_id
    eventually(lambda: outbox("list").stdout.count(instance) == PARTITIONS, 30)
    said = outbox("list", group)
    assert said.returncode == 0, said.stderr
    assert all(word in said.stdout for word in (group, orders, "fresh", "one", "s ago"))

    paused = outbox("pause", group)
    assert (paused.returncode, paused.stdout) == (0, f"the group {group} is paused until it is resumed\n")
    assert f"the group {group} is paused until it is resumed, by outbox-admin" in outbox("list").stdout
    moved = outbox("set-position", group, orders, "0=3", "1=10")
    assert moved.returncode == 0, moved.stderr
    assert f"goes on at 3 in partition 0 of {orders}" in moved.stdout
    listed = json.loads(outbox("list", group, "--json").stdout)
    assert listed["paused"] == {group: {"until": None, "by": "outbox-admin"}}
    assert [each["offset"] for each in listed["partitions"]] == [3, 10, 10, 10, 10, 10]
    one.seen.clear()
    assert outbox("resume", group).stdout == f"the group {group} goes on\n"
    eventually(lambda: [at for _, at, _ in sorted(one.seen)] == list(range(3, 10)), 20)


@pytest.mark.parametrize("position", ["0", "0=x", "=1", "a=1", "0=-1"])
def test_a_position_that_is_none_is_refused_in_one_line(
    outbox: Callable[..., CompletedProcess[str]], group: str, orders: str, position: str
) -> None:
    said = outbox("set-position", group, orders, position)
    assert said.returncode == 2
    assert said.stderr == f"outbox: expected PARTITION=OFFSET, two whole numbers such as 0=42 (given: {position!r})\n"
