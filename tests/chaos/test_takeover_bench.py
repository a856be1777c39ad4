"""`outbox bench takeover`, once each: it measures, and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess

import psycopg
import pytest

from outbox_plugin import Settings
from outbox_plugin.bench.namespace import Namespace
from outbox_plugin.bench.takeover import FAULTS, NO_KAFKA, NO_POSTGRES
from tests.harvesting import environment, run_outbox
from tests.support import PATIENCE

pytestmark = pytest.mark.chaos


@pytest.mark.slow
@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_it_measures_every_fault(settings: Settings, delivery: str) -> None:
    """Packets vanish only where we may make network namespaces."""
    arguments = "bench", "takeover", "--times", "1", "--delivery", delivery, "--json"
    done = run_outbox(*arguments, env=environment(settings), seconds=240)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    measured = [fault for fault in FAULTS if Namespace.unavailable() is None or fault not in (NO_KAFKA, NO_POSTGRES)]
    assert list(report["silences"]) == measured
    assert report["silences"]["kill -9"][0] > 0.5  # A standby waits for a second of silence.
    assert all(0 < seconds < 10 * PATIENCE for [seconds] in report["silences"].values()), report
    if Namespace.unavailable() is None:
        assert "outbox-" not in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        left = connection.execute("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'outbox_bench%'").fetchall()
    assert left == []
