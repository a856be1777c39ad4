"""What heartbeats say of a shard, from what happened in its terms."""

from __future__ import annotations

from outbox_plugin.core.leader_heartbeat import LeaderHeartbeat
from outbox_plugin.relay.events import HarvestEvent, KeysSummarised, LiveRowsJoined, LiveRowsLeftOut, TermBegan
from outbox_plugin.relay.shard_report import ShardReport

SUMMARISED = KeysSummarised(0, 1_000, 0.1, None)
NOT_SUMMARISED = KeysSummarised(0, 1_000, 0.1, "Postgres does not answer")


def live_rows(*events: HarvestEvent) -> tuple[bool, int]:
    """Whether live rows go first, and how many wait, as the heartbeat after these events says."""
    report = ShardReport(LeaderHeartbeat(0, "waiting", "", "host-1", "host", 1, "now", "incarnation", "place"), 0.3)
    for event in events:
        report.observe(event, 0.0)
    heartbeat = report.heartbeat(1.0, "leader", leads=True, expects_its_own=False)
    assert heartbeat is not None
    assert LeaderHeartbeat.parse(heartbeat.encode()) == heartbeat
    return heartbeat.live_first, heartbeat.live_rows_waiting


def test_live_rows_go_first_from_a_summary_until_the_backlog_is_read() -> None:
    assert live_rows() == (False, 0)
    assert live_rows(SUMMARISED) == (True, 0)
    assert live_rows(SUMMARISED, LiveRowsLeftOut(0, 3), LiveRowsLeftOut(0, 5)) == (True, 5)
    assert live_rows(SUMMARISED, LiveRowsLeftOut(0, 3), LiveRowsJoined(0)) == (False, 0)


def test_the_rows_that_waited_for_one_backlog_are_part_of_the_next_one() -> None:
    assert live_rows(SUMMARISED, LiveRowsLeftOut(0, 3), SUMMARISED) == (True, 0)


def test_a_summary_that_could_not_be_made_changes_nothing() -> None:
    assert live_rows(NOT_SUMMARISED) == (False, 0)
    assert live_rows(SUMMARISED, LiveRowsLeftOut(0, 3), NOT_SUMMARISED) == (True, 3)


def test_a_new_term_begins_with_all_rows_in_line() -> None:
    assert live_rows(SUMMARISED, LiveRowsLeftOut(0, 3), TermBegan(0, "leader", 0, 2)) == (False, 0)
