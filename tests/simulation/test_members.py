"""Consumers that share topics, in virtual time: schedules that are judged, and planted bugs that are found.

pytest tests/simulation/test_members.py                        some schedules, and the planted bugs
pytest tests/simulation/test_members.py --schedules 20000      a long run; `--first-seed` begins elsewhere
pytest tests/simulation/test_members.py -s --seed 139          one schedule again, with a readable trace
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import pytest

from outbox_plugin.coordination import member as coordination_member
from outbox_plugin.coordination import partition_owners
from outbox_plugin.coordination.actions import KeepPosition, Send
from outbox_plugin.coordination.claims import Claim
from outbox_plugin.coordination.fetch_buffer import MayHandOut
from outbox_plugin.coordination.group_view import GroupView, TopicForm
from outbox_plugin.coordination.held_partition import HeldPartition, UnansweredMessages
from outbox_plugin.coordination.member import Member
from outbox_plugin.coordination.messages import Entry, Heartbeat, Message, ReleaseGroup
from outbox_plugin.coordination.partition_owners import (
    FOREVER,
    LONGEST_DOUBT,
    TOPIC_CLIENT,
    Holder,
    Key,
    World,
    _ClaimState,
    _Group,
)
from outbox_plugin.core.topic_partition import TopicPartition
from tests.simulation.conftest import Seeds
from tests.simulation.members import Plan, run

SCHEDULES = 240
SOON = 40


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_the_promises_hold_in_every_schedule(seeds: Seeds, tells: bool) -> None:
    for seed in seeds(SCHEDULES):
        simulation = run(seed, tell=tells)
        if tells:
            print(simulation.plan, *simulation.trace, sep="\n")
        assert not simulation.broken, (
            f"seed {seed}: {'; '.join(simulation.broken)}\n{simulation.plan}\n"
            f"replay it: pytest tests/simulation/test_members.py -s --seed {seed}"
        )


def test_a_seed_is_a_schedule() -> None:
    traces = [run(seed, tell=True).trace for seed in (5, 5, 6)]
    assert traces[0] == traces[1] != traces[2]


Plant = Callable[[pytest.MonkeyPatch], None]
Faults = tuple[tuple[float, str, int, float], ...]


def drop_a_record_while_the_lease_is_uncertain(patch: pytest.MonkeyPatch) -> None:
    ask = Member.may_hand_out

    def hasty(member: Member, tp: TopicPartition, claim: Claim, offset: int, now: float) -> MayHandOut:
        answer = ask(member, tp, claim, offset, now)
        return MayHandOut.OLD if answer is MayHandOut.NOT_YET else answer

    patch.setattr(Member, "may_hand_out", hasty)


def hold_for_ever(patch: pytest.MonkeyPatch) -> None:
    begin = HeldPartition.__init__

    def endless(held: HeldPartition, claim: Claim, until: float, now: float) -> None:
        begin(held, claim, until + 1e9, now)

    patch.setattr(HeldPartition, "__init__", endless)


def begin_a_pause_by_the_operators_clock(patch: pytest.MonkeyPatch) -> None:
    pause = World._release_group

    def by_its_clock(group: _Group, message: ReleaseGroup, at: float) -> bool:
        pause(group, message, at)
        group.paused_until = float(message.expires or 0)
        return True

    patch.setattr(World, "_release_group", staticmethod(by_its_clock))


def go_on_in_a_topic_that_was_recreated(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Member, "_announce_recreation", lambda *_: None)


def hand_out_what_the_log_has_not_promised(patch: pytest.MonkeyPatch) -> None:
    def rash(member: Member, ends: Mapping[TopicPartition, int]) -> dict[TopicPartition, bool | None]:
        return dict.fromkeys(ends, True)

    def all_of_them(
        member: Member, claims: Mapping[TopicPartition, tuple[Claim, int]], now: float
    ) -> list[KeepPosition]:
        return [member._position(tp) for tp, (claim, _) in claims.items() if member.held(now).get(tp) is claim]

    patch.setattr(Member, "verdicts", rash)
    patch.setattr(Member, "granted", all_of_them)


def remember_before_its_time(patch: pytest.MonkeyPatch) -> None:
    remember = World.remember

    def at_once(world: World, key: Key, offset: int, topic_ids: tuple[str, ...], at: float) -> None:
        remember(world, key, offset, topic_ids, FOREVER * -1)

    patch.setattr(World, "remember", at_once)


def pause_before_the_log_says_so(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(World, "remember_pause", lambda world, pause: world.apply(pause, float(pause.timestamp)))


def forget_what_was_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_ClaimState, "recall", lambda _: None)


def keep_positions_by_a_clock_that_goes_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GroupView, "note_time", lambda view, partition, at: view._latest.update({partition: at}))


def take_a_new_log_for_a_whole_one(patch: pytest.MonkeyPatch) -> None:
    begin = World.__init__

    def certain(world: World, interval: float, *, since: float) -> None:
        begin(world, interval)

    patch.setattr(World, "__init__", certain)


def take_a_copy_for_a_message_of_now(patch: pytest.MonkeyPatch) -> None:
    answer = UnansweredMessages.answer

    def of_now(messages: UnansweredMessages, tp: TopicPartition, timestamp: int, now: float) -> float:
        sent = answer(messages, tp, timestamp, now)
        return now if sent is None else sent

    patch.setattr(UnansweredMessages, "answer", of_now)


def forget_what_the_log_has_granted_before_it_is_kept(patch: pytest.MonkeyPatch) -> None:
    granted = Member.granted

    def and_forget(
        member: Member, claims: Mapping[TopicPartition, tuple[Claim, int]], now: float
    ) -> list[KeepPosition]:
        keeps = granted(member, claims, now)
        member.promise(claims, ())
        return keeps

    patch.setattr(Member, "granted", and_forget)


def say_only_once_that_a_partition_was_cut(patch: pytest.MonkeyPatch) -> None:
    def once(member: Member, tp: TopicPartition, claim: Claim, offset: int, now: float) -> None:
        member._say_released(tp, min(offset, claim.offset), now)
        member._lose(tp, "its log was truncated")

    patch.setattr(Member, "go_back", once)


def claim_again_right_after_a_stall(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Member, "_may_claim", lambda *_: True)


def free_a_recreated_topic_once_its_holder_is_stale(patch: pytest.MonkeyPatch) -> None:
    begin = World._apply_recreation

    def early(world: World, key: Key, topic_ids: tuple[str, ...], message: Message, at: float) -> bool:
        before = replace(world._claims.get(key, _ClaimState()))
        counted = begin(world, key, topic_ids, message, at)
        if counted:
            stale_at = before.heartbeat + world._stale_after
            world._claims[key].barred = before.barred if before.holder is None else stale_at
        return counted

    patch.setattr(World, "_apply_recreation", early)
    # Else, who gains it early gives it up again.
    patch.setattr(Member, "_is_offset_of_present_topic", lambda member, tp: member.view.topic_id_is_current(tp))


def say_only_once_that_a_topic_was_recreated(patch: pytest.MonkeyPatch) -> None:
    describe = Member.describe

    def and_forget(member: Member, forms: Mapping[str, TopicForm], now: float, *, asked: float | None = None) -> None:
        describe(member, forms, now, asked=asked)
        member._former_ids.clear()

    patch.setattr(Member, "describe", and_forget)


def believe_a_broker_that_is_behind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(partition_owners, "REMEMBERED_TOPICS", 1)


def believe_an_answer_that_came_late(patch: pytest.MonkeyPatch) -> None:
    describe = Member.describe

    def of_now(member: Member, forms: Mapping[str, TopicForm], now: float, *, asked: float | None = None) -> None:
        describe(member, forms, now)

    patch.setattr(Member, "describe", of_now)


def name_a_topic_without_those_before(patch: pytest.MonkeyPatch) -> None:
    begin = Member._announce_recreation

    def alone(member: Member, tp: TopicPartition, topic_id: str, before: Iterable[str], now: float) -> None:
        begin(member, tp, topic_id, (), now)

    patch.setattr(Member, "_announce_recreation", alone)


def end_the_doubt_by_where_a_reader_began(patch: pytest.MonkeyPatch) -> None:
    settle = World._settle

    def early(world: World, group: _Group, claim: _ClaimState, holder: Holder, message: Message, at: float) -> None:
        if at > world._since + LONGEST_DOUBT * world._stale_after:
            claim.doubt, claim.claimants = -FOREVER, None
        else:
            settle(world, group, claim, holder, message, at)

    patch.setattr(World, "_settle", early)


def take_a_late_heartbeat_for_that_of_a_holder(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_ClaimState, "may_have_claimed", lambda *_: True)
    believe_positions_of_any_time(patch)  # Else, the heartbeat would not move the group.


def free_again_only_where_it_was_not_named(patch: pytest.MonkeyPatch) -> None:
    begin = World._apply_recreation

    def once(world: World, key: Key, topic_ids: tuple[str, ...], message: Message, at: float) -> bool:
        claim = world._claims.get(key, _ClaimState())
        if claim.is_topic_of_log and topic_ids[:1] == (claim.topic_id,):
            return False
        return begin(world, key, topic_ids, message, at)

    patch.setattr(World, "_apply_recreation", once)


def tell_a_position_after_a_stall(patch: pytest.MonkeyPatch) -> None:
    beat = Member._beat

    def always(member: Member, tp: TopicPartition, held: HeldPartition, now: float) -> None:
        beat(member, tp, held, now)
        last = member._actions[-1]
        assert isinstance(last, Send)
        assert isinstance(last.message, Heartbeat)
        member._actions[-1] = replace(last, message=replace(last.message, offset=member._offset(held.claim)))

    patch.setattr(Member, "_beat", always)


def believe_positions_of_any_time(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(World, "_told_by", lambda _, _claim, message: message.offset)


def believe_a_broker_that_is_behind_until_the_log_answers(patch: pytest.MonkeyPatch) -> None:
    is_outdated = Member._reject_outdated_topic_id

    def by_the_log(member: Member, topic_id: str, partitions: Sequence[TopicPartition], now: float) -> bool:
        told, member._former_ids = member._former_ids, {}
        answer = is_outdated(member, topic_id, partitions, now)
        member._former_ids = told
        return answer

    patch.setattr(Member, "_reject_outdated_topic_id", by_the_log)


def believe_two_answers_with_a_stall_between_them(patch: pytest.MonkeyPatch) -> None:
    notice = Member._notice_stall

    def and_remember(member: Member, now: float) -> None:
        refused = member._outdated_topic_id.copy()
        notice(member, now)
        member._outdated_topic_id = refused

    patch.setattr(Member, "_notice_stall", and_remember)
    patch.setattr(coordination_member, "FORMER_ID_ANSWERS", 1)


def free_a_recreated_topic_after_one_interval(patch: pytest.MonkeyPatch) -> None:
    begin = World._apply_recreation

    def early(world: World, key: Key, topic_ids: tuple[str, ...], message: Message, at: float) -> bool:
        counted = begin(world, key, topic_ids, message, at)
        if counted:
            world._claims[key].barred = at + world._interval
        return counted

    patch.setattr(World, "_apply_recreation", early)


def keep_the_id_of_a_recreated_topic_at_once(patch: pytest.MonkeyPatch) -> None:
    apply = Member.apply

    def and_keep(member: Member, entry: Entry, now: float, *, live: bool = True) -> None:
        apply(member, entry, now, live=live)
        if entry.message.client_id == TOPIC_CLIENT:
            member._to_keep[TopicPartition(entry.message.topic, entry.message.partition)] = None

    patch.setattr(Member, "apply", and_keep)


def stop_each(seconds: float, kind: str = "stop", processes: int = 3) -> Faults:
    return tuple((5.0 + 4 * number, kind, number % processes, seconds) for number in range(10))


ONCE_OR_MORE = Plan(at_most_once=False, processes=3, partitions=4, records=150, faults=stop_each(5.5))
AT_MOST_ONCE = replace(ONCE_OR_MORE, at_most_once=True)
HELD = replace(ONCE_OR_MORE, processes=1, faults=stop_each(5.0, "hold", 1))
ANEW: Faults = ((15.0, "anew", 0, 9.0), (23.0, "kill", 0, 12.0))
BOTH_ANEW: Faults = ((8.2, "anew", 0, 5.0), (26.19, "log anew", 0, 1.0), (26.73, "anew", 0, 5.0))
ANEW_AND_SEEN_LATE: Faults = tuple((at, "anew", 0, 9.0) for at in (8.0, 20.0, 32.0))
ANEW_WHILE_ASKED: Faults = (
    *((at, "anew", 0, 0.5) for at in (8.0, 12.0, 24.0, 28.0, 40.0, 44.0)),
    *((at, "hold", n, seconds) for at in (8.3, 24.3, 40.3) for n, seconds in enumerate((10.0, 6.0, 5.0))),
)
ONLY_CLAIMS: Faults = (
    *((21.5, "log anew", 1, 1.9), (22.7, "end", 0, 9.0), (23.4, "end", 0, 7.2), (23.5, "log anew", 2, 3.3)),
    *((44.1, "end", 3, 10.3), (45.0, "kill", 2, 8.0), (45.0, "slow", 0, 12.0)),
)
ANEW_AFTER_A_STALL: Faults = (
    *((11.9, "hold", 1, 9.1), (19.9, "hold", 1, 2.7), (30.1, "double", 1, 0.8), (33.1, "double", 0, 11.6)),
    *((33.4, "anew", 0, 7.2), (34.7, "anew", 0, 2.4), (42.2, "hold", 1, 8.5), (45.0, "anew", 1, 10.6)),
)
ANEW_WHILE_HELD: Faults = (
    (1.0, "double", 0, 50.0),
    *(
        fault
        for at in (8.0, 17.0, 26.0, 35.0)
        for fault in (*((at, "hold", n, 3.0 + n) for n in range(3)), (at + 1, "anew", 0, 1.0))
    ),
)
ANEW_WHILE_AWAY: Faults = (
    *((7.5, "slow", 0, 9.0), (8.0, "anew", 0, 5.0)),
    *((at, "away", 0, 6.0) for at in (8.5, 15.0, 22.0)),
)
SET_BACK: Faults = ((15.0, "jump back", 0, 11.0), (22.0, "log anew", 0, 1.0))
ANEW_WHILE_ONE_IS_HELD: Faults = tuple(
    fault for at in (8.0, 17.0, 26.0, 35.0) for fault in ((at, "hold", 0, 3.8), (at + 0.05, "anew", 0, 0.1))
)
LOG_ANEW_RIGHT_AFTER: Faults = (
    *((20.0, "hold", 1, 3.0), (20.0, "hold", 2, 3.0)),
    *((20.1, "anew", 0, 0.1), (22.2, "log anew", 0, 1.0)),
)
ANEW_AND_READ_LATE: Faults = ((15.0, "hold", 1, 45.0), (16.0, "anew", 0, 0.1), (52.0, "kill", 2, 1.0))
ANEW_WHILE_THE_LOG_IS_AWAY: Faults = (
    (8.0, "anew", 0, 60.0),
    *((7.8 + 5.9 * number, "log away", 0, 6.0) for number in range(5)),
)
ANEW_AND_SEEN_VERY_LATE: Faults = ((8.0, "anew", 0, 60.0), *((14.0, "hold", number, 40.0) for number in range(1, 4)))
BOTH_ANEW_WHILE_HELD: Faults = (
    *((22.0, "hold", 0, 10.0), (22.0, "hold", 1, 10.0), (22.2, "anew", 0, 0.1)),
    *((30.5, "kill", 2, 5.0), (31.0, "log anew", 2, 1.0)),
)
BOTH_ANEW_WHILE_STOPPED: Faults = (
    *((20.5, "slow", 0, 1.6), (22.0, "stop", 1, 10.0), (22.2, "anew", 0, 0.1)),
    *((31.5, "kill", 0, 5.0), (31.5, "kill", 2, 5.0), (31.7, "log anew", 2, 1.0)),
)
COPIED: Faults = ((1.0, "double", 0, 50.0), *stop_each(5.5))
IMITATED: Faults = (*((2.0, "imitate", n, 50.0) for n in range(3)), *stop_each(9.0, "kill"))
CUT: Faults = tuple(
    (at + seconds, kind, 0, 5.5)
    for at in range(4, 46, 6)
    for seconds, kind in ((0.0, "away"), (1.0, "cut"), (2.0, "cut"))
)
CUT_AND_PAUSED: Faults = (
    *((30.0 + step / 10, "cut", 0, 1.0) for step in range(4)),
    (30.6, "away", 0, 3.0),
    (31.0, "pause", 0, 9.0),
    (33.62, "kill", 0, 1.0),
)
KILLED = replace(AT_MOST_ONCE, processes=1, faults=((20.0, "kill", 0, 34.0),))

PLANTS: list[tuple[Plant, Plan, str]] = [
    (drop_a_record_while_the_lease_is_uncertain, HELD, "lost|stands still"),
    (hold_for_ever, ONCE_OR_MORE, "hold TopicPartition"),
    (begin_a_pause_by_the_operators_clock, replace(ONCE_OR_MORE, faults=((10.0, "pause", 0, 20.0),)), "paused"),
    (go_on_in_a_topic_that_was_recreated, replace(ONCE_OR_MORE, faults=ANEW), "lost|stands still"),
    (hand_out_what_the_log_has_not_promised, AT_MOST_ONCE, "twice"),
    (remember_before_its_time, replace(HELD, faults=ANEW), "lost|stands still"),
    (say_only_once_that_a_partition_was_cut, replace(HELD, faults=CUT), "lost|stands still"),
    (pause_before_the_log_says_so, replace(HELD, faults=CUT_AND_PAUSED), "lost|stands still"),
    (forget_what_was_kept, KILLED, "twice"),
    (forget_what_the_log_has_granted_before_it_is_kept, replace(AT_MOST_ONCE, faults=IMITATED), "twice"),
    (keep_positions_by_a_clock_that_goes_back, replace(AT_MOST_ONCE, faults=SET_BACK), "twice"),
    (
        take_a_new_log_for_a_whole_one,
        replace(ONCE_OR_MORE, faults=((15.0, "log anew", 0, 1.0),)),
        "hold TopicPartition",
    ),
    (take_a_late_heartbeat_for_that_of_a_holder, replace(ONCE_OR_MORE, faults=BOTH_ANEW), "lost|stands still"),
    (
        claim_again_right_after_a_stall,
        replace(ONCE_OR_MORE, processes=2, faults=ANEW_AFTER_A_STALL),
        "lost|stands still",
    ),
    (
        free_a_recreated_topic_once_its_holder_is_stale,
        replace(ONCE_OR_MORE, faults=ANEW_WHILE_HELD),
        "lost|stands still",
    ),
    (
        say_only_once_that_a_topic_was_recreated,
        replace(ONCE_OR_MORE, processes=1, faults=ANEW_WHILE_AWAY),
        "lost|stands still",
    ),
    (believe_a_broker_that_is_behind, replace(ONCE_OR_MORE, faults=ANEW_AND_SEEN_LATE), "set back"),
    (believe_an_answer_that_came_late, replace(ONCE_OR_MORE, faults=ANEW_WHILE_ASKED), "set back"),
    (name_a_topic_without_those_before, replace(ONCE_OR_MORE, faults=ANEW_AND_SEEN_LATE), "set back|stands still"),
    (
        end_the_doubt_by_where_a_reader_began,
        replace(ONCE_OR_MORE, processes=4, partitions=6, faults=ONLY_CLAIMS),
        "hold TopicPartition",
    ),
    (
        free_again_only_where_it_was_not_named,
        replace(ONCE_OR_MORE, faults=ANEW_AND_READ_LATE),
        "hold TopicPartition",
    ),
    (
        tell_a_position_after_a_stall,
        replace(ONCE_OR_MORE, partitions=1, faults=BOTH_ANEW_WHILE_HELD),
        "lost|stands still",
    ),
    (
        believe_positions_of_any_time,
        replace(ONCE_OR_MORE, faults=BOTH_ANEW_WHILE_STOPPED),
        "lost|stands still",
    ),
    (
        believe_a_broker_that_is_behind_until_the_log_answers,
        replace(ONCE_OR_MORE, partitions=2, faults=ANEW_WHILE_THE_LOG_IS_AWAY),
        "begins with",
    ),
    (
        believe_two_answers_with_a_stall_between_them,
        replace(ONCE_OR_MORE, processes=4, partitions=2, faults=ANEW_AND_SEEN_VERY_LATE),
        "set back",
    ),
    (
        free_a_recreated_topic_after_one_interval,
        replace(ONCE_OR_MORE, faults=ANEW_WHILE_ONE_IS_HELD),
        "hold TopicPartition",
    ),
    (
        keep_the_id_of_a_recreated_topic_at_once,
        replace(ONCE_OR_MORE, partitions=3, faults=LOG_ANEW_RIGHT_AFTER),
        "lost|stands still",
    ),
    (take_a_copy_for_a_message_of_now, replace(ONCE_OR_MORE, faults=COPIED), "hold TopicPartition"),
]


@pytest.mark.timeout(0)
@pytest.mark.parametrize(("plant", "plan", "found"), PLANTS, ids=[plant.__name__ for plant, _, _ in PLANTS])
def test_a_planted_bug_is_found(plant: Plant, plan: Plan, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in (0, 1):
        assert not run(seed, plan=plan).broken, "it is the bug that is found"
    plant(monkeypatch)
    for seed in range(SOON):
        broken = run(seed, plan=plan).broken
        if any(word in each for each in broken for word in found.split("|")):
            return
    raise AssertionError(f"not found in {SOON} schedules")
