"""An outbox is harvested in one delivery, and by one group, at a time."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from outbox_plugin import Harvester
from outbox_plugin.core.delivery_options import Delivery
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.settings import Settings
from outbox_plugin.status.reader import read_status
from tests.harvesting import (
    assert_exactly_once_in_order,
    backlog,
    consume,
    drained,
    environment,
    harvesters,
    insert_numbered,
    members,
    run_outbox,
)
from tests.support import eventually

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(("first", "second"), [("at-least-once", "exactly-once"), ("exactly-once", "at-least-once")])
def test_a_paused_leader_of_the_other_delivery_publishes_nothing_more(
    settings: Settings, topic: str, tmp_path: Path, first: Delivery, second: Delivery
) -> None:
    old, new = (settings.model_copy(update={"delivery": delivery}) for delivery in (first, second))
    said = adopt_from_a_paused_leader(old, new, topic, tmp_path, f"is harvested {first} (given: '{second}')")
    assert "OUTBOX_DELIVERY: the outbox 'outbox' is harvested" in said
    assert_exactly_once_in_order(consume(settings, topic), 0, 500)


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_a_paused_leader_of_another_group_publishes_nothing_more(
    settings: Settings, topic: str, tmp_path: Path, delivery: Delivery
) -> None:
    old = settings.model_copy(update={"delivery": delivery})
    new = old.model_copy(update={"group": f"{old.group}-new"})
    said = adopt_from_a_paused_leader(old, new, topic, tmp_path, f"the group '{old.group}' harvests the outbox")
    assert f"the group '{new.group}' harvests the outbox" in said
    assert_exactly_once_in_order(consume(settings, topic), 0, 500)


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_the_stand_bys_of_a_group_end_when_another_group_adopts_its_outbox(
    settings: Settings, topic: str, tmp_path: Path, delivery: Delivery
) -> None:
    """A standby's first term begins after the adoption: it never sees the outbox's layout change."""
    old = settings.model_copy(update={"delivery": delivery})
    new = old.model_copy(update={"group": f"{old.group}-new"})
    migrate(old)
    with harvesters(old, tmp_path / "old", 2) as running:
        eventually(lambda: read_status(old).shards[0].leader, 30)
        eventually(lambda: len(members(old)) == 2, 30)
        with harvesters(new, tmp_path / "new", arguments=("--adopt",)):
            for each in running:
                eventually(lambda each=each: not each.alive, 60)  # type: ignore[misc]
                assert f"the group '{new.group}' harvests the outbox" in each.log
            insert_numbered(new, topic, 0, 100)
            drained(new)
    assert_exactly_once_in_order(consume(settings, topic), 0, 100)


def test_an_outbox_that_had_more_shards_is_harvested_in_the_other_delivery(settings: Settings, topic: str) -> None:
    """The shards that it had at least once are recovered as any, although the group has had no progress topic."""
    for number, shards in enumerate((3, 1)):
        with Harvester(settings.model_copy(update={"delivery": "at-least-once", "shards": shards})):
            insert_numbered(settings, topic, 100 * number, 100)
            drained(settings)
    with Harvester(settings, adopt=True):
        insert_numbered(settings, topic, 200, 100)
        drained(settings)
    assert_exactly_once_in_order(consume(settings, topic), 0, 300)


def adopt_from_a_paused_leader(old: Settings, new: Settings, topic: str, folder: Path, refusal: str) -> str:
    """The second is refused until it adopts; then the paused one wakes up, reads nothing, and ends.

    Returns what the paused one has logged.
    """
    migrate(old)
    insert_numbered(old, topic, 0, 100)
    with harvesters(old, folder / "old") as [paused]:
        drained(old)
        eventually(lambda: read_status(old).shards[0].leader, 30)
        paused.signal(signal.SIGSTOP)
        insert_numbered(old, topic, 100, 300)
        refused = run_outbox("harvest", env=environment(new))
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
        assert refusal in refused.stderr
        assert backlog(old) == 300
        with harvesters(new, folder / "new", arguments=("--adopt",)):
            drained(new)
            paused.signal(signal.SIGCONT)
            insert_numbered(new, topic, 400, 100)
            eventually(lambda: not paused.alive, 60)
            drained(new)
    return paused.log
