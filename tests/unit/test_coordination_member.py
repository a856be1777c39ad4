"""What an instance does with what the log says: leases, answers that come late, and words that are not its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from outbox_plugin.coordination.actions import KeepPosition, Send
from outbox_plugin.coordination.claims import MAX_UNCOMMITTED, Claim
from outbox_plugin.coordination.fetch_buffer import MayHandOut
from outbox_plugin.coordination.group_view import GroupView, TopicForm
from outbox_plugin.coordination.heartbeat_timing import HeartbeatTiming
from outbox_plugin.coordination.held_partition import LOST_SECONDS, UnansweredMessages
from outbox_plugin.coordination.member import Member
from outbox_plugin.coordination.messages import (
    LARGEST,
    ClaimingPartition,
    Entry,
    Heartbeat,
    Message,
    ReleasingPartition,
    coordination_partition,
)
from outbox_plugin.coordination.partition_owners import TOPIC_CLIENT, Holder
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.errors import UserError

ME, OTHER = Holder("run-1", "one"), Holder("run-2", "two")
PARTITION = TopicPartition("orders", 0)
EPOCH = 1_700_000_000.0


class Log:
    """A log that takes what a member sends at once; monotonic time is `now`, the broker's is ahead by `EPOCH`."""

    def __init__(self, *topics: str, at_most_once: bool = False) -> None:
        self.now = 100.0
        self.entries: list[Entry] = []
        self.member = Member(
            ME,
            GroupView("billing", ["orders", *topics], 10, width=8, since=0, log_ahead=EPOCH),
            HeartbeatTiming(10),
            now=self.now,
            at_most_once=at_most_once,
            limit=None,
        )
        self.member.describe({"orders": TopicForm(1, "id-1")}, self.now)

    def sent(self) -> list[Message]:
        return [action.message for action in self.member.take() if isinstance(action, Send)]

    def say(self, *messages: Message) -> None:
        for message in messages:
            self.say_at(self.now, message)

    def say_at(self, at: float, message: Message) -> None:
        entry = Entry(coordination_partition(message.topic, 8), len(self.entries), EPOCH + at, message)
        self.entries.append(entry)
        self.member.apply(entry, self.now)

    def step(self, seconds: float = 0.0) -> list[Message]:
        """Time passes, and all that is sent is in the log at once."""
        self.now += seconds
        self.member.tick(self.now)
        said = self.sent()
        self.say(*said)
        return said

    def lose(self, seconds: float) -> None:
        """Time passes, and all that is sent is lost."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + 5, end)
            self.member.tick(self.now)
            self.sent()

    def gain(self) -> None:
        self.step()
        self.step()
        assert PARTITION in self.member.held(self.now)


def kinds(messages: Iterable[Message]) -> list[str]:
    return [type(message).__name__ for message in messages]


@pytest.fixture
def log() -> Log:
    made = Log()
    made.gain()
    return made


def other(kind: type[Heartbeat] | type[ReleasingPartition], offset: int, who: Holder = ME) -> Message:
    return kind(0, int(EPOCH) + 50, *who, "billing", *PARTITION, offset)


def test_a_record_waits_while_the_claim_is_uncertain_and_goes_on_with_it(log: Log) -> None:
    claim = log.member.claims()[PARTITION]
    assert log.member.may_hand_out(PARTITION, claim, 0, log.now) is MayHandOut.YES
    assert log.member.done(PARTITION, 0)
    log.now += 25.0  # Nothing was sent: the interpreter was held.
    assert log.member.may_hand_out(PARTITION, claim, 1, log.now) is MayHandOut.NOT_YET
    assert kinds(log.step()) == ["Heartbeat"]
    assert log.member.may_hand_out(PARTITION, claim, 1, log.now) is MayHandOut.NOT_YET, "it had become stale"
    again = log.sent()
    assert kinds(again) == ["ClaimingPartition"]
    log.say(*again)
    log.step()
    assert log.member.claims()[PARTITION] is claim
    assert log.member.may_hand_out(PARTITION, claim, 1, log.now) is MayHandOut.YES
    log.step(6)
    assert log.member.offset_of(PARTITION)[0] == 1, "what was done before is done"


def test_a_claim_that_another_took_meanwhile_is_lost(log: Log) -> None:
    claim = log.member.claims()[PARTITION]
    log.now += 25.0
    log.say(ClaimingPartition(0, int(EPOCH), *OTHER, "billing", *PARTITION))
    assert log.member.may_hand_out(PARTITION, claim, 0, log.now) is MayHandOut.NEVER


@pytest.mark.parametrize("forged", [other(Heartbeat, 10**9), other(ReleasingPartition, 10**9), other(Heartbeat, 0)])
def test_what_was_said_in_our_name_is_set_right(log: Log, forged: Message) -> None:
    claim = log.member.claims()[PARTITION]
    for offset in range(3):
        log.member.may_hand_out(PARTITION, claim, offset, log.now)
        log.member.done(PARTITION, offset)
    log.say(forged)
    said = log.sent()
    assert kinds(said) == ["ClaimingPartition", "ReleasingPartition", "ClaimingPartition"]
    assert log.member.may_hand_out(PARTITION, claim, 3, log.now) is MayHandOut.NOT_YET
    log.say(*said)
    assert log.member.offset_of(PARTITION)[0] == 3
    assert log.member.may_hand_out(PARTITION, claim, 3, log.now) is MayHandOut.YES


def test_what_is_set_right_does_not_take_back_what_the_log_is_to_promise() -> None:
    log = Log(at_most_once=True)
    log.gain()
    log.member.ask_for_messages({PARTITION: 5}, log.now)
    asked = log.sent()
    log.say(other(Heartbeat, 0))
    correction = log.sent()
    assert kinds(correction) == ["ClaimingPartition", "ReleasingPartition", "ClaimingPartition"]
    log.say(*asked, *correction)
    assert log.member.verdicts({PARTITION: 5}) == {PARTITION: True}
    assert log.member.offset_of(PARTITION)[0] == 5


def test_a_promise_that_is_set_back_by_what_is_set_right_does_not_count() -> None:
    """The log's answer to a request that was given up, because it came late, stands before the release."""
    log = Log(at_most_once=True)
    log.gain()
    claim = log.member.claims()[PARTITION]
    asked = {PARTITION: (claim, 100)}
    log.member.ask_for_messages({PARTITION: 100}, log.now)
    late = log.sent()
    log.member.promise(asked, ())  # It was waited for long enough.
    log.say(other(Heartbeat, 0))
    set_right = log.sent()
    log.member.ask_for_messages({PARTITION: 100}, log.now)
    again = log.sent()
    log.say(*late, *set_right)
    assert PARTITION in log.member.held(log.now)
    assert log.member.offset_of(PARTITION)[0] == 0, "another instance would go on there"
    assert log.member.granted(asked, log.now) == []
    log.say(*again)
    assert [each.offset for each in log.member.granted(asked, log.now)] == [100]


def test_what_is_said_on_a_wrong_partition_is_passed_over(log: Log) -> None:
    wrong = (coordination_partition("orders", 8) + 1) % 8
    log.member.apply(Entry(wrong, 0, EPOCH + log.now, other(Heartbeat, 10**9)), log.now)
    assert log.sent() == []
    assert log.member.offset_of(PARTITION)[0] == 0


def test_what_is_never_committed_does_not_grow_without_bound(log: Log) -> None:
    claim = log.member.claims()[PARTITION]
    for offset in range(MAX_UNCOMMITTED):
        claim.hand_out(offset, keep=True)
    with pytest.raises(UserError, match="100000 records of partition 0 of orders are handed out and not committed"):
        log.member.may_hand_out(PARTITION, claim, MAX_UNCOMMITTED, log.now)


def test_a_position_is_kept_only_once_the_log_has_taken_it(log: Log) -> None:
    """One who was stopped for long, and comes back to release, has no say any more."""
    log.member.take()
    log.say(ClaimingPartition(0, 0, *ME, "others", *PARTITION))
    log.lose(25)
    log.member.leave(log.now, keep=False)
    said = log.sent()
    assert kinds(said) == ["ReleasingPartition"]
    log.say(ClaimingPartition(0, 0, *OTHER, "billing", *PARTITION), *said)
    assert log.member.take() == []


def test_who_reads_a_part_of_the_log_late_does_not_hide_what_others_have_kept_since() -> None:
    """It was stopped, and another has gone on where it was. It has read on in one part of the log, not yet in this."""
    log = Log("bills")
    assert coordination_partition("bills", 8) != coordination_partition("orders", 8)
    log.gain()
    for _ in range(7):  # The first position was kept. Another one is, after three heartbeats.
        log.step(5.0)
    log.member.may_hand_out(PARTITION, log.member.claims()[PARTITION], 0, log.now)
    log.member.done(PARTITION, 0)
    log.now += 5.0
    log.member.tick(log.now)
    [heartbeat] = [each for each in log.sent() if isinstance(each, Heartbeat) and each.topic == "orders"]
    sent = log.now
    log.now += 15.0
    log.say(Heartbeat(0, int(EPOCH), *OTHER, "billing", "bills", 0, 0))
    log.say_at(sent, heartbeat)
    assert [each.at for each in log.member.take() if isinstance(each, KeepPosition)] == [EPOCH + sent]


def test_who_reads_its_release_late_keeps_what_another_has_said_since(log: Log) -> None:
    """Else the state topic would have the release behind it. When Kafka compacts the topic, the last record stays."""
    log.member.take()
    log.member.leave(log.now, keep=False)
    log.say(*log.sent())
    for message in (ClaimingPartition, Heartbeat):
        offset = (500,) if message is Heartbeat else ()
        log.say(message(0, int(EPOCH), *OTHER, "billing", *PARTITION, *offset))
    assert [each.offset for each in log.member.take() if isinstance(each, KeepPosition)] == [500]


def test_what_was_said_in_our_name_is_not_kept(log: Log) -> None:
    log.member.take()
    log.now += 6.0
    log.member.tick(log.now)
    log.say(*log.sent(), other(Heartbeat, 10**9))
    assert [each for each in log.member.take() if isinstance(each, KeepPosition)] == []


def test_messages_of_one_second_that_come_back_late_are_all_known_as_ours() -> None:
    """Else an instance that is slow would take its own words for another's, and correct each by three more."""
    unanswered, tp = UnansweredMessages(), TopicPartition("orders", 0)
    for sent in (1.0, 1.1, 1.2):
        unanswered.add(tp, 7, sent)
    late = 1.0 + 2 * LOST_SECONDS
    assert [unanswered.answer(tp, 7, late) for _ in range(4)] == [1.0, 1.1, 1.2, None]
    assert not unanswered


def test_a_lost_message_does_not_make_a_later_one_of_its_timestamp_look_old() -> None:
    """While the brokers' clock stands back, all our messages have one timestamp."""
    unanswered, tp = UnansweredMessages(), TopicPartition("orders", 0)
    unanswered.add(tp, 7, 1.0)
    for sent in (100.0, 200.0):
        unanswered.add(tp, 7, sent)
        assert unanswered.answer(tp, 7, sent + 1) == sent


def consume(log: Log, count: int) -> Claim:
    """Hand out so many records, and commit them: the log has it."""
    claim = log.member.claims()[PARTITION]
    for offset in range(count):
        log.member.may_hand_out(PARTITION, claim, offset, log.now)
        log.member.done(PARTITION, offset)
    log.step(6)
    return claim


def test_where_a_partition_was_cut_the_group_goes_on_at_the_cut(log: Log) -> None:
    claim = consume(log, 10)
    assert log.member.offset_of(PARTITION)[0] == 10
    log.member.go_back(PARTITION, claim, 5, log.now)
    log.member.go_back(PARTITION, claim, 3, log.now)  # The claim has ended.
    said = log.sent()
    assert kinds(said) == ["ClaimingPartition", "ReleasingPartition", "ClaimingPartition"]
    again = log.member.claims()[PARTITION]
    assert again is not claim
    assert again.position == 5
    assert log.member.may_hand_out(PARTITION, again, 5, log.now) is MayHandOut.NOT_YET
    log.say(*said)
    assert log.member.offset_of(PARTITION)[0] == 5
    assert log.member.may_hand_out(PARTITION, again, 5, log.now) is MayHandOut.YES


def test_that_a_partition_was_cut_is_said_until_the_log_has_it_and_before_the_partition_is_stale(log: Log) -> None:
    claim = consume(log, 10)
    log.member.go_back(PARTITION, claim, 5, log.now)
    log.sent()  # They are lost.
    assert kinds(log.step(6)) == ["ClaimingPartition", "ReleasingPartition", "ClaimingPartition"]
    assert log.member.offset_of(PARTITION)[0] == 5
    assert "ReleasingPartition" not in kinds(log.step(6))


def test_or_after_it_was_stale(log: Log) -> None:
    claim = consume(log, 10)
    log.lose(25)
    log.member.go_back(PARTITION, claim, 5, log.now)
    log.step()
    assert log.member.offset_of(PARTITION)[0] == 5
    assert PARTITION in log.member.held(log.now)


def test_what_does_not_count_is_said_again(log: Log) -> None:
    claim = consume(log, 10)
    log.lose(25)
    log.member.go_back(PARTITION, claim, 5, log.now)
    _, release, claiming = log.sent()
    log.say(release, claiming)  # The first claim is lost.
    assert log.member.offset_of(PARTITION)[0] == 10
    again = log.member.claims()[PARTITION]
    assert log.member.may_hand_out(PARTITION, again, 5, log.now) is MayHandOut.NOT_YET
    log.step(6)
    assert log.member.offset_of(PARTITION)[0] == 5


def test_that_a_topic_was_recreated_is_said_until_the_log_has_it(log: Log) -> None:
    consume(log, 10)
    recreated = {"orders": TopicForm(1, "id-2")}
    log.member.describe(recreated, log.now)
    assert kinds(log.sent()) == ["ReleasingPartition"]  # It is lost.
    log.step(5)
    log.member.describe(recreated, log.now)
    log.say(*log.sent())
    assert log.member.offset_of(PARTITION) == (0, ("id-2", "id-1"))
    log.member.describe(recreated, log.now)
    assert log.sent() == []


def test_who_cannot_read_the_log_says_ever_less_often_that_a_topic_was_recreated(log: Log) -> None:
    """Each time, all its partitions are free: it would keep the others from consuming the topic."""
    consume(log, 10)
    began, said = log.now, []
    while log.now < began + 600:
        log.member.describe({"orders": TopicForm(1, "id-2")}, log.now)
        if "ReleasingPartition" in kinds(log.sent()):
            said.append(log.now - began)
        log.lose(5)
    assert said == [0, 20, 60, 140, 260, 380, 500]


def describe(log: Log, topic_id: str) -> list[Message]:
    """A broker says that the topic is this one. Returns what is sent because of that; it is in the log at once."""
    log.say(*log.sent())
    log.member.describe({"orders": TopicForm(1, topic_id)}, log.now)
    said = log.sent()
    log.say(*said)
    return said


def test_a_broker_that_is_behind_sets_nothing_back(log: Log) -> None:
    consume(log, 10)
    assert kinds(describe(log, "id-2")) == ["ReleasingPartition"]
    for _ in range(10):
        assert describe(log, "id-1") == []
        log.step(5)
    assert PARTITION in log.member.held(log.now), "another broker has said that it is id-2"
    assert log.member.offset_of(PARTITION) == (0, ("id-2", "id-1"))


def test_what_all_brokers_say_for_long_counts_whatever_the_log_says(log: Log) -> None:
    describe(log, "id-2")
    log.step(6)
    for _ in range(23):
        assert describe(log, "id-1") == []
        log.step(5)
    describe(log, "id-2")
    for _ in range(24):
        assert describe(log, "id-1") == []
        log.step(5)
    assert kinds(describe(log, "id-1")) == ["ReleasingPartition"]
    assert log.member.offset_of(PARTITION) == (0, ("id-1", "id-2"))


def test_nor_before_the_log_has_the_later_topic(log: Log) -> None:
    """The log does not answer: what other brokers have told is all that is known."""
    for _ in range(20):
        for topic_id in ("id-2", "id-1"):
            log.member.describe({"orders": TopicForm(1, topic_id)}, log.now)
            log.lose(1)
    log.step(6)
    log.sent()
    log.member.describe({"orders": TopicForm(1, "id-2")}, log.now)
    said = log.sent()
    assert [message.instance_id for message in said] == ["id-2,id-1"]
    log.say(*said)
    assert log.member.offset_of(PARTITION) == (0, ("id-2", "id-1"))


def test_what_is_told_while_the_log_does_not_answer_does_not_grow_without_bound(log: Log) -> None:
    for number in range(2, 40):
        log.member.describe({"orders": TopicForm(1, f"id-{number}")}, log.now)
    *_, last = log.sent()
    assert last.instance_id == ",".join(f"id-{number}" for number in range(39, 30, -1))


@pytest.mark.parametrize("step", [200, 5], ids=["it stood still", "none came"])
def test_two_answers_are_not_what_all_brokers_say_for_long(log: Log, step: int) -> None:
    describe(log, "id-2")
    log.step(6)
    assert describe(log, "id-1") == []
    for _ in range(200 // step):
        log.step(step)
    for _ in range(6):
        assert describe(log, "id-1") == []
    assert describe(log, "id-2") == []


def others_say_that_it_was_recreated(log: Log) -> None:
    log.say(ReleasingPartition(0, int(EPOCH), "id-2,id-1", TOPIC_CLIENT, "billing", *PARTITION, 0))


def test_what_the_brokers_were_asked_before_others_saw_a_later_topic_does_not_count(log: Log) -> None:
    """The answer comes late, or the process was stopped. It names a topic that the log never had."""
    asked = log.now
    log.now += 1
    others_say_that_it_was_recreated(log)
    log.member.describe({"orders": TopicForm(1, "id-3")}, log.now, asked=asked)
    assert log.sent() == []
    assert kinds(describe(log, "id-3")) == ["ReleasingPartition"]


def test_a_partition_of_a_recreated_topic_is_claimed_once_a_broker_has_named_that_topic(log: Log) -> None:
    others_say_that_it_was_recreated(log)
    for _ in range(6):
        assert log.step(5) == []
        assert describe(log, "id-1") == []
    describe(log, "id-2")
    log.step(5)
    assert PARTITION in log.member.held(log.now)


def test_a_claim_of_one_who_knows_the_former_topic_only_is_given_up() -> None:
    """It was sent before a stall. Which records are at which offsets, the instance is not told yet."""
    log = Log()
    log.member.tick(log.now)
    claim = log.sent()
    others_say_that_it_was_recreated(log)
    log.say(Heartbeat(0, int(EPOCH), *OTHER, "billing", *PARTITION, 5))
    log.now += 21
    log.say(*claim)
    said = log.sent()
    assert kinds(said) == ["ReleasingPartition"]
    log.say(*said)
    assert (log.member.claims(), log.member.offset_of(PARTITION)) == ({}, (0, ("id-2", "id-1")))


def test_a_claim_that_counts_before_the_log_has_the_new_topic_is_given_up() -> None:
    """The log's position is one in the former topic, and would be kept as one in the new topic."""
    log = Log()
    log.member.tick(log.now)
    claim = log.sent()
    log.member.describe({"orders": TopicForm(1, "id-2")}, log.now)
    announced = log.sent()
    log.say(*claim)
    assert (kinds(announced), log.member.claims()) == (["ReleasingPartition"], {})
    log.say(*log.sent(), *announced)
    for _ in range(6):
        log.step(5)
    assert log.member.claims()[PARTITION].position == 0


def test_that_a_topic_was_recreated_is_not_kept_while_heartbeats_of_the_former_one_may_come(log: Log) -> None:
    """If the coordination topic is lost just then, one that comes late would count as a position in the new topic."""
    log.member.take()
    log.member.describe({"orders": TopicForm(1, "id-2")}, log.now)
    log.say(*log.sent())
    assert [each for each in log.member.take() if isinstance(each, KeepPosition)] == []


def test_a_recreated_topic_that_is_widened_later_has_no_position_of_the_old_one(log: Log) -> None:
    second = TopicPartition("orders", 1)
    log.member.describe({"orders": TopicForm(2, "id-1")}, log.now)
    log.say(
        Heartbeat(0, int(EPOCH), *OTHER, "billing", *second, 10), ClaimingPartition(0, 0, *OTHER, "billing", *second)
    )
    log.say(Heartbeat(0, int(EPOCH), *OTHER, "billing", *second, 10))
    assert log.member.offset_of(second)[0] == 10
    for partitions in (1, 2):
        log.member.describe({"orders": TopicForm(partitions, "id-2")}, log.now)
        log.say(*log.sent())
    assert log.member.offset_of(second) == (0, ("id-2", "id-1"))


def test_who_stood_still_claims_nothing_again_before_it_has_read_the_log(log: Log) -> None:
    """Others may have held the partition meanwhile, and its topic may have been recreated."""
    consume(log, 10)
    log.now += 60
    log.member.tick(log.now)
    said = log.sent()
    assert kinds(said) == ["Heartbeat"], "the claim was to be renewed long ago"
    log.say(*said)
    assert PARTITION not in log.member.held(log.now)
    assert "ClaimingPartition" in kinds(log.step(6))
    assert PARTITION in log.member.held(log.now)
    assert log.member.offset_of(PARTITION)[0] == 10


def offsets(messages: Iterable[Message]) -> list[int]:
    return [message.offset for message in messages if isinstance(message, Heartbeat)]


def test_who_does_not_know_whether_it_holds_a_partition_tells_no_position(log: Log) -> None:
    """Its topic and the coordination topic may both have been recreated: then its heartbeats count in the new one."""
    consume(log, 10)
    log.lose(25)
    log.now += 6
    log.member.tick(log.now)
    assert offsets(log.sent()) == [0], "its lease has ended"
    for _ in range(3):
        log.step(6)
    assert offsets(log.step(6)) == [10]
    log.now += 25
    log.member.tick(log.now)
    assert offsets(log.sent()) == [0], "it stood still"


def test_who_stood_still_releases_nothing_before_it_has_read_the_log(log: Log) -> None:
    """Its position may be of a former topic."""
    consume(log, 10)
    log.now += 400
    assert kinds(log.step()) == ["Heartbeat"], "nobody polled for long"
    assert "ReleasingPartition" in kinds(log.step())
    assert log.member.claims() == {}


def test_who_stood_still_and_leaves_tells_no_position(log: Log) -> None:
    consume(log, 10)
    log.now += 25
    log.member.leave(log.now, keep=False)
    assert (log.sent(), log.member.claims(), log.member.has_left) == ([], {}, True)


def test_who_stood_still_sets_nothing_right_before_it_has_read_the_log(log: Log) -> None:
    consume(log, 10)
    before = int(EPOCH + log.now)
    log.now += 60
    log.say_at(100, Heartbeat(0, before + 1, *ME, "billing", *PARTITION, 50))  # By somebody else.
    assert log.sent() == []
    log.member.tick(log.now)
    said = log.sent()
    assert kinds(said) == ["Heartbeat"]
    log.say_at(100, replace(said[0], timestamp=before))  # A copy of an old one says nothing of now.
    log.member.tick(log.now + 6)
    assert "ReleasingPartition" not in kinds(log.sent())
    log.say(*said)
    assert "ReleasingPartition" in kinds(log.step(12))
    assert log.member.offset_of(PARTITION)[0] == 10


def test_who_stood_still_claims_again_however_often_others_write_in_its_name(log: Log) -> None:
    """Their timestamps, which may be of any time, say nothing of what became of our messages."""
    consume(log, 10)
    log.now += 60
    for _ in range(6):
        log.member.tick(log.now)
        said = log.sent()
        log.say(replace(other(Heartbeat, 0), timestamp=LARGEST), *said)
        log.now += 6
    assert PARTITION in log.member.held(log.now)


def test_what_is_set_right_is_so_with_the_last_release(log: Log) -> None:
    """One that was sent before the cut was noticed says too much."""
    claim = consume(log, 10)
    log.say(other(Heartbeat, 0))
    before = log.sent()
    log.now += 1
    log.member.go_back(PARTITION, claim, 5, log.now)
    log.sent()  # They are lost.
    log.say(*before)
    assert log.member.offset_of(PARTITION)[0] == 10
    log.step(6)
    assert log.member.offset_of(PARTITION)[0] == 5


def test_a_partition_that_was_cut_belongs_to_one_who_claims_it_first(log: Log) -> None:
    claim = consume(log, 10)
    log.member.go_back(PARTITION, claim, 5, log.now)
    claiming, release, again = log.sent()
    log.say(claiming, release, ClaimingPartition(0, int(EPOCH), *OTHER, "billing", *PARTITION), again)
    assert PARTITION not in log.member.claims()
    assert log.member.offset_of(PARTITION)[0] == 5


@pytest.mark.parametrize("forged", [(), (other(Heartbeat, 0),)], ids=["once", "after it had set right something else"])
def test_one_who_gains_it_again_by_what_it_said_of_the_cut_begins_at_the_cut(
    log: Log, forged: tuple[Message, ...]
) -> None:
    claim = consume(log, 10)
    log.say(*forged)
    said = log.sent()
    log.lose(25)
    log.member.go_back(PARTITION, claim, 5, log.now)
    said += log.sent()
    log.say(ClaimingPartition(0, int(EPOCH), *OTHER, "billing", *PARTITION))
    assert PARTITION not in log.member.claims()
    log.now += 25  # The other one is gone.
    log.say(*said)
    assert log.member.claims()[PARTITION].position == 5
    log.step()
    assert log.member.offset_of(PARTITION)[0] == 5


def test_at_most_once_a_partition_that_was_cut_is_released_once() -> None:
    log = Log(at_most_once=True)
    log.gain()
    log.member.go_back(PARTITION, log.member.claims()[PARTITION], 0, log.now)
    assert kinds(log.sent()) == ["ReleasingPartition"]
    assert PARTITION not in log.member.claims()
