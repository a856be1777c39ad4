"""When a stalled leader gives way, and when it does not."""

from __future__ import annotations

from outbox_plugin.core.leader_heartbeat import LeaderHeartbeat, Phase
from outbox_plugin.core.leadership_transfer import LeadershipTransfer


def beat(leader_id: str, phase: Phase = "leader", *, stalled: bool = False, can_replace: str = "") -> LeaderHeartbeat:
    place = ("2026-01-01", "incarnation", "place")
    return LeaderHeartbeat(0, phase, leader_id, "host-1", "host", 1, *place, stalled=stalled, can_replace=can_replace)


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
    assert (transfer.ask_since(10.1), transfer.stalled_leader(10.1)) == (None, None)
    transfer.receive(beat("other", "candidate", stalled=True), None, 11.0)
    assert (transfer.ask_since(11.1), transfer.stalled_leader(11.1)) == (8.1, "other")
    assert transfer.stalled_leader(14.1) is None
    transfer.receive(beat("other"), None, 11.2)
    assert transfer.stalled_leader(11.3) is None
