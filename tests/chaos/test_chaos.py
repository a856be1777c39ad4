"""`outbox bench chaos`, a short one: the long one is for whoever has ten minutes."""

from __future__ import annotations

import json
import os

import pytest

from outbox_plugin.bench.faults import plan
from tests.harvesting import run_outbox

pytestmark = pytest.mark.chaos


def test_a_short_chaos_run_loses_repeats_and_reorders_nothing() -> None:
    done = run_outbox("bench", "chaos", "--seconds", "18", "--seed", "3", "--json", env=os.environ, seconds=240)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout
    report = json.loads(done.stdout)
    assert report["clean"]
    assert report["committed"] == report["arrived"] > 0
    assert (report["lost"], report["duplicates"], report["order_violations"], report["phantoms"]) == (0, 0, 0, 0)
    planned = [fault.kind for faults in plan(3, 18, 3, 3) for fault in faults]
    assert report["faults"] == {kind: planned.count(kind) for kind in planned}
    assert {"kill", "broker", "postgres"} <= set(report["faults"])
    assert report["rolled_back"] > 0
    assert report["tracebacks"] == 0
