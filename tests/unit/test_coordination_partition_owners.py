"""The rationalizer: the log alone decides who holds what, and all who read it agree."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outbox_plugin.coordination.messages import (
    ClaimingMessages,
    ClaimingPartition,
    Heartbeat,
    Message,
    ReleaseGroup,
    ReleasingPartition,
)
from outbox_plugin.coordination.partition_owners import FOREVER, LONGEST_DOUBT, TOPIC_CLIENT, Holder, Key, Row, World

INTERVAL = 10
STALE = 2 * INTERVAL
GROUP = "billing"
A, B = Holder("run-a", "a"), Holder("run-b", "b")
C = Holder("run-c", "c")
A_AGAIN = Holder("run-a2", "a")


def claiming(who: Holder, at: int, partition: int = 0) -> Message:
    return ClaimingPartition(1, at, *who, GROUP, "orders", partition)


def beating(who: Holder, at: int, offset: int = 0, partition: int = 0) -> Message:
    return Heartbeat(1, at, *who, GROUP, "orders", partition, offset)


def releasing(who: Holder, at: int, offset: int = 0, partition: int = 0) -> Message:
    return ReleasingPartition(1, at, *who, GROUP, "orders", partition, offset)


def advancing(who: Holder, at: int, offset: int = 0, partition: int = 0) -> Message:
    return ClaimingMessages(1, at, *who, GROUP, "orders", partition, offset)


def pausing(at: int, until: int | None, client: str = "operator") -> Message:
    return ReleaseGroup(1, at, "run-o", client, GROUP, "", 0, until)


def world_of(*log: Message) -> World:
    """The world after a log whose clocks are all right."""
    world = World(INTERVAL)
    for message in log:
        world.apply(message, message.timestamp)
    return world


def owner(world: World, now: float, partition: int = 0) -> tuple[str, str] | None:
    return world.owner(GROUP, "orders", partition, now)


def test_the_earliest_claim_wins() -> None:
    world = world_of(claiming(A, 100), claiming(B, 100))
    assert owner(world, 100) == ("run-a", "a")
    assert world.members(GROUP, 100) == {A: False, B: True}


@pytest.mark.parametrize(
    ("age", "state", "held"),
    [(0, "fresh", True), (9, "fresh", True), (10, "unknown", True), (20, "unknown", True), (21, "stale", False)],
)
def test_a_claim_ages(age: int, state: str, held: bool) -> None:
    world = world_of(claiming(A, 100), beating(A, 105, 7))
    assert world.state(GROUP, "orders", 0, 105 + age) == state
    assert (owner(world, 105 + age) == A) is held
    assert world.offset(GROUP, "orders", 0) == 7


def test_what_nobody_spoke_of_is_unclaimed() -> None:
    world = world_of(claiming(A, 100))
    assert world.state(GROUP, "orders", 9, 100) == "unclaimed"
    assert world.state("others", "orders", 0, 100) == "unclaimed"
    assert owner(world, 100, partition=9) is None
    assert world.offset("others", "orders", 0) is None


def test_a_stale_claim_is_anyones() -> None:
    assert owner(world_of(claiming(A, 100), claiming(B, 120)), 120) == A
    assert owner(world_of(claiming(A, 100), claiming(B, 121)), 121) == B


def test_one_that_was_paused_does_not_take_its_claim_back() -> None:
    world = world_of(claiming(A, 100), beating(A, 100, 5), claiming(B, 121), beating(A, 122, 99), releasing(A, 123, 1))
    assert owner(world, 123) == B
    assert world.offset(GROUP, "orders", 0) == 5


def test_a_stale_claim_is_not_revived_by_a_heartbeat() -> None:
    world = world_of(claiming(A, 100), beating(A, 121, 5))
    assert owner(world, 121) is None


def test_a_late_heartbeat_revives_nothing() -> None:
    world = world_of(claiming(A, 100))
    assert not world.apply(beating(A, 110), now=190)
    assert owner(world, 190) is None


@pytest.mark.parametrize("clock", [0, 12, 1_000, 10**12])
def test_no_senders_clock_decides_anything(clock: int) -> None:
    """Neither one that runs ahead nor one that is late wins a claim, loses one, or is silenced."""
    world = World(INTERVAL)
    assert world.apply(claiming(A, clock), now=100)
    assert world.apply(beating(A, clock, 5), now=119)
    assert owner(world, 139) == A
    assert owner(world, 140) is None
    assert not world.apply(claiming(B, clock), now=139)


@pytest.mark.parametrize("clock", [0, 97, 103, 5_000])
def test_a_pause_lasts_as_long_as_it_says_by_whatever_clock(clock: int) -> None:
    world = world_of(claiming(A, 90))
    assert world.apply(pausing(clock, until=clock + 50), now=100)
    assert owner(world, 100) is None
    assert world.paused(GROUP, 149)
    assert not world.paused(GROUP, 150)


def test_a_topic_that_was_recreated_begins_anew_once() -> None:
    anew = ReleasingPartition(1, 110, "id-2", TOPIC_CLIENT, GROUP, "orders", 0, 0)
    world = world_of(claiming(A, 100), beating(A, 105, 50), anew)
    assert owner(world, 110) is None
    assert world.offset(GROUP, "orders", 0) == 0
    assert world.topic_ids(GROUP, "orders", 0)[0] == "id-2"
    assert not world.apply(claiming(B, 130), 130), "A may not have read it yet"
    assert world.apply(claiming(B, 131), 131)
    assert world.apply(beating(B, 131, 7), 131)
    assert world.apply(anew, 132), "another who noticed it later"
    assert (owner(world, 132), world.offset(GROUP, "orders", 0)) == (None, 7), "freed again, but not set back"


def anew(at: int, *topic_ids: str) -> Message:
    return ReleasingPartition(1, at, ",".join(topic_ids), TOPIC_CLIENT, GROUP, "orders", 0, 0)


@pytest.mark.parametrize("late", [("id-3", "id-2"), ("id-2", "id-1")], ids=["the last topic", "an earlier one"])
@pytest.mark.parametrize("kept_at", [150, 240], ids=["before", "later"])
def test_who_began_to_read_later_agrees_on_what_a_late_word_of_a_recreated_topic_counts(
    late: tuple[str, ...], kept_at: int
) -> None:
    log = [claiming(A, 100), beating(A, 105, 50), anew(110, "id-2", "id-1"), anew(111, "id-3", "id-2", "id-1")]
    log += [claiming(B, 135), *(beating(B, at, at) for at in range(136, 230, 5))]
    log += [anew(230, *late), beating(B, 231, 231), beating(B, 236, 236), claiming(C, 251), beating(C, 252, 252)]
    log += [beating(B, 253, 253)]
    later = World(INTERVAL, since=160)
    later.remember(Key(GROUP, "orders", 0), kept_at, ("id-3", "id-2", "id-1"), kept_at)
    for message in log:
        if message.timestamp >= 160:
            later.apply(message, message.timestamp)
    later.recall_all()
    assert owner(later, 253) == owner(world_of(*log), 253) is not None


@pytest.mark.parametrize("since", [-FOREVER, 90, 165])
def test_what_was_sent_before_a_topic_was_recreated_tells_no_position_however_late_it_comes(since: float) -> None:
    """Its sender stood still, and two intervals later the partition is anyone's."""
    world = World(INTERVAL, since=since)
    late = [(191, claiming(A, 160)), (191, beating(A, 160, 50)), (192, anew(192, "id-2", "id-1"))]
    for at, message in [(160, beating(A, 160, 40)), (170, anew(170, "id-2", "id-1")), *late]:
        if at >= since:
            world.apply(message, at)
    assert world.offset(GROUP, "orders", 0) in (None, 0)


def test_the_end_of_a_pause_does_not_give_a_recreated_partition_to_who_held_it_before() -> None:
    world = late_world(90, claiming(A, 100), beating(A, 101, 90), beating(A, 111, 95), beating(A, 122, 99))
    assert owner(world, 122) == A
    for message in (anew(125, "id-2", "id-1"), pausing(126, 0), beating(A, 124, 100)):
        world.apply(message, 127)
    assert (owner(world, 127), world.offset(GROUP, "orders", 0)) == (None, 0)


def test_a_stale_holder_of_a_topic_that_was_recreated_sets_no_position_of_the_old_one() -> None:
    anew = ReleasingPartition(1, 190, "id-2", TOPIC_CLIENT, GROUP, "orders", 0, 0)
    world = world_of(claiming(A, 100), beating(A, 105, 50), anew)
    assert not world.apply(claiming(A, 191), 191), "it may not have read yet that the topic was recreated"
    assert not world.apply(beating(A, 191, 50), 191)
    assert world.offset(GROUP, "orders", 0) == 0


@pytest.mark.parametrize("late", [("id-1",), ("id-1", "id-0"), ("id-1", "id-2"), ("id-0",), ("",)])
def test_a_topic_that_was_there_before_does_not_come_back(late: tuple[str, ...]) -> None:
    """A broker that is behind names it. It would set the group back, and free the partition later each time."""
    world = world_of(claiming(A, 100), anew(110, "id-2", "id-1", "id-0"), claiming(B, 131), beating(B, 131, 7))
    assert not world.apply(anew(132, *late), 132)
    assert (owner(world, 132), world.offset(GROUP, "orders", 0)) == (B, 7)
    assert world.topic_ids(GROUP, "orders", 0) == ("id-2", "id-1", "id-0")


def test_nor_does_one_whose_sender_does_not_know_the_latest() -> None:
    world = world_of(anew(110, "id-3", "id-1"))
    assert not world.apply(anew(111, "id-2", "id-1"), 111)
    assert world.apply(anew(112, "id-4", "id-3", "id-1"), 112)


def test_who_knows_that_a_topic_was_there_before_may_name_it_again() -> None:
    """Else a wrong message would bind the group to a topic that is not there."""
    world = world_of(anew(110, "id-2", "id-1"))
    assert world.apply(anew(111, "id-1", "id-2", "id-1"), 111)
    assert world.topic_ids(GROUP, "orders", 0) == ("id-1", "id-2")


def test_what_was_kept_tells_the_topics_that_were_there_before() -> None:
    """The log may be a new one."""
    world = World(INTERVAL, since=100)
    world.remember(Key(GROUP, "orders", 0), 40, ("id-2", "id-1"), 90)
    assert not world.apply(anew(110, "id-1"), 110)
    assert (world.offset(GROUP, "orders", 0), world.topic_ids(GROUP, "orders", 0)) == (40, ("id-2", "id-1"))


def test_what_was_kept_counts_until_the_log_says_more() -> None:
    world = World(INTERVAL, since=100)
    world.remember(Key(GROUP, "orders", 0), 40, ("id-1",), 90)
    assert world.offset(GROUP, "orders", 0) == 40
    assert world.state(GROUP, "orders", 0, 130) == "unclaimed"
    assert world.apply(claiming(A, 130), 130)
    assert world.apply(beating(A, 130, 41), 130)
    world.remember(Key(GROUP, "orders", 0), 30, ("id-1",), 90)
    assert world.offset(GROUP, "orders", 0) == 41


def test_a_heartbeat_that_comes_late_into_a_new_log_does_not_move_back_what_was_kept() -> None:
    """At most once, the records between them may have been handed out."""
    world = World(INTERVAL, since=100)
    world.remember(Key(GROUP, "orders", 0), 40, ("id-1",), 99)
    world.apply(beating(A, 101, 35), 101)
    assert (owner(world, 102), world.offset(GROUP, "orders", 0)) == (A, 40)


def test_a_position_that_was_sent_before_what_is_read_does_not_move_the_group_forward() -> None:
    """It may be of a former topic: in the log that was lost, its sender would have held nothing any more."""
    world = World(INTERVAL, since=100)
    world.remember(Key(GROUP, "orders", 0), 5, ("id-2", "id-1"), 99)
    for at in (101, 104):
        world.apply(beating(A, 99, 50), at)
        assert (owner(world, at), world.offset(GROUP, "orders", 0)) == (A, 5)
    other = World(INTERVAL, since=100)
    other.remember(Key(GROUP, "orders", 0), 5, ("id-2", "id-1"), 99)
    other.apply(beating(A, 100, 7), 101)
    assert other.offset(GROUP, "orders", 0) == 7
    for release, offset in ((50, 5), (3, 3)):
        assert world.apply(releasing(A, 99, release), 105)
        assert (owner(world, 105), world.offset(GROUP, "orders", 0)) == (None, offset)
        world.apply(claiming(A, 130), 130)


def test_what_was_kept_after_the_log_was_recreated_counts() -> None:
    world = World(INTERVAL, since=100)
    world.remember(Key(GROUP, "orders", 0), 40, ("id-1",), 105)
    world.apply(beating(A, 101, 35), 101)
    world.recall_all()
    assert world.offset(GROUP, "orders", 0) == 40


def test_all_free_a_partition_of_a_recreated_topic_whose_new_position_some_remember() -> None:
    """Its holder may keep a position of the new topic before anybody writes that the topic was recreated."""
    log = (claiming(A, 100), ReleasingPartition(1, 106, "id-2", TOPIC_CLIENT, GROUP, "orders", 0, 0))
    remembering = World(INTERVAL)
    remembering.remember(Key(GROUP, "orders", 0), 7, ("id-2",), 104)
    for message in log:
        remembering.apply(message, message.timestamp)
    assert owner(remembering, 110) == owner(world_of(*log), 110) is None
    assert remembering.offset(GROUP, "orders", 0) == 7


def test_what_was_kept_of_a_topic_does_not_hide_that_it_was_recreated_in_the_log() -> None:
    """What stands before is about the earlier topic, and its higher offsets are none of the new one's."""
    world = World(INTERVAL, since=100)
    world.remember(Key(GROUP, "orders", 0), 6, ("id-2",), 130)
    anew = ReleasingPartition(1, 110, "id-2", TOPIC_CLIENT, GROUP, "orders", 0, 0)
    for message in (beating(A, 104, 9), beating(A, 109, 9), anew, claiming(A, 130), beating(A, 130, 6)):
        world.apply(message, message.timestamp)
    world.recall_all()
    assert (world.offset(GROUP, "orders", 0), world.topic_ids(GROUP, "orders", 0)) == (6, ("id-2",))


def test_who_has_not_claimed_it_since_does_not_hold_a_partition_of_a_recreated_topic() -> None:
    """Nobody knows who held it before: the coordination topic was recreated just then, too."""
    world = World(INTERVAL, since=100)
    anew = ReleasingPartition(1, 102, "id-2", TOPIC_CLIENT, GROUP, "orders", 0, 0)
    for message in (beating(A, 101, 50), anew, beating(A, 103, 50), claiming(B, 110), claiming(B, 123)):
        world.apply(message, message.timestamp)
    assert (owner(world, 123), world.offset(GROUP, "orders", 0)) == (None, 0)
    world.apply(beating(B, 124, 7), 124)
    assert (owner(world, 124), world.offset(GROUP, "orders", 0)) == (B, 7)


def test_a_claim_that_came_too_early_lends_a_position_of_the_old_topic_no_weight() -> None:
    """Those who have read the whole log know that the claim did not count."""
    world = World(INTERVAL, since=100)
    anew = ReleasingPartition(1, 102, "id-2", TOPIC_CLIENT, GROUP, "orders", 0, 0)
    for message in (beating(A, 101, 50), anew, claiming(A, 103), beating(A, 103, 50)):
        world.apply(message, message.timestamp)
    assert (owner(world, 103), world.offset(GROUP, "orders", 0)) == (None, 0)


def test_of_a_client_only_its_latest_instance_is_a_member() -> None:
    world = world_of(claiming(A, 100), claiming(B, 101), beating(A_AGAIN, 102), beating(A, 103))
    assert set(world.members(GROUP, 103)) == {A_AGAIN, B}


@pytest.mark.parametrize("back", [beating(A_AGAIN, 115, 3), claiming(A_AGAIN, 115)])
def test_a_new_run_of_a_client_goes_on_with_its_claims(back: Message) -> None:
    world = world_of(claiming(A, 100), beating(A, 105, 3), back)
    assert owner(world, 115) == A_AGAIN
    assert not world.apply(beating(A, 116, 50), 116), "the former run has no say any more"
    assert not world.apply(claiming(A, 116), 116)
    assert owner(world, 116) == A_AGAIN
    assert world.offset(GROUP, "orders", 0) == 3


def test_a_new_run_that_comes_too_late_has_to_claim() -> None:
    world = world_of(claiming(A, 100), beating(A_AGAIN, 121))
    assert owner(world, 121) is None
    world.apply(claiming(A_AGAIN, 122), 122)
    assert owner(world, 122) == A_AGAIN


def test_a_release_says_exactly_where_to_go_on() -> None:
    world = world_of(claiming(A, 100), beating(A, 101, 50), releasing(A, 102, 40))
    assert world.state(GROUP, "orders", 0, 102) == "unclaimed"
    assert world.offset(GROUP, "orders", 0) == 40
    assert not world.apply(beating(A, 103, 60), 103)
    assert world.apply(claiming(B, 104), 104)
    assert world.offset(GROUP, "orders", 0) == 40


def test_only_the_holder_advances_and_releases() -> None:
    world = world_of(claiming(A, 100), advancing(A, 101, 20), advancing(B, 102, 90), releasing(B, 102, 90))
    assert owner(world, 102) == A
    assert world.offset(GROUP, "orders", 0) == 20


def test_offsets_of_a_holder_do_not_go_back() -> None:
    world = world_of(claiming(A, 100), beating(A, 101, 20), beating(A, 102, 10), advancing(A, 103, 5))
    assert world.offset(GROUP, "orders", 0) == 20


def test_a_paused_group_holds_nothing_until_the_pause_ends() -> None:
    world = world_of(claiming(A, 100), pausing(105, until=200), claiming(A, 110), claiming(B, 111), beating(A, 112))
    assert world.paused(GROUP, 199)
    assert world.state(GROUP, "orders", 0, 199) == "paused"
    assert owner(world, 112) is None
    assert not world.paused(GROUP, 200)
    assert world.state(GROUP, "orders", 0, 200) == "unclaimed"
    assert world.apply(claiming(B, 201), 201)
    assert owner(world, 201) == B


def test_a_pause_without_end_lasts_until_a_resume() -> None:
    world = world_of(claiming(A, 100), pausing(105, until=None))
    assert world.paused(GROUP, 10**9)
    world.apply(pausing(300, until=0), 300)
    assert not world.paused(GROUP, 300)
    assert world.apply(claiming(B, 301), 301)


def test_who_paused_a_group_sets_its_position() -> None:
    operator = Holder("run-o", "operator")
    world = world_of(
        claiming(A, 100),
        beating(A, 104, 500),
        pausing(105, until=None),
        claiming(operator, 106),
        releasing(operator, 106, 7),
    )
    assert world.offset(GROUP, "orders", 0) == 7
    assert world.state(GROUP, "orders", 0, 107) == "paused"
    assert not world.apply(beating(A, 107, 501), 107)
    assert world.offset(GROUP, "orders", 0) == 7


def test_a_pause_is_one_groups() -> None:
    world = world_of(claiming(A, 100), ReleaseGroup(1, 101, "run-o", "operator", "others", "", 0))
    assert owner(world, 101) == A


def test_the_world_as_rows() -> None:
    world = world_of(
        claiming(B, 100, 1), claiming(A, 100), beating(A, 104, 3), claiming(A, 104, 2), releasing(A, 105, 9, 2)
    )
    assert list(world.rows(115)) == [
        Row(Key(GROUP, "orders", 0), "unknown", A, 3, 11),
        Row(Key(GROUP, "orders", 1), "unknown", B, None, 15),
        Row(Key(GROUP, "orders", 2), "unclaimed", None, 9, None),
    ]


def test_members_who_are_gone_are_forgotten() -> None:
    world = World(INTERVAL)
    for number in range(10_000):
        world.apply(claiming(Holder(f"run-{number}", f"client-{number}"), 100 + number), 100 + number)
    assert len(world._groups[GROUP].members) < 200
    assert len(world.members(GROUP, 10_099)) == STALE + 1


def late_world(since: int, *log: Message) -> World:
    """The world of one who has not read what was before `since`."""
    world = World(INTERVAL, since=since)
    for message in log:
        world.apply(message, message.timestamp)
    return world


def test_a_claim_that_may_have_failed_makes_no_holder() -> None:
    """A held it, which is not read: B asked for it twice, and C, who claims it when A is gone, has it."""
    log = [claiming(B, 105), claiming(B, 125), claiming(C, 126), beating(C, 126, 7)]
    assert owner(late_world(104, *log), 126) == C
    assert late_world(104, *log).offset(GROUP, "orders", 0) == 7
    assert owner(late_world(104, *log[:2]), 125) is None


def test_a_claim_counts_after_a_silence_or_a_pause() -> None:
    assert owner(late_world(100, claiming(B, 121)), 121) == B
    assert owner(late_world(100, claiming(B, 120)), 120) is None
    paused = [pausing(101, until=103), beating(A, 102), claiming(B, 104)]
    assert owner(late_world(100, *paused), 104) == B


def test_a_claim_may_have_failed_in_a_pause_that_is_not_read() -> None:
    """The coordination topic was recreated while the group was paused, and its end is all that is kept of that."""
    read = [claiming(A, 121), pausing(122, until=0), claiming(B, 123), beating(B, 124, 7)]
    assert owner(world_of(pausing(90, until=None), *read), 124) == B
    assert owner(late_world(100, *read), 124) == B
    assert owner(late_world(100, *read, beating(B, 129, 8), claiming(C, 130), beating(A, 131)), 131) == B


def test_an_end_of_a_pause_takes_nothing_from_one_who_lives() -> None:
    log = [beating(A, 101), beating(A, 106), pausing(107, until=0), claiming(B, 108), beating(A, 111), claiming(B, 112)]
    for end in (3, 4, 5, 6):
        assert owner(late_world(100, *log[:end]), 112) == A


def test_who_beats_twice_holds_it_whoever_beats_once() -> None:
    once = late_world(100, beating(A, 101), beating(B, 104))
    assert owner(once, 104) == B
    assert owner(late_world(100, beating(A, 101), beating(A, 106), beating(B, 107)), 107) == A
    assert owner(late_world(100, beating(A, 101), beating(A_AGAIN, 104), beating(A, 105)), 105) == A_AGAIN


@pytest.mark.parametrize("between", [(), (claiming(C, 223),)], ids=["nobody", "another one asks"])
def test_whoever_began_to_read_later_knows_by_heartbeats_who_held_it_when_only_claims_came(
    between: tuple[Message, ...],
) -> None:
    """The coordination topic is new, and all ask for the partition. Each begins to count claims at its own time."""
    asked = [claiming(who, at) for at in range(101, 220, 5) for who in (B, C)]
    log = [*asked, claiming(A, 221), *between, beating(A, 224, 7), beating(A, 229, 8)]
    for since in (100, 101, 102, 103):
        assert owner(late_world(since, *log), 229) == A, since
        assert late_world(since, *log).offset(GROUP, "orders", 0) == 8


# Generated logs: few instances, of few clients, over few partitions, with clocks that are late and ahead.

who = st.builds(Holder, st.sampled_from(["1", "2", "3"]), st.sampled_from("abc"))
offsets = st.integers(0, 50)
steps = st.lists(
    st.tuples(
        st.sampled_from(["claim", "beat", "beat", "advance", "release", "pause"]),
        who,
        st.integers(0, 2),
        offsets,
        st.sampled_from([0, 0, 1, 5, INTERVAL, STALE + 1]),  # Seconds in the log since the last message.
        st.sampled_from(
            [0, 0, 0, -1, -STALE - 1, -500, 1, INTERVAL, 2 * INTERVAL, 10_000]
        ),  # The sender's clock is off.
    ),
    max_size=60,
)
Entry = tuple[float, Message]


def _log(drawn: Sequence[tuple[str, Holder, int, int, int, int]]) -> list[Entry]:
    log: list[Entry] = []
    now = 1_000
    for kind, sender, partition, offset, later, off in drawn:
        now += later
        sent = max(0, now + off)
        match kind:
            case "claim":
                message = claiming(sender, sent, partition)
            case "beat":
                message = beating(sender, sent, offset, partition)
            case "advance":
                message = advancing(sender, sent, offset, partition)
            case "release":
                message = releasing(sender, sent, offset, partition)
            case _:
                message = pausing(sent, now + offset - 25, sender.client_id)
        log.append((now, message))
    return log


logs = steps.map(_log)


def rows(world: World, now: float) -> list[Row]:
    return list(world.rows(now))


@given(logs)
def test_all_who_read_the_same_log_reach_the_same_world(log: list[Entry]) -> None:
    """However often one of them asks meanwhile, and whatever others talk about in between."""
    one, other = World(INTERVAL), World(INTERVAL)
    for now, message in log:
        one.apply(message, now)
    for now, message in log:
        list(other.rows(now + 7))
        other.paused(GROUP, now)
        other.members(GROUP, now - 3)
        other.apply(ClaimingPartition(1, int(now), "run-x", "x", "another group", "orders", 0), now)
        other.apply(message, now)
    end = log[-1][0] if log else 0
    for later in (0, 1, INTERVAL, STALE, STALE + 1):
        assert rows(one, end + later) == [row for row in rows(other, end + later) if row.key.group_id == GROUP]


@given(logs)
def test_senders_clocks_change_nothing(log: list[Entry]) -> None:
    """What is late is judged by what the log says, not by what a sender's clock says."""
    end = log[-1][0] if log else 0
    one, other = World(INTERVAL), World(INTERVAL)
    for now, message in log:
        if not isinstance(message, ReleaseGroup):
            assert one.apply(message, now) == other.apply(replace(message, timestamp=0), now)
    assert rows(one, end) == rows(other, end)


@given(logs)
def test_a_live_holder_loses_a_partition_only_by_its_own_word_or_a_pause(log: list[Entry]) -> None:
    world = World(INTERVAL)
    for now, message in log:
        at = now
        before = {partition: owner(world, at, partition) for partition in range(3)}
        counted = world.apply(message, now)
        for partition, held_by in before.items():
            after = owner(world, at, partition)
            if held_by is None or after == held_by:
                continue
            released = isinstance(message, ReleaseGroup)
            by_itself = isinstance(message, ReleasingPartition) and held_by == (message.instance_id, message.client_id)
            resumed = held_by[1] == message.client_id and after == (message.instance_id, message.client_id)
            assert counted, (before, message)
            assert released or by_itself or resumed, (before, message)


@given(logs)
def test_what_does_not_count_changes_no_claim(log: list[Entry]) -> None:
    world = World(INTERVAL)
    for now, message in log:
        before = rows(world, now)
        if not world.apply(message, now):
            spoken_of = {row.key for row in before}
            assert [row for row in rows(world, now) if row.key in spoken_of] == before


@given(logs, who, offsets)
def test_a_liar_changes_nothing(log: list[Entry], liar: Holder, offset: int) -> None:
    """One who holds nothing, whatever it says between the others' words."""
    liar = Holder(liar.instance_id, "liar")
    honest, lied_to = World(INTERVAL), World(INTERVAL)
    for now, message in log:
        honest.apply(message, now)
        lied_to.apply(message, now)
        for partition in range(3):
            sent = int(now)
            assert not lied_to.apply(beating(liar, sent, offset, partition), now)
            assert not lied_to.apply(advancing(liar, sent, offset, partition), now)
            assert not lied_to.apply(releasing(liar, sent, offset, partition), now)
        assert rows(lied_to, now) == rows(honest, now)


# Logs of instances that follow the protocol, are killed, restarted, and stopped for so long that they come back late.


@dataclass
class Instance:
    me: Holder
    held: set[int] = field(default_factory=set)
    away_until: int = 0


class Group:
    """Instances, and the log that they write; `truth` has read it from its beginning."""

    def __init__(self, dice: random.Random, instances: int, partitions: int) -> None:
        self.log: list[Entry] = []
        self.truth = World(INTERVAL)
        self._dice = dice
        self._partitions = partitions
        self._runs = 0
        self._instances = [self._started(f"client-{number}") for number in range(instances)]

    def _started(self, client: str) -> Instance:
        self._runs += 1
        return Instance(Holder(f"run-{self._runs}", client))

    def _say(self, now: int, message: Message) -> bool:
        self.log.append((now, message))
        return self.truth.apply(message, now)

    def second(self, now: int) -> None:
        for number, one in enumerate(self._instances):
            if now == one.away_until or (now % (INTERVAL // 2) == number % (INTERVAL // 2) and now > one.away_until):
                one.held = {each for each in one.held if self._say(now, beating(one.me, now, now, each))}
            if now <= one.away_until:
                continue
            if self._dice.random() < 0.3:
                self._claim(one, now, self._dice.randrange(self._partitions))
            if one.held and self._dice.random() < 0.02:
                self._say(now, releasing(one.me, now, now, one.held.pop()))
            match self._dice.choices(["go on", "stop", "restart"], [94, 3, 3])[0]:
                case "stop":
                    one.away_until = now + self._dice.randint(1, 5 * INTERVAL)
                case "restart":
                    again = self._instances[number] = self._started(one.me.client_id)
                    for partition in range(self._partitions):
                        holder = owner(self.truth, now, partition)
                        if holder is not None and holder[1] == one.me.client_id:
                            again.held |= (
                                {partition} if self._say(now, beating(again.me, now, now, partition)) else set()
                            )

    def _claim(self, one: Instance, now: int, partition: int) -> None:
        """Of one that is free, or, as a question, of one that is not."""
        if self._say(now, claiming(one.me, now, partition)) and owner(self.truth, now, partition) == one.me:
            one.held.add(partition)
            self._say(now, beating(one.me, now, now, partition))


@example(496, 3, 87)  # One comes back late, when the doubt is over.
@given(st.integers(0, 2**32), st.integers(2, 6), st.integers(0, 200))
def test_one_who_reads_only_the_last_part_knows_who_holds_what(seed: int, instances: int, since: int) -> None:
    """What it is sure of is true: claims that failed on what it has not read make nobody a holder. It is sure soon."""
    group = Group(random.Random(seed), instances, partitions=2)
    for now in range(1_000, 1_200):
        group.second(now)
    began = 1_000 + since
    late = World(INTERVAL, since=began)
    for now in range(1_200, 1_300 + LONGEST_DOUBT * STALE + since):
        group.second(now)
    truth = World(INTERVAL)
    for at, message in group.log:
        truth.apply(message, at)
        if at >= began:
            late.apply(message, at)
        for key, claim in late._claims.items():
            if claim.doubt == -FOREVER:
                assert late.owner(*key, at) == truth.owner(*key, at)
    assert [claim.doubt for claim in late._claims.values()] == [-FOREVER, -FOREVER]
