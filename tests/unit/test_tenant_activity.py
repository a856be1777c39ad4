"""Which tenants are put to rest, and what wakes them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outbox_plugin.core.tenant_activity import (
    CROWDED_REST_SECONDS,
    LONGEST_REST_SECONDS,
    LOOK_AGAIN_SECONDS,
    LOOKS_AT_ONCE,
    Look,
    Seen,
    TenantActivity,
)

REST = 60.0


def look(last_id: int | None, *, has_rows: bool | None = None, is_writing: bool = False) -> Look:
    """What is seen of the tenant `a`."""
    return Look(
        {} if last_id is None else {"a": Seen(str(last_id), is_writing)}, {} if has_rows is None else {"a": has_rows}
    )


def quiet() -> TenantActivity:
    """The tenant `a` has been at rest since 0, and 5 is the last id that was drawn there."""
    activity = TenantActivity(REST)
    activity.follow(["a"])
    activity.looked(look(5, has_rows=False), 0.0)
    return activity


def test_a_new_tenant_is_looked_into_before_it_is_started() -> None:
    activity = TenantActivity(REST)
    activity.follow(["a"])
    assert activity.resting == {"a"}
    assert activity.to_look_into(0.0) == ["a"]
    activity.looked(look(5, has_rows=True), 1.0)
    assert activity.resting == set()


def test_a_tenant_is_put_to_rest_when_it_is_quiet_and_empty() -> None:
    activity = quiet()
    activity.looked(look(6), 1.0)
    assert activity.resting == set()
    assert activity.to_look_into(1.0 + REST - 0.1) == []
    activity.looked(look(6), 1.0 + REST)  # It was not looked into.
    assert activity.resting == set()
    assert activity.to_look_into(1.0 + REST) == ["a"]
    activity.looked(look(6, has_rows=True), 1.0 + REST)
    assert activity.resting == set()
    assert activity.to_look_into(2 * REST) == []
    activity.looked(look(6, has_rows=False), 1.0 + 2 * REST)
    assert activity.resting == {"a"}


def test_a_tenant_is_put_to_rest_sooner_while_others_wait_for_its_place() -> None:
    activity = quiet()
    activity.looked(look(6), 1.0)
    activity.others_wait(they_do=True)
    assert activity.to_look_into(1.0 + CROWDED_REST_SECONDS) == ["a"]
    activity.others_wait(they_do=False)
    assert activity.to_look_into(1.0 + CROWDED_REST_SECONDS) == []
    activity.others_wait(they_do=True)
    activity.looked(look(6, has_rows=False), 1.0 + CROWDED_REST_SECONDS)
    assert activity.resting == {"a"}


def test_what_wakes_a_tenant() -> None:
    for what, seen in {
        "an id was drawn": look(6),
        "the ids begin again": look(1),
        "somebody is writing": look(5, is_writing=True),
        "it has rows with ids of their own making": look(5, has_rows=True),
        "its ids cannot be seen any more": look(None),
    }.items():
        activity = quiet()
        activity.looked(look(5), 1.0)
        assert activity.resting == {"a"}
        activity.looked(seen, 2.0)
        assert activity.resting == set(), what


def test_a_tenant_whose_ids_cannot_be_seen_is_never_put_to_rest() -> None:
    activity = TenantActivity(REST)
    activity.follow(["a"])
    for now in range(0, 1_000, 100):
        activity.looked(look(None, has_rows=False), float(now))
        assert activity.resting == set()


def test_a_resting_tenant_is_looked_into_from_time_to_time_and_woken_in_the_end() -> None:
    activity = quiet()
    assert activity.to_look_into(LOOK_AGAIN_SECONDS - 0.1) == []
    assert activity.to_look_into(LOOK_AGAIN_SECONDS) == ["a"]
    activity.looked(look(5, has_rows=False), LONGEST_REST_SECONDS - 0.1)
    assert activity.resting == {"a"}
    activity.looked(look(5), LONGEST_REST_SECONDS)
    assert activity.resting == set()


def test_of_many_tenants_the_longest_unseen_come_first() -> None:
    activity = TenantActivity(REST)
    names = [str(number) for number in range(LOOKS_AT_ONCE + 1)]
    activity.follow(names)
    first = activity.to_look_into(0.0)
    activity.looked(Look({name: Seen("0", is_writing=False) for name in names}, dict.fromkeys(first, False)), 0.0)
    [last] = set(names) - set(first)
    assert activity.to_look_into(LOOK_AGAIN_SECONDS)[0] == last


def test_a_tenant_that_was_gone_is_new() -> None:
    activity = quiet()
    activity.follow([])
    assert activity.resting == set()
    activity.follow(["a"])
    assert activity.to_look_into(0.0) == ["a"]


@given(st.lists(st.tuples(st.floats(0.1, 100.0), st.booleans(), st.booleans()), max_size=60))
def test_an_outbox_with_rows_is_woken_and_stays_awake(steps: list[tuple[float, bool, bool]]) -> None:
    """Rows are inserted with ids that are drawn, and relayed where there is a harvester."""
    activity, now, last_id, rows = TenantActivity(REST), 0.0, 0, 0
    activity.follow(["a"])
    for seconds, inserts, drains in steps:
        now += seconds
        if inserts:
            last_id, rows = last_id + 1, rows + 1
        activity.looked(look(last_id, has_rows=rows > 0 if activity.to_look_into(now) else None), now)
        is_resting = "a" in activity.resting
        assert not (is_resting and rows)
        if drains and not is_resting:
            rows = 0
