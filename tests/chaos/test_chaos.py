"""`outbox bench chaos`, short ones: the long one is for whoever has ten minutes."""

from __future__ import annotations

import json
import os

import pytest

from outbox_plugin.bench.faults import CLIENT_KINDS, NETWORK_KINDS, plan
from outbox_plugin.core.delivery_options import BadRows, Delivery
from tests.harvesting import run_outbox

pytestmark = pytest.mark.chaos

SECONDS, SEED = 18, 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("delivery", "shards", "bad_rows"), [("exactly-once", 1, "park"), ("at-least-once", 2, "dead-letter")]
)
def test_a_short_chaos_run_breaks_no_promise(delivery: Delivery, shards: int, bad_rows: BadRows) -> None:
    arguments = ["--seconds", str(SECONDS), "--seed", str(SEED), "--delivery", delivery, "--json"]
    env = {**os.environ, "OUTBOX_SHARDS": str(shards), "OUTBOX_BAD_ROWS": bad_rows}
    done = run_outbox("bench", "chaos", *arguments, env=env, seconds=280)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout
    report = json.loads(done.stdout)
    assert report["clean"]
    assert (report["delivery"], report["shards"], report["bad_rows"]) == (delivery, shards, bad_rows)
    assert report["committed"] == report["arrived"] + report["aside"]
    assert report["arrived"] > 0
    assert report["aside"] > 0
    assert (report["lost"], report["order_violations"], report["phantoms"]) == (0, 0, 0)
    assert delivery == "at-least-once" or report["duplicates"] == 0
    planned = [fault.kind for faults in plan(SEED, SECONDS, 3, 3).values() for fault in faults]
    assert report["faults"] == {kind: planned.count(kind) for kind in planned}
    assert {"kill", "pause", "broker", "postgres", "failover"} <= set(report["faults"])
    assert set(NETWORK_KINDS + CLIENT_KINDS) <= set(report["faults"])
    assert report["rolled_back"] > 0
    assert report["tracebacks"] == 0
