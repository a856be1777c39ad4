"""What an instance asks for and gives up: fair shares, without a rebalance; and how far it is in what it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_plugin.coordination.claim_planner import ClaimPlanner
from outbox_plugin.coordination.claims import Claim, Plan, plan, shares
from outbox_plugin.coordination.heartbeat_timing import HeartbeatTiming
from outbox_plugin.coordination.lag_trend import SAMPLES, LagTrend, left_to_others
from outbox_plugin.coordination.partition_owners import Holder
from outbox_plugin.core.topic_partition import TopicPartition

A, B, C = Holder("1", "a"), Holder("2", "b"), Holder("3", "c")
Holders = dict[TopicPartition, Holder | None]


def partitions(count: int) -> list[TopicPartition]:
    return [TopicPartition("orders", number) for number in range(count)]


def held_by(*holders: Holder | None) -> Holders:
    return dict(zip(partitions(len(holders)), holders, strict=True))


@given(
    st.dictionaries(st.builds(Holder, st.text("12"), st.text("ab")), st.integers(0, 9), min_size=1), st.integers(0, 50)
)
def test_shares_are_fair(held: dict[Holder, int], partitions: int) -> None:
    found = shares(held, partitions)
    assert sum(found.values()) == partitions
    assert max(found.values()) - min(found.values()) <= 1
    assert all(found[more] >= found[less] for more in held for less in held if held[more] > held[less])


def test_alone_all_is_claimed_few_at_first() -> None:
    assert len(plan(A, held_by(None, None, None, None), {}).claim) == 1
    assert len(plan(A, held_by(A, A, None, None, None), {}).claim) == 2


def test_no_more_than_the_share_is_claimed_while_others_live() -> None:
    assert plan(A, held_by(A, A, None, None), {A: False, B: False}) == Plan()


def test_no_more_than_the_limit_is_claimed() -> None:
    assert plan(A, held_by(A, A, None, None), {A: False}, limit=2) == Plan()


def test_what_nobody_takes_goes_to_who_has_room() -> None:
    neglected = partitions(4)[3:]
    assert plan(A, held_by(A, A, None, None), {A: False, B: False}, neglected=neglected).claim == tuple(neglected)
    assert plan(A, held_by(A, A, None, None), {A: False, B: False}, neglected=neglected, limit=2) == Plan()


def test_where_none_is_free_the_fullest_is_asked() -> None:
    asked = plan(C, held_by(A, A, A, B), {A: False, B: False, C: False}).ask
    assert asked in partitions(3)


def test_one_gives_up_only_what_others_ask_for() -> None:
    holders = held_by(A, A, A, A)
    assert plan(A, holders, {A: False, B: False}) == Plan()
    assert len(plan(A, holders, {A: False, B: True}).release) == 2
    assert len(plan(A, holders, {A: False, B: True, C: True}).release) == 2


def test_what_one_could_not_keep_up_with_is_left_to_others() -> None:
    assert plan(A, held_by(None), {A: False}, avoid=partitions(1)) == Plan()


@given(
    st.integers(1, 12),
    st.lists(st.none() | st.integers(0, 5), min_size=1, max_size=40),
    st.integers(1, 6),
)
def test_all_have_their_share_after_some_rounds_and_nothing_moves_then(
    first: int, drawn: list[int | None], count: int
) -> None:
    """Each round, all act on what the log said before; claims are decided by who comes first in it."""
    instances = [Holder(str(number), f"client-{number}") for number in range(count)]
    holders: Holders = held_by(*(None if each is None else instances[each % count] for each in drawn))
    asking = dict.fromkeys(instances, False)
    moves = 0
    for turn in range(100):
        plans = {me: plan(me, holders, asking) for me in instances}
        if all(each == Plan() for each in plans.values()):
            break
        order = instances[(turn + first) % count :] + instances[: (turn + first) % count]
        asking = {me: plans[me].ask is not None for me in instances}
        for me in order:
            for tp in plans[me].release:
                assert holders[tp] == me
                holders[tp] = None
                moves += 1
            for tp in plans[me].claim:
                holders[tp] = holders[tp] or me
    else:
        raise AssertionError("it never came to rest")
    found = Counter(dict.fromkeys(instances, 0))
    found.update(holder for holder in holders.values() if holder is not None)
    assert max(found.values()) - min(found.values()) <= 1
    assert None not in holders.values()
    assert moves <= len(drawn)


def test_an_offset_moves_past_what_is_done_in_any_order() -> None:
    claim = Claim(10)
    for offset in (10, 11, 15):
        claim.hand_out(offset, keep=True)
    assert (claim.position, claim.offset) == (16, 10)
    claim.done(11)
    assert claim.offset == 10
    claim.done(10)
    assert claim.offset == 15, "13 and 14 were never records: a transaction's marker, or compacted away"
    claim.done(15)
    assert claim.offset == 16


def test_what_another_claim_handed_out_is_not_done_in_this_one() -> None:
    """As a record that was in the user's hands when its topic was deleted and recreated."""
    claim = Claim(0)
    claim.hand_out(0, keep=True)
    claim.done(3)
    for offset in range(1, 5):
        claim.hand_out(offset, keep=True)
    for offset in (0, 1, 2, 0, 1):
        claim.done(offset)
    assert (claim.offset, claim.uncommitted) == (3, 2)
    claim.done(3)
    assert claim.offset == 4


def test_what_was_promised_stays_promised() -> None:
    claim = Claim(10)
    assert claim.promised == 10
    claim.promise(20)
    claim.promise(15)
    claim.hand_out(12, keep=False)
    assert (claim.promised, claim.offset) == (20, 13)


@pytest.mark.parametrize(
    ("lags", "behind"),
    [
        (range(100, 200, 10), True),
        ([100, *[150] * (SAMPLES - 2), 160], True),
        (range(100, 100 + SAMPLES - 1), False),
        ([7] * SAMPLES, False),
        (range(200, 100, -10), False),
        ([0, *range(100, 190, 10)], False),
        ([*[0] * (SAMPLES - 1), 5_000], False),
        ([*range(100, 190, 10), 170], False),
    ],
)
def test_a_lag_that_is_never_gone_and_only_grows_is_falling_behind(lags: Iterable[int], behind: bool) -> None:
    trend = LagTrend()
    for lag in lags:
        trend.add(lag, 0)
    assert trend.falls_behind is behind


def test_a_lag_that_was_handled_in_the_meantime_is_not_falling_behind() -> None:
    trend = LagTrend()
    for number in range(SAMPLES):
        trend.add(100 + number, 1_000 * number)
    assert not trend.falls_behind


def test_one_who_falls_behind_leaves_its_worst_to_one_who_is_much_faster() -> None:
    holders = held_by(A, A, B, B)
    members = {A: False, B: False}
    lags = dict(zip(partitions(4), [500, 900, 10, 0], strict=True))
    assert left_to_others(A, lags, holders, members) == partitions(4)[1]
    assert left_to_others(A, {**lags, partitions(4)[2]: 800}, holders, members) is None, "the other is slow, too"
    assert left_to_others(A, lags, held_by(A, None, B, B), members) is None, "its last one stays with it"


def test_one_who_was_too_slow_asks_for_nothing_and_another_takes_it_at_once() -> None:
    timing = HeartbeatTiming(10)
    holders = held_by(A, A, None, B, B, B)
    slow, fast = ClaimPlanner(A, timing, None), ClaimPlanner(B, timing, None)
    slow.avoid(partitions(3)[2], 0.0)
    members = {A: False, B: False}
    assert slow.next_plan(holders, members, lambda _: A, 1.0) == Plan()
    assert fast.next_plan(holders, members, lambda _: A, 1.0) == Plan(claim=(partitions(3)[2],))
    assert slow.next_plan(held_by(A, A, B, B, B, B), members, lambda _: None, 2.0) == Plan(), "it asks for none"


def test_what_one_avoids_and_nobody_takes_it_takes_back() -> None:
    slow = ClaimPlanner(A, HeartbeatTiming(10), None)
    slow.avoid(partitions(2)[1], 0.0)
    holders = held_by(A, None)
    assert slow.next_plan(holders, {A: False}, lambda _: A, 1.0) == Plan()
    assert slow.next_plan(holders, {A: False}, lambda _: A, 22.0) == Plan(claim=(partitions(2)[1],))


def test_a_free_partition_waits_for_nobody_whose_share_it_is_for_longer_than_half_an_interval() -> None:
    """C has died a moment ago: it is not stale yet, and one that was stale for two intervals left a partition to it."""
    timing = HeartbeatTiming(10)
    planner, members = ClaimPlanner(A, timing, None), {A: False, B: False, C: False}
    holders = held_by(A, B, None)
    assert planner.next_plan(holders, members, lambda _: None, 100.0) == Plan()
    assert planner.next_plan(holders, members, lambda _: None, 105.1) == Plan(claim=(partitions(3)[2],))


def test_what_one_has_given_up_waits_longer_for_another_one() -> None:
    """B's claim may be slow. If A took the partition again at once, it would have to give it up again, and so on."""
    planner, members = ClaimPlanner(A, HeartbeatTiming(10), None), {A: False, B: True}
    holders = held_by(A, A, B, None)
    assert planner.next_plan(holders, members, lambda _: A, 100.0) == Plan()
    assert planner.next_plan(holders, members, lambda _: A, 119.9) == Plan()
    assert planner.next_plan(holders, members, lambda _: A, 120.1) == Plan(claim=(partitions(4)[3],)), "B has died"


def test_a_free_partition_is_left_for_longer_to_one_who_asks() -> None:
    """C has asked for one, and A has given one up: whoever else takes it only has to give it up again."""
    planner = ClaimPlanner(B, HeartbeatTiming(10), None)
    members, holders = {A: False, B: False, C: True}, held_by(A, B, None)
    assert planner.next_plan(holders, members, lambda _: A, 100.0) == Plan()
    assert planner.next_plan(holders, members, lambda _: A, 119.9) == Plan()
    assert planner.next_plan(holders, members, lambda _: A, 120.1) == Plan(claim=(partitions(3)[2],)), "C has died"


def test_one_above_its_share_takes_what_nobody_else_may_hold() -> None:
    """B may hold one alone, and asks for no more."""
    neglected = partitions(5)[4:]
    held, asking = held_by(A, A, A, B, None), {A: False, B: False}
    assert plan(A, held, asking, neglected=neglected) == Plan(claim=tuple(neglected))
    crowded = held_by(A, A, A, A, B, None)
    assert plan(A, crowded, asking, neglected=partitions(6)[5:]) == Plan(claim=tuple(partitions(6)[5:]))
