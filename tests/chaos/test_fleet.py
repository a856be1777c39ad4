"""The fleet of the benchmarks: its harvesters come back, and one that does not end is told of."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from outbox_plugin import Settings
from outbox_plugin.bench import fleet as module
from outbox_plugin.bench.fleet import Fleet
from tests.support import eventually

pytestmark = pytest.mark.chaos


def test_a_killed_harvester_is_started_again_and_owes_nothing(settings: Settings, tmp_path: Path) -> None:
    fleet = Fleet(settings, 1, tmp_path, restart_seconds=5.0)
    with fleet.running():
        eventually(lambda: fleet.leader() == 0, 60)
        fleet.kill(0)
        eventually(lambda: fleet.ended[-signal.SIGKILL] == 1, 10)
        assert fleet.alive == []
        fleet.terminate(0)  # Nobody is there to hear it; its successor was not told.
        eventually(lambda: fleet.alive == [0], 10)
        assert fleet._stop_at == {}
    assert fleet.failures == []


def test_one_that_does_not_end_is_a_failure(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "END_SECONDS", 1.0)
    fleet = Fleet(settings, 1, tmp_path)
    with fleet.running():
        eventually(lambda: fleet.leader() == 0, 60)
        fleet.pause(0, 0.0)
        fleet._wake_at.clear()  # It never wakes up.
        fleet.terminate(0)
        eventually(lambda: fleet.ended[-signal.SIGKILL] == 1, 10)
        monkeypatch.undo()
        eventually(lambda: fleet.leader() == 0, 60)
    assert len(fleet.failures) == 1
    assert "harvester 0 had not ended" in fleet.failures[0]
