"""The election's table, row by row, and the stories that it tells."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outbox_plugin.core.election import Election, ElectionTiming
from outbox_plugin.core.election import ElectionAction as Action
from outbox_plugin.core.leader_heartbeat import LeaderHeartbeat, Phase

TIMING = ElectionTiming(heartbeat_interval=0.3, silence=1.0, receive_deadline=5.0, spread=0.2)


def beat(leader_id: str, phase: Phase = "leader") -> LeaderHeartbeat:
    return LeaderHeartbeat(0, phase, leader_id, "host-1", "host", 1, "2026-01-01", "incarnation", "place")


def follower(*, owns: bool = False, early_takeover: bool = True) -> Election:
    election = Election(TIMING, early_takeover=early_takeover)
    election.set_ownership(owns)
    return election


def leader(*, owns: bool = True, early_takeover: bool = True) -> Election:
    election = follower(owns=owns, early_takeover=early_takeover)
    election.begin_term("mine", 0.0)
    election.mark_taken_over()
    return election


def test_ownership_makes_a_leader() -> None:
    assert follower().tick(100.0) is Action.FOLLOW
    assert follower(owns=True).tick(100.0) is Action.ACQUIRE


@pytest.mark.parametrize("phase", ["candidate", "leader"])
def test_an_owner_waits_for_a_living_leader_to_fall_silent(phase: Phase) -> None:
    election = follower(owns=True)
    election.receive(beat("other", phase), 10.0)
    assert election.tick(11.0) is Action.FOLLOW
    assert election.tick(11.01) is Action.ACQUIRE


def test_a_follower_takes_over_a_silent_leader_without_ownership_where_the_early_takeover() -> None:
    election = follower()
    election.receive(beat("other"), 10.0)
    assert election.tick(11.2) is Action.FOLLOW  # silence and its own spread
    assert election.tick(11.21) is Action.ACQUIRE


def test_without_fencing_only_the_owner_leads() -> None:
    election = follower(early_takeover=False)
    election.receive(beat("other"), 10.0)
    assert election.tick(1_000.0) is Action.FOLLOW
    election.set_ownership(True)
    assert election.tick(1_000.0) is Action.ACQUIRE


def test_a_follower_that_hears_nothing_waits_for_ownership() -> None:
    election = follower()
    assert election.tick(1e6) is Action.FOLLOW
    assert election.awaits_own_heartbeat


def test_a_follower_that_finds_at_its_start_that_nobody_leads_takes_over_without_listening() -> None:
    election = follower()
    election.assume_nobody_leads(10.0)
    assert election.tick(10.1) is Action.ACQUIRE
    election.receive(beat("other", "candidate"), 10.1)
    assert election.tick(10.2) is Action.FOLLOW


def test_what_was_found_at_the_start_counts_less_than_what_has_been_heard_since() -> None:
    election = follower()
    election.receive(beat("other"), 9.9)
    election.assume_nobody_leads(10.0)
    assert election.tick(10.1) is Action.FOLLOW


def test_without_fencing_a_shard_without_a_leader_is_left_to_the_owner() -> None:
    election = follower(early_takeover=False)
    election.assume_nobody_leads(10.0)
    assert election.tick(1_000.0) is Action.FOLLOW


def test_a_follower_that_listens_and_hears_no_leader_takes_over_without_ownership() -> None:
    """The group coordinator of a broker gives the first member its partitions after 3 s."""
    election = follower()
    election.receive(beat("", "waiting"), 10.0)
    assert not election.awaits_own_heartbeat
    election.receive(beat("", "waiting"), 10.3)
    assert election.tick(11.2) is Action.FOLLOW
    assert election.tick(11.21) is Action.ACQUIRE


def test_without_fencing_a_follower_that_hears_no_leader_waits_for_ownership() -> None:
    election = follower(early_takeover=False)
    assert not election.awaits_own_heartbeat
    election.receive(beat("", "waiting"), 10.0)
    assert election.tick(1e6) is Action.FOLLOW


def test_after_a_resignation_the_shard_is_free_at_once() -> None:
    election = follower()
    election.receive(beat("other"), 10.0)
    election.receive(beat("other", "resigned"), 10.1)
    assert election.tick(10.16) is Action.FOLLOW  # A third of its own spread.
    assert election.tick(10.17) is Action.ACQUIRE


def test_the_resignation_of_one_that_was_replaced_before_frees_nothing() -> None:
    """As of a leader that was paused, and wakes up while its successor leads."""
    election = follower(owns=True)
    election.receive(beat("zombie"), 10.0)
    election.receive(beat("successor"), 20.0)
    election.receive(beat("zombie", "resigned"), 20.1)
    assert election.tick(20.9) is Action.FOLLOW


def test_a_leader_that_was_paused_and_steps_down_leaves_its_successor_alone() -> None:
    zombie = leader()
    zombie.assume_another_leads(10.0)
    assert zombie.tick(10.0) is Action.STEP_DOWN
    zombie.end_term(10.1)
    zombie.receive(beat("mine"), 10.1)  # All that it has said comes late.
    zombie.receive(beat("mine", "resigned"), 10.2)
    assert zombie.tick(10.3) is Action.FOLLOW
    zombie.receive(beat("successor"), 10.4)
    assert zombie.tick(11.4) is Action.FOLLOW


def test_a_harvester_that_waits_in_trouble_is_no_leader() -> None:
    election = follower(owns=True)
    election.receive(beat("", "waiting"), 10.0)
    assert election.tick(10.0) is Action.ACQUIRE


def test_a_leader_that_hears_itself_keeps_leading() -> None:
    election = leader()
    for second in range(1, 60):
        election.receive(beat("mine"), float(second))
        assert election.tick(second + 0.5) is Action.KEEP


def test_a_leader_that_does_not_hear_itself_steps_down() -> None:
    election = leader()
    election.receive(beat("mine"), 1.0)
    assert election.tick(6.0) is Action.KEEP
    assert election.tick(6.01) is Action.STEP_DOWN


@pytest.mark.parametrize("early_takeover", [True, False])
def test_who_hears_nothing_of_itself_stays_a_follower_until_it_does(early_takeover: bool) -> None:
    """As a candidate that is heard and hears nothing, it would keep all others from rising for ever."""
    election = leader(early_takeover=early_takeover)
    assert election.tick(5.1) is Action.STEP_DOWN
    election.end_term(5.1)
    assert election.awaits_own_heartbeat
    assert election.tick(60.0) is Action.FOLLOW
    election.receive(beat("mine", "waiting"), 60.1)
    assert election.tick(67.0) is Action.ACQUIRE


def test_a_candidate_that_hears_nothing_of_itself_does_not_try_again_at_once() -> None:
    election = follower(owns=True)
    election.begin_term("mine", 0.0)
    assert election.tick(5.1) is Action.STEP_DOWN
    election.end_term(5.1)
    assert election.tick(6.0) is Action.FOLLOW


def test_where_a_former_leader_is_fenced_the_owner_goes_on_as_soon_as_it_hears_itself() -> None:
    election = leader()
    election.end_term(5.1)
    election.receive(beat("mine", "waiting"), 5.2)
    assert election.tick(5.2) is Action.ACQUIRE


def test_without_fencing_what_was_owned_before_is_not_believed_until_the_session_would_be_over() -> None:
    """Its client may not know yet that the partition is another's, whom nothing stops, and whom it may not hear."""
    election = leader(early_takeover=False)
    election.end_term(5.1)
    election.receive(beat("mine", "waiting"), 5.2)
    assert election.tick(11.1) is Action.FOLLOW
    assert election.tick(11.3) is Action.ACQUIRE


def test_without_fencing_what_is_given_anew_is_believed() -> None:
    election = leader(early_takeover=False)
    election.end_term(5.1)
    election.receive(beat("mine", "waiting"), 5.2)
    election.set_ownership(False)
    assert election.tick(60.0) is Action.FOLLOW
    election.set_ownership(True)
    assert election.tick(60.0) is Action.ACQUIRE


@pytest.mark.parametrize("early_takeover", [True, False])
def test_a_candidate_that_hears_a_leader_before_it_takes_over_stands_back(early_takeover: bool) -> None:
    """As of one that was stopped, or is slow: what it has not heard yet comes before its own first heartbeat."""
    election = follower(owns=True, early_takeover=early_takeover)
    election.begin_term("mine", 0.0)
    election.receive(beat("other"), 1.0)
    election.receive(beat("mine", "candidate"), 1.0)
    assert not election.may_take_over
    assert election.tick(1.0) is Action.STAND_BACK
    election.end_term(1.0, by_another=True)
    assert election.tick(1.9) is Action.FOLLOW


def test_a_heartbeat_of_an_old_term_of_ours_does_not_count_as_ours() -> None:
    election = leader()
    election.end_term(1.0)
    election.begin_term("mine-2", 1.0)
    election.receive(beat("mine", "candidate"), 5.9)
    assert election.tick(6.01) is Action.STEP_DOWN


def test_without_fencing_a_leader_that_loses_ownership_steps_down() -> None:
    election = leader(early_takeover=False)
    election.set_ownership(False)
    assert election.tick(0.1) is Action.STEP_DOWN


def test_without_fencing_a_leader_that_never_had_ownership_has_none_to_lose() -> None:
    election = leader(owns=False, early_takeover=False)
    assert election.tick(0.1) is Action.KEEP
    election.set_ownership(True)
    election.set_ownership(False)
    assert election.tick(0.1) is Action.STEP_DOWN


def test_a_leader_that_is_fenced_by_its_successor_goes_on_without_ownership() -> None:
    """Until the new owner asks for the shard. It would be without a leader meanwhile."""
    election = leader()
    election.set_ownership(False)
    assert election.tick(0.1) is Action.KEEP


def test_a_leader_proves_itself_once_against_each_challenger() -> None:
    election = leader()
    election.receive(beat("other"), 1.0)
    assert election.tick(1.0) is Action.PROVE
    election.mark_proved()
    election.receive(beat("other"), 1.1)
    assert election.tick(1.1) is Action.KEEP
    election.receive(beat("third"), 1.2)
    assert election.tick(1.2) is Action.PROVE


def test_a_candidate_is_no_challenger_yet() -> None:
    election = leader()
    election.receive(beat("other", "candidate"), 1.0)
    assert election.tick(1.0) is Action.KEEP


def test_without_fencing_there_is_nothing_to_prove() -> None:
    election = leader(early_takeover=False)
    election.receive(beat("other"), 1.0)
    assert election.tick(1.0) is Action.KEEP


def test_a_fenced_leader_leaves_the_other_one_alone() -> None:
    election = leader()
    election.receive(beat("mine"), 9.9)
    election.end_term(10.0, by_another=True)
    assert election.tick(11.0) is Action.FOLLOW
    assert election.tick(11.01) is Action.ACQUIRE


def test_a_failed_term_is_tried_again_after_its_pause() -> None:
    election = leader()
    election.receive(beat("mine"), 9.9)
    election.end_term(10.0, retry_after=2.0)
    assert election.tick(11.9) is Action.FOLLOW
    assert election.tick(12.0) is Action.ACQUIRE


def test_asking_changes_nothing() -> None:
    election = follower()
    election.receive(beat("other"), 10.0)
    assert [election.tick(now) for now in (12.0, 10.5, 12.0)] == [
        Action.ACQUIRE,
        Action.FOLLOW,
        Action.ACQUIRE,
    ]


def test_a_heartbeat_survives_its_wire_form() -> None:
    sent = replace(beat("mine"), published=7, records_per_second=1.5, trouble="Postgres: away")
    assert LeaderHeartbeat.parse(sent.encode()) == sent


def test_the_heartbeat_of_a_later_version_is_heard() -> None:
    sent = beat("mine")
    assert LeaderHeartbeat.parse(sent.encode().replace(b"{", b'{"of_a_later_version":1,', 1)) == sent


@pytest.mark.parametrize("body", [None, b"", b"{}", b"[1]", b"\xff\xfe", b'{"phase":"leader"}'])
def test_what_is_no_heartbeat_is_passed_over(body: bytes | None) -> None:
    assert LeaderHeartbeat.parse(body) is None


def test_a_phase_that_is_unknown_is_passed_over() -> None:
    assert LeaderHeartbeat.parse(beat("mine").encode().replace(b'"leader"', b'"emperor"')) is None


def test_a_term_hears_itself_once_a_heartbeat_of_its_own_has_come_back() -> None:
    election = leader()
    election.receive(beat("other", "candidate"), 0.1)
    assert not election.may_take_over
    election.receive(beat("mine", "candidate"), 0.2)
    assert election.may_take_over


def test_what_a_former_term_of_ours_has_said_proves_nothing() -> None:
    election = leader()
    election.end_term(1.0)
    election.begin_term("mine-2", 1.0)
    election.receive(beat("mine", "candidate"), 1.1)
    assert not election.may_take_over
