"""When a leader gives way to another harvester, and when it does not."""

from __future__ import annotations

from outbox_plugin.core.leader_heartbeat import LeaderHeartbeat, Phase
from outbox_plugin.core.leadership_transfer import LeadershipTransfer


def beat(
    leader_id: str, phase: Phase = "leader", *, stalled: bool = False, can_replace: str = "", owns: bool = False
) -> LeaderHeartbeat:
    place = ("2026-01-01", "incarnation", "place")
    return LeaderHeartbeat(
        0, phase, leader_id, "host-1", "host", 1, *place, stalled=stalled, can_replace=can_replace, owns=owns
    )


def stalled() -> LeadershipTransfer:
    """Its own term, `mine`, has waited since 10.0, and a follower said at 11.0 that it can replace it."""
    transfer = LeadershipTransfer()
    transfer.set_waiting_since(10.0)
    transfer.receive(beat("", "waiting", can_replace="mine"), "mine", 11.0)
    return transfer


def test_it_resigns_if_a_broker_is_silent_for_it_alone() -> None:
    assert stalled().successor(False, 11.1) == "host-1"


def test_it_does_not_resign_before_it_knows() -> None:
    assert not stalled().successor(None, 11.1)


def test_it_does_not_resign_if_all_brokers_answer() -> None:
    assert not stalled().successor(True, 11.1)


def test_what_a_follower_said_counts_for_one_request_and_not_for_long() -> None:
    transfer = stalled()
    assert not transfer.successor(False, 14.5)
    transfer = stalled()
    transfer.set_waiting_since(11.05)
    assert not transfer.successor(False, 12.0)


def test_a_follower_of_another_term_does_not_count() -> None:
    transfer = LeadershipTransfer()
    transfer.set_waiting_since(10.0)
    transfer.receive(beat("", "waiting", can_replace="earlier"), "mine", 11.0)
    assert not transfer.successor(False, 11.1)


def test_it_resigns_more_and_more_rarely_while_it_goes_on() -> None:
    transfer = LeadershipTransfer()
    resigned: list[float] = []
    for second in range(1_000):
        transfer.set_waiting_since(float(second))
        transfer.receive(beat("", "waiting", can_replace="mine"), "mine", second + 0.5)
        if transfer.successor(False, second + 0.6):
            transfer.mark_resigned(second + 0.6)
            resigned.append(second)
    assert resigned == [0, 30, 90, 210, 450, 750]
    transfer.set_waiting_since(5_000.0)
    transfer.receive(beat("", "waiting", can_replace="mine"), "mine", 5_001.0)
    transfer.mark_resigned(5_001.0)
    transfer.receive(beat("", "waiting", can_replace="mine"), "mine", 5_031.1)
    assert transfer.successor(False, 5_031.1)


def test_a_question_is_of_the_request_that_waits() -> None:
    transfer = LeadershipTransfer()
    assert transfer.ask_since(10.0) is None
    transfer.set_waiting_since(10.0)
    assert (transfer.ask_since(10.4), transfer.ask_since(10.6), transfer.ask_since(20.0)) == (None, 10.0, 17.0)


def test_a_follower_asks_as_long_as_the_leader_is_stalled() -> None:
    transfer = LeadershipTransfer()
    transfer.receive(beat("other"), None, 10.0)
    assert (transfer.ask_since(10.1), transfer.replaceable_leader(10.1)) == (None, None)
    transfer.receive(beat("other", "candidate", stalled=True), None, 11.0)
    assert (transfer.ask_since(11.1), transfer.replaceable_leader(11.1)) == (8.1, "other")
    assert transfer.replaceable_leader(14.1) is None
    transfer.receive(beat("other"), None, 11.2)
    assert transfer.replaceable_leader(11.3) is None


def owner(since: float = 10.0) -> LeadershipTransfer:
    """It owns the partition since 10.0, and another leads `since`."""
    transfer = LeadershipTransfer()
    transfer.set_ownership(owns=True, is_uneven=True, now=10.0)
    transfer.receive(beat("other"), None, since)
    return transfer


def test_an_owner_can_replace_who_leads_its_shard_once_both_have_settled() -> None:
    transfer = owner(since=11.0)
    assert transfer.replaceable_leader(13.9) is None
    transfer.receive(beat("other"), None, 13.9)
    assert (transfer.replaceable_leader(14.0), transfer.leads_what_we_own(14.0)) == ("other", True)
    assert transfer.ask_since(14.0) == 11.0
    transfer.receive(beat("third", "candidate"), None, 14.1)
    assert transfer.replaceable_leader(14.2) is None


def test_who_is_silent_or_owns_no_longer_replaces_nobody() -> None:
    assert owner().replaceable_leader(13.1) is None
    transfer = owner()
    transfer.receive(beat("other"), None, 13.5)
    assert transfer.replaceable_leader(13.6) == "other"
    for owns, is_uneven in ((True, False), (False, True)):
        transfer.set_ownership(owns=owns, is_uneven=is_uneven, now=13.7)
        assert transfer.replaceable_leader(13.7) is None


def test_an_owner_whose_term_has_failed_leaves_who_leads_alone_for_longer_and_longer() -> None:
    transfer = owner()
    claimed: list[int] = []
    for second in range(11, 400):
        transfer.receive(beat("other"), None, float(second))
        if transfer.replaceable_leader(float(second)):
            claimed.append(second)
            transfer.mark_asked(float(second))
            transfer.mark_failed(float(second))
            transfer.mark_failed(second + 0.5)
    assert claimed == [13, 43, 103, 223]


def test_an_owner_whose_term_has_failed_unasked_need_not_wait() -> None:
    """The servers were away for all, and another one led first when they were back."""
    transfer = owner()
    transfer.mark_failed(10.5)
    transfer.receive(beat("other"), None, 13.0)
    assert transfer.replaceable_leader(13.1) == "other"
    transfer.mark_asked(13.1)
    transfer.mark_failed(60.0)
    transfer.receive(beat("other"), None, 60.1)
    assert transfer.replaceable_leader(60.2) == "other"


def test_a_leader_gives_way_to_the_owner_and_to_nobody_else() -> None:
    transfer = LeadershipTransfer()
    transfer.receive(beat("", "waiting", can_replace="mine"), "mine", 10.0)
    assert transfer.owner(10.1) is None
    transfer.receive(beat("", "waiting", can_replace="mine", owns=True), "mine", 10.2)
    transfer.set_waiting_since(10.3)
    assert transfer.owner(10.4) == "host-1"
    assert transfer.owner(13.3) is None


def test_a_leader_that_owns_the_partition_gives_way_to_no_other_owner() -> None:
    """The other one's client has not heard yet that it owns the partition no longer, or ours has not."""
    transfer = LeadershipTransfer()
    transfer.set_ownership(owns=True, is_uneven=False, now=9.0)
    transfer.receive(beat("", "waiting", can_replace="mine", owns=True), "mine", 10.0)
    assert transfer.owner(10.1) is None
    transfer.set_ownership(owns=False, is_uneven=False, now=10.2)
    assert transfer.owner(10.2) == "host-1"


def test_a_leader_does_not_give_way_to_owners_again_and_again() -> None:
    transfer = LeadershipTransfer()
    resigned: list[int] = []
    for second in range(400):
        transfer.receive(beat("", "waiting", can_replace="mine", owns=True), "mine", float(second))
        if (owner := transfer.owner(float(second))) is not None:
            transfer.mark_given(owner, float(second))
            resigned.append(second)
    assert resigned == [0, 30, 90, 210]


def test_a_leader_gives_way_at_once_to_an_owner_that_has_been_started_again() -> None:
    """Nor does it matter that it has given way because it was stalled."""
    transfer = LeadershipTransfer()
    transfer.mark_given("host-0", 10.0)
    transfer.mark_resigned(10.1)
    transfer.receive(beat("", "waiting", can_replace="mine", owns=True), "mine", 11.0)
    assert transfer.owner(11.1) == "host-1"
    transfer.mark_given("host-1", 11.1)
    transfer.receive(beat("", "waiting", can_replace="mine", owns=True), "mine", 12.0)
    assert transfer.owner(12.1) is None
