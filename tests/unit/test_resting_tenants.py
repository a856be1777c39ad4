"""Which tenants are put to rest, and what wakes them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outbox_plugin.core.resting_tenants import (
    CHECK_AGAIN_SECONDS,
    CHECKS_AT_ONCE,
    CROWDED_REST_SECONDS,
    LONGEST_REST_SECONDS,
    ActivitySnapshot,
    OutboxActivity,
    RestingTenants,
)

REST = 60.0


def look(last_id: int | None, *, has_rows: bool | None = None, is_writing: bool = False) -> ActivitySnapshot:
    """What is seen of the tenant `a`."""
    return ActivitySnapshot(
        {} if last_id is None else {"a": OutboxActivity(str(last_id), is_writing)},
        {} if has_rows is None else {"a": has_rows},
    )


def checked(rest: RestingTenants, last_id: int | None, now: float) -> list[str]:
    return rest.to_check(look(last_id).activity, now)


def quiet() -> RestingTenants:
    """The tenant `a` has been at rest since 0, and 5 is the last id that was drawn there."""
    rest = RestingTenants(REST)
    rest.follow(["a"])
    for _ in range(2):
        rest.update(look(5, has_rows=False), 0.0)
    return rest


def test_a_new_tenant_is_checked_before_it_is_started() -> None:
    rest = RestingTenants(REST)
    rest.follow(["a"])
    assert rest.resting == {"a"}
    assert checked(rest, 5, 0.0) == ["a"]
    rest.update(look(5, has_rows=True), 1.0)
    assert rest.resting == set()


def test_a_tenant_is_put_to_rest_when_it_is_quiet_and_empty() -> None:
    rest = quiet()
    rest.update(look(6, has_rows=True), 1.0)
    assert rest.resting == set()
    assert checked(rest, 6, 1.0 + REST - 0.1) == []
    rest.update(look(6), 1.0 + REST)  # It was not checked.
    assert rest.resting == set()
    assert checked(rest, 6, 1.0 + REST) == ["a"]
    rest.update(look(6, has_rows=True), 1.0 + REST)
    assert rest.resting == set()
    assert checked(rest, 6, 2 * REST) == []
    rest.update(look(7, has_rows=False), 1.0 + 2 * REST)
    assert rest.resting == set()
    rest.update(look(7, has_rows=False), 1.0 + 3 * REST)
    assert rest.resting == {"a"}


def test_a_tenant_is_put_to_rest_sooner_while_others_wait_for_its_place() -> None:
    rest = quiet()
    rest.update(look(6, has_rows=True), 1.0)
    rest.set_crowded(is_crowded=True)
    assert checked(rest, 6, 1.0 + CROWDED_REST_SECONDS) == ["a"]
    rest.set_crowded(is_crowded=False)
    assert checked(rest, 6, 1.0 + CROWDED_REST_SECONDS) == []
    rest.set_crowded(is_crowded=True)
    rest.update(look(6, has_rows=False), 1.0 + CROWDED_REST_SECONDS)
    assert rest.resting == {"a"}


def test_what_wakes_a_tenant() -> None:
    for what, seen in {
        "somebody is writing": look(5, is_writing=True),
        "it has rows": look(6, has_rows=True),
        "it has rows with ids of their own making": look(5, has_rows=True),
        "its ids cannot be seen any more": look(None),
    }.items():
        rest = quiet()
        rest.update(look(5), 1.0)
        assert rest.resting == {"a"}
        rest.update(seen, 2.0)
        assert rest.resting == set(), what


def test_drawn_ids_without_rows_wake_nobody() -> None:
    """The sequences of all tenants jump when Postgres recovers from a crash."""
    for last_id in (1, 38):
        rest = quiet()
        assert checked(rest, 5, 1.0) == []
        assert checked(rest, last_id, 1.0) == ["a"]
        rest.update(look(last_id, has_rows=False), 1.0)
        assert rest.resting == {"a"}
        assert checked(rest, last_id, 1.5) == ["a"]  # A row may have been committed just after the first look.
        rest.update(look(last_id, has_rows=False), 1.5)
        assert rest.resting == {"a"}
        assert checked(rest, last_id, 2.0) == []


def test_a_tenant_whose_id_was_drawn_is_checked_until_it_was_seen_to_be_empty() -> None:
    rest = quiet()
    for last_id, has_rows in ((6, None), (6, None), (7, False), (8, False)):
        rest.update(look(last_id, has_rows=has_rows), 1.0)
        assert checked(rest, last_id, 1.0) == ["a"]
    rest.update(look(8, has_rows=True), 1.0)
    assert rest.resting == set()


def test_a_tenant_whose_writer_has_notified_is_checked_although_no_id_was_drawn() -> None:
    """A row may have an id of its own making."""
    rest = quiet()
    assert checked(rest, 5, 1.0) == []
    rest.note_writers(["a", "one that is gone"])
    assert checked(rest, 5, 1.0) == ["a"]
    rest.update(look(5), 1.0)  # There was no time to check it.
    assert checked(rest, 5, 1.0) == ["a"]
    rest.update(look(5, has_rows=False), 1.0)  # A harvester of another process was faster.
    assert checked(rest, 5, 1.0) == []
    rest.note_writers(["a"])
    rest.update(look(5, has_rows=True), 1.0)
    assert rest.resting == set()


def test_a_tenant_whose_ids_cannot_be_seen_is_never_put_to_rest() -> None:
    rest = RestingTenants(REST)
    rest.follow(["a"])
    for now in range(0, 1_000, 100):
        rest.update(look(None, has_rows=False), float(now))
        assert rest.resting == set()


def test_a_resting_tenant_is_checked_from_time_to_time_and_woken_in_the_end() -> None:
    rest = quiet()
    assert checked(rest, 5, CHECK_AGAIN_SECONDS - 0.1) == []
    assert checked(rest, 5, CHECK_AGAIN_SECONDS) == ["a"]
    rest.update(look(5, has_rows=False), LONGEST_REST_SECONDS - 0.1)
    assert rest.resting == {"a"}
    rest.update(look(5), LONGEST_REST_SECONDS)
    assert rest.resting == set()


def activity_of(names: list[str], last_id: int = 0) -> dict[str, OutboxActivity]:
    return {name: OutboxActivity(str(last_id), is_writing=False) for name in names}


def test_of_many_tenants_the_longest_unseen_come_first() -> None:
    rest = RestingTenants(REST)
    names = [str(number) for number in range(CHECKS_AT_ONCE + 1)]
    rest.follow(names)
    first = rest.to_check(activity_of(names), 0.0)
    rest.update(ActivitySnapshot(activity_of(names), dict.fromkeys(first, False)), 0.0)
    [last] = set(names) - set(first)
    assert rest.to_check(activity_of(names), CHECK_AGAIN_SECONDS)[0] == last


def many_quiet(names: list[str]) -> RestingTenants:
    """These tenants, all of them at rest since 0."""
    rest = RestingTenants(REST)
    rest.follow(names)
    for _ in range(2):
        rest.update(ActivitySnapshot(activity_of(names), dict.fromkeys(names, False)), 0.0)
    return rest


def test_tenants_with_new_ids_are_checked_before_those_whose_time_has_come() -> None:
    names = [str(number) for number in range(10 * CHECKS_AT_ONCE)]
    rest = many_quiet(names)
    seen = {**activity_of(names), **activity_of(["777"], 1)}
    assert rest.to_check(seen, CHECK_AGAIN_SECONDS)[0] == "777"


def test_tenants_that_have_rested_for_long_enough_are_woken_one_by_one() -> None:
    """All have rested since the service began. Tenants with events must not wait until all these have been started."""
    names = [str(number) for number in range(1_000)]
    rest = many_quiet(names)
    woken: set[str] = set()
    for number in range(1, len(names) + 1):
        rest.update(ActivitySnapshot(activity_of(names), {}), LONGEST_REST_SECONDS + number / 1_000)
        woken |= set(names) - rest.resting
        assert len(woken) == number
    assert len(woken) == len(names)


def test_a_tenant_that_was_gone_is_new() -> None:
    rest = quiet()
    rest.follow([])
    assert rest.resting == set()
    rest.follow(["a"])
    assert checked(rest, 5, 0.0) == ["a"]


INSERTS = st.sampled_from(["nothing", "before the look", "between its two parts", "and is open", "and rolled back"])


@given(st.lists(st.tuples(st.floats(0.1, 100.0), INSERTS, st.booleans()), max_size=60))
def test_an_outbox_with_rows_is_woken_and_stays_awake(steps: list[tuple[float, str, bool]]) -> None:
    """Rows are inserted with ids that are drawn, and relayed where there is a harvester.

    A look first sees who has locks, then the last id, then the rows. Inserts come between these.
    """
    rest, now, last_id, rows, opened = RestingTenants(REST), 0.0, 0, 0, 0
    rest.follow(["a"])
    for seconds, inserts, drains in [*steps, (0.5, "nothing", False), (0.5, "nothing", False)]:
        now += seconds
        rows, opened = rows + opened, 0  # What was open is committed.
        last_id += inserts != "nothing"
        rows += inserts == "before the look"
        opened = int(inserts == "and is open")  # It has drawn its id after the locks were seen, and commits later.
        is_due = bool(checked(rest, last_id, now))
        found = look(last_id, has_rows=rows > 0 if is_due else None)
        rows += inserts == "between its two parts"
        rest.update(found, now)
        is_resting = "a" in rest.resting
        assert not (is_resting and found.has_rows.get("a"))
        if inserts == "nothing":
            assert not (is_resting and rows)
        if drains and not is_resting:
            rows = 0
