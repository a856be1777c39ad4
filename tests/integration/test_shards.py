"""One outbox over several leaders, and another number of them while all run."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest
from pydantic import SecretStr

from outbox_plugin import Harvester, Settings
from outbox_plugin.adapters.postgres_probe import postgres_answers
from outbox_plugin.status.reader import read_status
from tests.harvesting import (
    HarvesterProcess,
    assert_exactly_once_in_order,
    consume,
    drained,
    harvesters,
    insert_numbered,
    publish_but_kill_before_the_purge,
)
from tests.support import eventually

pytestmark = pytest.mark.integration


def leaders(settings: Settings) -> list[int | None]:
    return [shard.leader.pid if shard.leader else None for shard in read_status(settings).shards]


def with_shards(settings: Settings, shards: int) -> Settings:
    return settings.model_copy(update={"shards": shards})


def test_shards_are_led_side_by_side(settings: Settings, topic: str, tmp_path: Path) -> None:
    """Two harvesters, four shards: both lead some, and all of the outbox leaves in order."""
    four = with_shards(settings, 4)
    with harvesters(four, tmp_path, 2) as running:
        eventually(lambda: None not in leaders(four) and len(set(leaders(four))) == 2, 60)
        insert_numbered(four, topic, 0, 20_000)
        drained(four)
        running[0].kill()
        insert_numbered(four, topic, 20_000, 20_000)
        drained(four)
    assert_exactly_once_in_order(consume(four, topic), 0, 40_000)


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_shards_are_spread_evenly_again_after_a_crash_and_after_a_start(
    settings: Settings, topic: str, tmp_path: Path, delivery: str
) -> None:
    """Whoever took over the shards of one that died leads them on only until the group has assigned them."""
    six = settings.model_copy(update={"shards": 6, "delivery": delivery})

    def led() -> list[int]:
        by_process = Counter(leaders(six))
        return [] if None in by_process else sorted(by_process.values())

    with harvesters(six, tmp_path, 3) as running:
        eventually(lambda: led() == [2, 2, 2], 60)
        insert_numbered(six, topic, 0, 5_000)
        running[0].kill()
        eventually(lambda: led() == [3, 3], 60)
        insert_numbered(six, topic, 5_000, 5_000)
        running.append(HarvesterProcess(six, tmp_path / "next.log"))
        eventually(lambda: led() == [2, 2, 2], 60)
        insert_numbered(six, topic, 10_000, 5_000)
        drained(six)
    if delivery == "exactly-once":
        assert_exactly_once_in_order(consume(six, topic), 0, 15_000)


def test_postgres_answers_where_it_can_be_reached_and_may_be_written_to(settings: Settings) -> None:
    assert postgres_answers(settings)
    unreachable = psycopg.conninfo.make_conninfo(settings.dsn.get_secret_value(), port="1")
    assert not postgres_answers(settings.model_copy(update={"dsn": SecretStr(unreachable)}))


@pytest.mark.slow
def test_the_number_of_shards_changes_while_all_run(settings: Settings, topic: str, tmp_path: Path) -> None:
    """Nothing is lost, repeated or reordered, up and down; those that run follow the one that was started last."""
    stop, written = threading.Event(), [0]

    def write() -> None:
        while not stop.is_set():
            insert_numbered(settings, topic, written[0], 500)
            written[0] += 500

    writer = threading.Thread(target=write)
    with harvesters(settings, tmp_path / "first", 2) as running:
        eventually(lambda: None not in leaders(settings), 60)
        writer.start()
        try:
            for number, shards in enumerate((3, 2, 1)):
                running.append(HarvesterProcess(with_shards(settings, shards), tmp_path / f"{number}.log"))
                eventually(lambda count=shards: len(leaders(settings)) == count, 60)  # type: ignore[misc]
                eventually(lambda: None not in leaders(settings), 60)
                before = written[0]
                eventually(lambda lower=before: written[0] > lower + 2_000, 60)  # type: ignore[misc]
        finally:
            stop.set()
            writer.join()
        drained(settings)
    assert_exactly_once_in_order(consume(settings, topic), 0, written[0])


def test_what_another_layout_published_is_not_published_again(settings: Settings, topic: str, tmp_path: Path) -> None:
    """The leader of one shard died before its purge; leaders of three make it good."""
    insert_numbered(settings, topic, 0, 1_000)
    publish_but_kill_before_the_purge(settings, tmp_path)
    with Harvester(with_shards(settings, 3)):
        insert_numbered(settings, topic, 1_000, 1_000)
        drained(settings)
    with Harvester(settings):
        insert_numbered(settings, topic, 2_000, 1_000)
        drained(settings)
    assert_exactly_once_in_order(consume(settings, topic), 0, 3_000)


def test_harvesters_in_one_process_share_the_shards(settings: Settings, topic: str) -> None:
    two = with_shards(settings, 2)
    with ExitStack() as running:
        for _ in range(2):
            running.enter_context(Harvester(two))
        insert_numbered(two, topic, 0, 5_000)
        drained(two)
    assert_exactly_once_in_order(consume(two, topic), 0, 5_000)
