"""`outbox bench takeover`, once each: it measures, and leaves nothing behind."""

from __future__ import annotations

import json

import psycopg
import pytest

from outbox_plugin import Settings
from tests.harvesting import environment, run_outbox

pytestmark = pytest.mark.chaos


def test_it_measures_a_kill_and_a_hand_over(settings: Settings) -> None:
    done = run_outbox("bench", "takeover", "--times", "1", "--json", env=environment(settings), seconds=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    [killed], [handed_over] = report["kills"], report["hand_overs"]
    assert 0.5 < killed < 10  # A standby waits for a second of silence.
    assert 0 < handed_over < 5
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        left = connection.execute("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'outbox_bench%'").fetchall()
    assert left == []
