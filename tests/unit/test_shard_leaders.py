"""Who leads which shard, and whether that is even."""

from __future__ import annotations

from outbox_plugin.core.leader_heartbeat import LeaderHeartbeat, Phase
from outbox_plugin.core.shard_leaders import FRESH_SECONDS, ShardLeaders


def beat(shard: int, instance: str, phase: Phase = "leader") -> LeaderHeartbeat:
    return LeaderHeartbeat(
        shard, phase, f"{instance}-{shard}", instance, "host", 1, "2026-01-01", "incarnation", "place"
    )


def led(*instances: str) -> ShardLeaders:
    """Each leads the shard of its place, at 10.0."""
    leaders = ShardLeaders()
    for shard, instance in enumerate(instances):
        leaders.receive(beat(shard, instance), 10.0)
    return leaders


def test_a_move_makes_the_shards_more_even_where_one_leads_two_more_than_the_other() -> None:
    assert led("a", "a").would_be_more_even(0, "b", 10.1)
    assert led("a", "a", "a", "b").would_be_more_even(0, "b", 10.1)
    assert not led("a", "a", "b").would_be_more_even(0, "b", 10.1)
    assert not led("a").would_be_more_even(0, "b", 10.1)
    assert not led("a", "a").would_be_more_even(0, "a", 10.1)


def test_a_move_between_neighbours_is_worth_it_only_where_others_are_further_apart() -> None:
    """No owner leads two less than who leads its shard: a leads one of b's, and b one of c's."""
    leaders = led("a", "a", "a", "b", "b", "c")
    assert leaders.would_be_more_even(2, "b", 10.1)
    assert leaders.would_be_more_even(4, "c", 10.1)
    assert not leaders.would_be_more_even(4, "a", 10.1)
    assert led("a", "a", "b").would_be_more_even(2, "c", 10.1)  # It leads none, which only it knows.
    assert not led("a", "b", "b", "c", "c").would_be_more_even(1, "a", 10.1)


def test_who_is_silent_makes_nothing_uneven() -> None:
    leaders = led("a", "a", "a", "b", "b", "c")
    for shard, instance in ((3, "b"), (4, "b"), (5, "c")):
        leaders.receive(beat(shard, instance), 10.1 + FRESH_SECONDS)
    assert not leaders.would_be_more_even(4, "c", 10.2 + FRESH_SECONDS)


def test_a_shard_that_nobody_leads_is_nobodys() -> None:
    leaders = led("a", "a", "a")
    leaders.receive(beat(0, "a", "resigned"), 10.1)
    assert not leaders.would_be_more_even(0, "b", 10.2)
    assert leaders.would_be_more_even(1, "b", 10.2)
    assert not leaders.would_be_more_even(1, "b", 10.1 + FRESH_SECONDS)
    leaders.receive(beat(1, "c"), 20.0)
    assert not leaders.would_be_more_even(1, "b", 20.1)
    assert not leaders.would_be_more_even(2, "b", 20.1)


def test_only_a_leader_counts_and_only_its_own_resignation() -> None:
    leaders = led("a", "a")
    leaders.receive(beat(0, "c", "candidate"), 10.1)
    leaders.receive(beat(0, "c", "resigned"), 10.1)
    assert leaders.would_be_more_even(0, "b", 10.2)
