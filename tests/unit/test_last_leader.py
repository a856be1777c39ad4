"""What a harvester that starts makes of the last heartbeats on the leader topic."""

from __future__ import annotations

import pytest

from outbox_plugin.core.last_leader import LastLeader
from outbox_plugin.core.leader_heartbeat import LeaderHeartbeat, Phase


def beat(leader: str, phase: Phase, successor: str = "") -> LeaderHeartbeat:
    instance = f"{leader}-host"
    return LeaderHeartbeat(0, phase, leader, instance, "host", 1, "now", "incarnation", "place", successor=successor)


@pytest.mark.parametrize(
    ("heartbeats", "has_resigned"),
    [
        ([], False),
        ([beat("", "waiting")], False),
        ([beat("a", "leader")], False),
        ([beat("a", "candidate")], False),
        ([beat("a", "resigned")], True),
        ([beat("a", "leader"), beat("a", "resigned"), beat("", "waiting")], True),
        ([beat("a", "resigned"), beat("b", "candidate")], False),
        ([beat("b", "leader"), beat("a", "resigned")], False),
        ([beat("a", "leader"), beat("b", "leader"), beat("a", "resigned")], False),
        ([beat("a", "leader"), beat("b", "leader"), beat("a", "leader"), beat("a", "resigned")], False),
        ([beat("a", "leader"), beat("b", "candidate"), beat("a", "resigned")], False),
        ([beat("a", "leader"), beat("b", "candidate"), beat("a", "resigned"), beat("b", "resigned")], True),
        ([beat("a", "leader"), beat("b", "candidate"), beat("b", "resigned")], False),
        ([beat("a", "leader"), beat("a", "resigned"), beat("b", "candidate"), beat("b", "resigned")], True),
        ([beat("a", "leader"), beat("b", "leader"), beat("b", "resigned")], True),
        ([beat("a", "leader"), beat("a", "resigned", successor="b-host")], False),
        ([beat("a", "resigned", successor="b-host"), beat("b", "leader"), beat("b", "resigned")], True),
    ],
)
def test_the_last_leader_has_resigned_if_nobody_has_led_since(
    heartbeats: list[LeaderHeartbeat], has_resigned: bool
) -> None:
    last = LastLeader()
    for heartbeat in heartbeats:
        last.take(heartbeat)
    assert last.has_resigned is has_resigned
