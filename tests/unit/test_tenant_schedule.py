"""Which tenants are started and stopped, and when one that fails is tried again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outbox_plugin.core.tenant_schedule import (
    LOG_AGAIN_SECONDS,
    RETRY_FIRST,
    RETRY_LAST,
    TURN_SECONDS,
    WELL_SECONDS,
    Changes,
    TenantSchedule,
)

ROOM = 8


def found(*schemas: str, **refused: str) -> dict[str, str | None]:
    """Schemas that have outboxes, and those that must not be harvested, with the reasons; sorted."""
    both: dict[str, str | None] = {**dict.fromkeys(schemas), **refused}
    return dict(sorted(both.items()))


def failed_at(schedule: TenantSchedule, schema: str, now: float, reason: str = "broken") -> float:
    """Let a harvester fail; returns after how many seconds it is started again."""
    retry = schedule.failed_at(schema, reason, now)
    assert retry is not None
    return retry.seconds


def test_tenants_that_come_are_started_and_tenants_that_go_are_stopped() -> None:
    schedule = TenantSchedule()
    assert schedule.changes(found("a", "b"), 0.0, ROOM) == Changes(start=("a", "b"))
    assert schedule.changes(found("a", "b"), 1.0, ROOM) == Changes()
    assert schedule.changes(found("b", "c"), 2.0, ROOM) == Changes(start=("c",), gone=("a",))
    assert schedule.running == 2


def test_no_more_are_started_than_there_is_room_for() -> None:
    schedule = TenantSchedule()
    assert schedule.changes(found(*"abcde"), 0.0, 2).start == ("a", "b")
    assert schedule.changes(found(*"abcde"), 1.0, 0).start == ()
    assert schedule.changes(found(*"abcde"), 2.0, 2).start == ("c", "d")


def test_tenants_wait_while_all_places_are_taken() -> None:
    schedule = TenantSchedule()
    assert schedule.changes(found(*"abcde"), 0.0, ROOM, places=2) == Changes(start=("a", "b"))
    assert (schedule.running, schedule.waiting, schedule.failed) == (2, 3, ())
    assert schedule.changes(found(*"abcde"), 1.0, ROOM, {"a"}, places=2) == Changes(start=("c",), rest=("a",))
    assert (schedule.running, schedule.waiting) == (2, 2)


def test_tenants_take_turns_where_more_of_them_are_busy_than_there_are_places() -> None:
    schedule, now = TenantSchedule(), 0.0
    turns: list[str] = []
    for _ in range(10):
        changes = schedule.changes(found(*"abcde"), now, ROOM, places=2)
        turns += changes.start
        assert schedule.failed == ()
        now += TURN_SECONDS / 2
    assert "".join(turns) == "abcdeabcdeabcde"[: len(turns)]
    assert len(turns) >= 8


def test_no_tenant_makes_place_where_none_waits() -> None:
    schedule = TenantSchedule()
    schedule.changes(found("a", "b"), 0.0, ROOM, places=2)
    assert schedule.changes(found("a", "b"), 100 * TURN_SECONDS, ROOM, places=2) == Changes()
    assert schedule.changes(found("a", "b", "c"), 100 * TURN_SECONDS, ROOM, places=2) == Changes(preempted=("a",))
    assert schedule.changes(found("a", "b", "c"), 101 * TURN_SECONDS, ROOM, places=2).start == ("c",)


def test_a_tenant_that_fails_is_started_again_after_longer_and_longer_waits() -> None:
    schedule, now = TenantSchedule(), 0.0
    waits = []
    for _ in range(6):
        assert schedule.changes(found("a"), now, ROOM).start == ("a",)
        seconds = failed_at(schedule, "a", now)
        assert schedule.failed == ("a",)
        assert schedule.changes(found("a"), now + seconds - 0.1, ROOM) == Changes()
        waits.append(seconds)
        now += seconds
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (RETRY_FIRST, RETRY_LAST)
    schedule.changes(found("a"), now, ROOM)
    assert failed_at(schedule, "a", now + WELL_SECONDS) == RETRY_FIRST


def test_a_tenant_that_ran_until_it_came_to_rest_waits_no_longer_for_what_failed_before() -> None:
    """It may never run for long at a time, and fail once in a month."""
    schedule, now = TenantSchedule(), 0.0
    for _ in range(6):
        schedule.changes(found("a"), now, ROOM)
        now += failed_at(schedule, "a", now)
    schedule.changes(found("a"), now, ROOM)
    assert schedule.changes(found("a"), now + 2.0, ROOM, {"a"}).rest == ("a",)
    schedule.changes(found("a"), now + 3.0, ROOM)
    assert failed_at(schedule, "a", now + 3.0) == RETRY_FIRST


def test_a_tenant_that_is_gone_is_forgotten_with_its_failures() -> None:
    schedule = TenantSchedule()
    schedule.changes(found("a"), 0.0, ROOM)
    failed_at(schedule, "a", 0.0)
    assert schedule.changes({}, 0.1, ROOM) == Changes(gone=("a",))
    assert schedule.failed == ()
    assert schedule.changes(found("a"), 0.2, ROOM).start == ("a",)
    schedule.changes({}, 0.3, ROOM)
    assert schedule.failed_at("a", "broken", 0.4) is None


def test_tenants_that_are_refused_take_no_place_from_others() -> None:
    schedule = TenantSchedule()
    refused = {f"a{number:04}": "its owner is not trusted" for number in range(1_000)}
    assert schedule.changes(found("z", **refused), 0.0, 1) == Changes(start=("z",), refused=tuple(refused))
    assert schedule.failed == tuple(refused)
    assert schedule.running == 1
    assert schedule.changes(found("z", **refused), 1.0, 1) == Changes()


def test_a_tenant_that_is_refused_while_it_runs_is_stopped_and_started_once_it_is_trusted_again() -> None:
    schedule = TenantSchedule()
    schedule.changes(found("a"), 0.0, ROOM)
    for now in (1.0, 3.0):
        assert schedule.changes(found(a="no"), now, ROOM) == Changes(refused=("a",))
        assert schedule.failed_at("a", "it was stopped", now) is None
        assert (schedule.running, schedule.failed) == (0, ("a",))
        assert schedule.changes(found("a"), now + 1.0, ROOM) == Changes(start=("a",))


def test_tenants_that_fail_are_started_after_those_that_are_new_and_take_turns() -> None:
    schedule, now = TenantSchedule(), 0.0
    broken = [f"a{number}" for number in range(5)]
    schedule.changes(found(*broken), now, ROOM)
    for number, schema in enumerate(broken):
        failed_at(schedule, schema, now + number)
    now = 1_000.0  # All are due.
    assert schedule.changes(found(*broken, "z"), now, 1).start == ("z",)
    turns = []
    for _ in broken:
        [schema] = schedule.changes(found(*broken, "z"), now, 1).start
        failed_at(schedule, schema, now)
        now += RETRY_LAST  # The first one is due again, too.
        turns.append(schema)
    assert turns == broken


def test_a_failure_is_news_when_it_is_the_first_or_for_another_reason_or_long_after_the_last_news() -> None:
    schedule, news = TenantSchedule(), []
    for number, reason in enumerate(["locked", "locked", "broken", "broken"]):
        schedule.changes(found("a"), number * RETRY_LAST, ROOM)
        retry = schedule.failed_at("a", reason, number * RETRY_LAST)
        assert retry is not None
        news.append(retry.is_news)
    assert news == [True, False, True, False]
    for now, reason in ((LOG_AGAIN_SECONDS, "broken"), (LOG_AGAIN_SECONDS * 1.1, "broken")):
        schedule.changes(found("a"), now + 2 * RETRY_LAST - 1.0, ROOM)
        retry = schedule.failed_at("a", reason, now + 2 * RETRY_LAST)
        assert retry is not None
        assert retry.is_news is (now == LOG_AGAIN_SECONDS)
    schedule.changes(found("a"), LOG_AGAIN_SECONDS * 1.5, ROOM)
    retry = schedule.failed_at("a", "broken", LOG_AGAIN_SECONDS * 1.5 + WELL_SECONDS)
    assert retry is not None
    assert retry.is_news


def test_a_refusal_is_news_when_it_is_the_first_or_for_another_reason_or_long_after_the_last_news() -> None:
    schedule = TenantSchedule()
    assert schedule.changes(found(a="not trusted"), 0.0, ROOM).refused == ("a",)
    assert schedule.changes(found(a="not trusted"), LOG_AGAIN_SECONDS - 1.0, ROOM).refused == ()
    assert schedule.changes(found(a="not trusted"), LOG_AGAIN_SECONDS, ROOM).refused == ("a",)
    assert schedule.changes(found(a="too long"), LOG_AGAIN_SECONDS, ROOM).refused == ("a",)


def test_a_tenant_at_rest_is_stopped_and_neither_started_nor_counted_as_failed_until_it_is_woken() -> None:
    schedule = TenantSchedule()
    assert schedule.changes(found("a", "b"), 0.0, ROOM, {"b"}) == Changes(start=("a",))
    assert schedule.changes(found("a", "b"), 1.0, ROOM, {"a", "b"}) == Changes(rest=("a",))
    assert (schedule.running, schedule.failed) == (0, ())
    assert schedule.changes(found("a", "b"), 2.0, ROOM, {"a", "b"}) == Changes()
    assert schedule.failed_at("a", "it failed while it was stopped", 2.0) is None
    assert schedule.changes(found("a", "b"), 3.0, ROOM, {"b"}) == Changes(start=("a",))


def test_a_tenant_at_rest_can_be_refused_and_can_go() -> None:
    schedule = TenantSchedule()
    schedule.changes(found("a", "b"), 0.0, ROOM, {"a", "b"})
    assert schedule.changes(found("b", a="no"), 1.0, ROOM, {"a", "b"}) == Changes(refused=("a",))
    assert schedule.failed == ("a",)
    assert schedule.changes(found("a"), 2.0, ROOM, {"a", "b"}) == Changes(gone=("b",))
    assert not schedule.failed


@given(
    st.lists(
        st.tuples(
            st.sets(st.sampled_from("abcd")),
            st.sets(st.sampled_from("abcd")),
            st.sets(st.sampled_from("abcd")),
            st.integers(0, 3),
        )
    )
)
def test_a_tenant_is_never_started_twice_and_never_forgotten_while_it_runs(
    steps: list[tuple[set[str], set[str], set[str], int]],
) -> None:
    schedule, runs = TenantSchedule(), set[str]()
    for number, (present, refused, failing, room) in enumerate(steps):
        now = number * RETRY_LAST
        for schema in sorted(runs & failing):
            failed_at(schedule, schema, now)
            runs.discard(schema)
        given_ = found(*present, **dict.fromkeys(present & refused, "no"))
        changes = schedule.changes(given_, now + RETRY_LAST, room)
        assert runs.isdisjoint(changes.start)
        assert runs <= present | set(changes.gone)
        assert runs & refused & present <= set(changes.refused)
        runs = (runs - set(changes.gone) - set(changes.refused)) | set(changes.start)
        assert runs <= present - refused
        assert schedule.running == len(runs)
        assert set(schedule.failed).isdisjoint(runs)
        may_run = present - refused
        assert len(changes.start) == min(room, len(may_run - (runs - set(changes.start))))
