"""What a harvester makes of its settings before anything is connected."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from outbox_plugin import Settings, harvester
from outbox_plugin.core.delivery_options import Delivery
from outbox_plugin.core.progress import OutboxIdentity
from outbox_plugin.core.shards import Layout
from outbox_plugin.errors import LayoutChanged
from outbox_plugin.harvester import Harvester, may_take_over_early
from outbox_plugin.relay.events import HarvestEvent, TermFinished


@pytest.mark.parametrize(
    ("delivery", "leader_topic", "leader_group", "early"),
    [
        ("exactly-once", None, None, True),
        ("at-least-once", None, None, True),
        ("at-least-once", "neli", None, False),
        ("at-least-once", None, "neli", False),
    ],
)
def test_an_election_that_is_shared_with_goharvest_knows_no_early_takeover(
    delivery: Delivery, leader_topic: str | None, leader_group: str | None, early: bool
) -> None:
    settings = Settings(
        dsn="postgresql://u@h/d",
        bootstrap_servers="h:1",
        delivery=delivery,
        leader_topic=leader_topic,
        leader_group=leader_group,
    )
    assert may_take_over_early(settings) == early


def test_a_harvester_that_was_restarted_often_is_observed_still() -> None:
    """A tenant that rests and wakes every minute is restarted a thousand times in a day."""
    events: list[HarvestEvent] = []
    last = Harvester(Settings(dsn="postgresql://u@h/d", bootstrap_servers="h:1"), observe=events.append)
    for _ in range(sys.getrecursionlimit()):
        last = last.for_restart(events.append)
    last._observe(finished := TermFinished(0, "leader", "why", "ProgressLost"))
    assert events == [finished]


def test_a_harvester_that_begins_again_notes_what_is_wrong_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody may have mended what its first start has found, or broken something else."""
    wrong_now = {"progress": "the policy is another one", "ids": "descend"}
    notes: list[str | None] = []

    class Registration:
        def weaknesses(self) -> list[str]:
            return [wrong_now["ids"]] if "ids" in wrong_now else []

        def layout(self) -> Layout:
            return Layout(1, 1)

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda **_: None

    class Admin(SimpleNamespace):
        def ensure_topics(self, *_: object, **__: object) -> None: ...

        def keep_progress(self, _: object) -> str | None:
            return wrong_now.get("progress")

        def close(self) -> None: ...

    connection = SimpleNamespace(close=lambda: None, registration=lambda: nullcontext(Registration()))
    monkeypatch.setattr(harvester, "RegistrationConnection", lambda _: connection)
    monkeypatch.setattr(harvester, "KafkaAdmin", lambda _: Admin())
    monkeypatch.setattr(harvester, "ERROR_FIRST", 0.01)
    again = Harvester(Settings(dsn="postgresql://u@h/d", bootstrap_servers="h:1"))

    def run(_: object) -> None:
        if len(notes) == 3:
            again._stop.set()
            return
        if len(notes) == 2:
            wrong_now.clear()
        raise LayoutChanged("another number of shards")

    def supervisor(_: object, __: object, note: str | None) -> Any:
        notes.append(note)
        return SimpleNamespace(run=run)

    monkeypatch.setattr(again, "_supervisor", supervisor)
    again._harvest(OutboxIdentity("incarnation", "here"), Layout(1, 1), "what the first start has found")
    assert notes[0] == "what the first start has found"
    assert notes[1] == "the policy is another one; descend"
    assert notes[2] is None
