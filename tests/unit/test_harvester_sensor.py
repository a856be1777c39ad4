"""What a tick of the harvester's sensor says of the topics, with stand-ins for both servers."""

from __future__ import annotations

import pytest

from outbox_plugin import Settings
from outbox_plugin.dagster import build_harvester_sensor, sensor
from outbox_plugin.dagster.resources import HarvesterResource, OutboxResource
from outbox_plugin.errors import LogUnavailable
from outbox_plugin.status.reader import ShardStatus, Status
from tests.dagster_support import HARVESTER, Ticks


def test_topics_whose_ends_are_not_known_are_told_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a word they would look as if nothing arrived any more, and what follows them would not run."""

    def too_late(settings: Settings, topics: list[str], deadline: float) -> dict[str, int]:
        raise LogUnavailable("Kafka did not tell in time where the topics end")

    shard = ShardStatus(0, None, 0, 0.0, 0, None, None)
    errors: tuple[str, ...] = ()
    monkeypatch.setattr(sensor, "topic_ends", too_late)
    monkeypatch.setattr(sensor, "read_status", lambda *_: Status(0, None, (shard,), errors))
    outbox = OutboxResource(dsn="postgresql://app@127.0.0.1:1/shop", bootstrap_servers="127.0.0.1:1")
    ticks = Ticks(
        HarvesterResource(outbox=outbox, mode="observe"), build_harvester_sensor(HARVESTER, topics=["orders"])
    )
    said = "nothing is said of them: Kafka did not tell in time where the topics end"
    ticks.tick()
    assert said in capsys.readouterr().err
    errors = ("Kafka did not answer in time",)
    ticks.tick()
    assert said not in capsys.readouterr().err
