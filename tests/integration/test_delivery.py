"""An outbox is harvested in one delivery at a time."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from outbox_plugin.schema.migrate import migrate
from outbox_plugin.settings import Delivery, Settings
from outbox_plugin.status import read_status
from tests.harvesting import (
    assert_exactly_once_in_order,
    backlog,
    consume,
    drained,
    environment,
    harvesters,
    insert_numbered,
    run_outbox,
)
from tests.support import eventually

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(("first", "second"), [("at-least-once", "exactly-once"), ("exactly-once", "at-least-once")])
def test_a_paused_leader_of_the_other_delivery_publishes_nothing_more(
    settings: Settings, topic: str, tmp_path: Path, first: Delivery, second: Delivery
) -> None:
    """The second is refused until it adopts; then the paused one wakes up, reads nothing, and ends with one line."""
    old, new = (settings.model_copy(update={"delivery": delivery}) for delivery in (first, second))
    migrate(old)
    insert_numbered(settings, topic, 0, 100)
    with harvesters(old, tmp_path / "old") as [paused]:
        drained(settings)
        eventually(lambda: read_status(old).shards[0].leader, 30)
        paused.signal(signal.SIGSTOP)
        insert_numbered(settings, topic, 100, 300)
        refused = run_outbox("harvest", env=environment(new))
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
        assert f"is harvested {first} (given: '{second}')" in refused.stderr
        assert backlog(settings) == 300
        with harvesters(new, tmp_path / "new", arguments=("--adopt",)):
            drained(settings)
            paused.signal(signal.SIGCONT)
            insert_numbered(settings, topic, 400, 100)
            eventually(lambda: not paused.alive, 60)
            drained(settings)
    assert "OUTBOX_DELIVERY: the outbox 'outbox' is harvested" in paused.log
    assert_exactly_once_in_order(consume(settings, topic), 0, 500)
