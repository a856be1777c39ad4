"""What a tick of the harvester's sensor says of the topics, with stand-ins for both servers."""

from __future__ import annotations

import pytest
from dagster import AssetCheckEvaluation, DagsterInstance, build_sensor_context

from outbox_plugin import Settings
from outbox_plugin.dagster import build_harvester_sensor, sensor
from outbox_plugin.dagster.resources import HarvesterResource, OutboxResource
from outbox_plugin.dagster.shared_assets import OBSERVATIONS, other_outbox, outbox_name
from outbox_plugin.errors import LogUnavailable
from outbox_plugin.status.reader import Leader, ShardStatus, Status
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


def evaluated(instance: DagsterInstance, table: str, cursors: dict[str, str | None]) -> AssetCheckEvaluation:
    """Make a tick for one table's outbox, as a code location of its own does. Returns the check `healthy`."""
    outbox = OutboxResource(dsn="postgresql://app:s3cret@db:1/shop", bootstrap_servers="127.0.0.1:1", table=table)
    harvester = HarvesterResource(outbox=outbox, mode="observe")
    with build_sensor_context(
        instance=instance, cursor=cursors.get(table), resources={"harvester": harvester}
    ) as context:
        tick = build_harvester_sensor(HARVESTER).evaluate_tick(context)
    cursors[table] = tick.cursor
    for event in tick.asset_events:
        instance.report_runless_asset_event(event)
    [healthy] = [
        each for each in tick.asset_events if isinstance(each, AssetCheckEvaluation) and each.check_name == "healthy"
    ]
    return healthy


def test_two_outboxes_that_share_their_assets_are_told_of_by_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, the check would show what the last of them said, so a healthy outbox would hide a broken one."""
    shard = ShardStatus(0, Leader("i", "host", 1, "leader", "now"), 0, 0.0, 0, 0.1, None)
    monkeypatch.setattr(sensor, "read_status", lambda *_: Status(0, None, (shard,), ()))
    cursors: dict[str, str | None] = {}
    with DagsterInstance.ephemeral() as instance:
        assert [evaluated(instance, "one", cursors).passed for _ in range(3)] == [True] * 3
        evaluated(instance, "two", cursors)
        shared = [evaluated(instance, table, cursors) for table in ("one", "two", "two", "one")]
        assert [each.passed for each in shared] == [False] * 4
        said = str(shared[0].description)
        assert "table one of db:1/shop" in said
        assert "table two of db:1/shop" in said
        assert "s3cret" not in said
        alone = [evaluated(instance, "two", cursors).passed for _ in range(OBSERVATIONS + 1)]
        assert alone[-1]


@pytest.mark.parametrize(
    ("observed", "other"),
    [
        ([], None),
        (["ours"] * 6, None),
        (["ours", "ours", "theirs", "theirs"], None),  # The outbox was renamed.
        (["theirs", "theirs", "theirs"], None),
        (["ours", "theirs", "ours"], "theirs"),
        (["theirs", "ours"], "theirs"),
    ],
)
def test_who_takes_turns_with_us_is_another_outbox(observed: list[str], other: str | None) -> None:
    assert other_outbox(observed, "ours") == other


@pytest.mark.parametrize(
    ("dsn", "table"),
    [
        ("postgresql://app@db/shop", "orders"),
        ("postgresql://app:other@DB:5432/shop", "public.orders"),
        ("host=db dbname=shop user=app", "orders"),
    ],
)
def test_one_outbox_has_one_name_however_its_settings_are_written(dsn: str, table: str) -> None:
    settings = Settings(dsn=dsn, bootstrap_servers="k:1", table=table)
    assert outbox_name(settings) == "table orders of db:5432/shop, group outbox"


def test_the_order_of_hosts_makes_no_other_outbox() -> None:
    names = {outbox_name(Settings(dsn=f"postgresql://{hosts}/d", bootstrap_servers="k:1")) for hosts in ("a,b", "b,a")}
    assert names == {"table outbox of a,b:5432/d, group outbox"}
