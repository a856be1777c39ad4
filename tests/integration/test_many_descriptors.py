"""A process with more than 1,023 descriptors: select() cannot wait for those above, so nothing of ours uses it."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest

from outbox_plugin import Harvester, Settings
from outbox_plugin.adapters.postgres_wake_up import PostgresWakeUp
from outbox_plugin.schema.migrate import migrate
from tests.harvesting import by_key, consume, drained, insert

pytestmark = pytest.mark.integration

DESCRIPTORS = 1_100


@pytest.fixture
def _many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4 * DESCRIPTORS:
        pytest.skip(f"this machine lets a process open {hard} descriptors only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4 * DESCRIPTORS), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(DESCRIPTORS)]
    yield
    for descriptor in opened:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("_many_descriptors")
def test_a_writer_wakes_a_leader_whose_descriptors_are_above_1023(settings: Settings) -> None:
    migrate(settings, wake_up=True)
    with closing(PostgresWakeUp(settings, 0)) as wake_up:
        assert not wake_up.wait(0.01)
        with psycopg.connect(settings.dsn.get_secret_value()) as connection:
            connection.execute("SELECT pg_notify('outbox', %s)", (settings.table,))
        assert wake_up.wait(90)
        wake_up.interrupt()
        assert wake_up.wait(90)


@pytest.mark.usefixtures("_many_descriptors")
@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_a_harvester_relays_in_a_process_with_many_descriptors(settings: Settings, topic: str, delivery: str) -> None:
    settings = settings.model_copy(update={"delivery": delivery})
    insert(settings, topic, [("k", str(number)) for number in range(3_000)])
    with Harvester(settings):
        drained(settings)
    assert len(by_key(consume(settings, topic))["k"]) == 3_000
