"""Which tenants are started and stopped, and when one that fails is tried again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outbox_plugin.core.tenant_schedule import RETRY_FIRST, RETRY_LAST, WELL_SECONDS, Changes, TenantSchedule

ROOM = 8


def test_tenants_that_come_are_started_and_tenants_that_go_are_stopped() -> None:
    schedule = TenantSchedule()
    assert schedule.changes(["a", "b"], 0.0, ROOM) == Changes(start=("a", "b"))
    assert schedule.changes(["a", "b"], 1.0, ROOM) == Changes()
    assert schedule.changes(["b", "c"], 2.0, ROOM) == Changes(start=("c",), stop=("a",))
    assert schedule.running == 2


def test_no_more_are_started_than_there_is_room_for() -> None:
    schedule = TenantSchedule()
    assert schedule.changes("abcde", 0.0, 2).start == ("a", "b")
    assert schedule.changes("abcde", 1.0, 0).start == ()
    assert schedule.changes("abcde", 2.0, 2).start == ("c", "d")


def test_a_tenant_that_fails_is_started_again_after_longer_and_longer_waits() -> None:
    schedule, now = TenantSchedule(), 0.0
    waits = []
    for _ in range(6):
        assert schedule.changes(["a"], now, ROOM).start == ("a",)
        seconds = schedule.failed_at("a", now)
        assert seconds is not None
        assert schedule.failed == ("a",)
        assert schedule.changes(["a"], now + seconds - 0.1, ROOM) == Changes()
        waits.append(seconds)
        now += seconds
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (RETRY_FIRST, RETRY_LAST)
    schedule.changes(["a"], now, ROOM)
    assert schedule.failed_at("a", now + WELL_SECONDS) == RETRY_FIRST


def test_a_tenant_that_is_gone_is_forgotten_with_its_failures() -> None:
    schedule = TenantSchedule()
    schedule.changes(["a"], 0.0, ROOM)
    schedule.failed_at("a", 0.0)
    assert schedule.changes([], 0.1, ROOM) == Changes()  # It does not run, so there is nothing to stop.
    assert schedule.failed == ()
    assert schedule.changes(["a"], 0.2, ROOM).start == ("a",)
    schedule.changes([], 0.3, ROOM)
    assert schedule.failed_at("a", 0.4) is None


@given(st.lists(st.tuples(st.sets(st.sampled_from("abcd")), st.sets(st.sampled_from("abcd")), st.integers(0, 3))))
def test_a_tenant_is_never_started_twice_and_never_forgotten_while_it_runs(
    steps: list[tuple[set[str], set[str], int]],
) -> None:
    schedule, runs = TenantSchedule(), set[str]()
    for number, (found, failing, room) in enumerate(steps):
        now = number * RETRY_LAST
        for schema in sorted(runs & failing):
            schedule.failed_at(schema, now)
            runs.discard(schema)
        changes = schedule.changes(sorted(found), now + RETRY_LAST, room)
        assert runs.isdisjoint(changes.start)
        assert runs.issuperset(changes.stop)
        runs = (runs - set(changes.stop)) | set(changes.start)
        assert runs <= found
        assert schedule.running == len(runs)
        assert len(changes.start) == min(room, len(found - (runs - set(changes.start))))
