"""When a stalled leader gives way, and when it does not."""

from __future__ import annotations

from outbox_plugin.core.leader_heartbeat import LeaderHeartbeat, Phase
from outbox_plugin.core.succession import Succession


def beat(leader_id: str, phase: Phase = "leader", *, stalled: bool = False, can_replace: str = "") -> LeaderHeartbeat:
    place = ("2026-01-01", "incarnation", "place")
    return LeaderHeartbeat(0, phase, leader_id, "host-1", "host", 1, *place, stalled=stalled, can_replace=can_replace)


def stalled() -> Succession:
    """Its own term, `mine`, has waited since 10.0, and a follower said at 11.0 that it can replace it."""
    succession = Succession()
    succession.set_waiting_since(10.0)
    succession.receive(beat("", "waiting", can_replace="mine"), "mine", 11.0)
    return succession


def test_it_resigns_if_a_broker_is_silent_for_it_alone() -> None:
    assert stalled().successor(False, 11.1) == "host-1"


def test_it_does_not_resign_before_it_knows() -> None:
    assert not stalled().successor(None, 11.1)


def test_it_does_not_resign_if_all_brokers_answer() -> None:
    assert not stalled().successor(True, 11.1)


def test_what_a_follower_said_counts_for_one_request_and_not_for_long() -> None:
    succession = stalled()
    assert not succession.successor(False, 14.5)
    succession = stalled()
    succession.set_waiting_since(11.05)
    assert not succession.successor(False, 12.0)


def test_a_follower_of_another_term_does_not_count() -> None:
    succession = Succession()
    succession.set_waiting_since(10.0)
    succession.receive(beat("", "waiting", can_replace="earlier"), "mine", 11.0)
    assert not succession.successor(False, 11.1)


def test_it_resigns_more_and_more_rarely_while_it_goes_on() -> None:
    succession = Succession()
    resigned: list[float] = []
    for second in range(1_000):
        succession.set_waiting_since(float(second))
        succession.receive(beat("", "waiting", can_replace="mine"), "mine", second + 0.5)
        if succession.successor(False, second + 0.6):
            succession.mark_resigned(second + 0.6)
            resigned.append(second)
    assert resigned == [0, 30, 90, 210, 450, 750]
    succession.set_waiting_since(5_000.0)
    succession.receive(beat("", "waiting", can_replace="mine"), "mine", 5_001.0)
    succession.mark_resigned(5_001.0)
    succession.receive(beat("", "waiting", can_replace="mine"), "mine", 5_031.1)
    assert succession.successor(False, 5_031.1)


def test_a_question_is_of_the_request_that_waits() -> None:
    succession = Succession()
    assert succession.ask_since(10.0) is None
    succession.set_waiting_since(10.0)
    assert (succession.ask_since(10.4), succession.ask_since(10.6), succession.ask_since(20.0)) == (None, 10.0, 17.0)


def test_a_follower_asks_as_long_as_the_leader_is_stalled() -> None:
    succession = Succession()
    succession.receive(beat("other"), None, 10.0)
    assert (succession.ask_since(10.1), succession.stalled_leader(10.1)) == (None, None)
    succession.receive(beat("other", "candidate", stalled=True), None, 11.0)
    assert (succession.ask_since(11.1), succession.stalled_leader(11.1)) == (8.1, "other")
    assert succession.stalled_leader(14.1) is None
    succession.receive(beat("other"), None, 11.2)
    assert succession.stalled_leader(11.3) is None
