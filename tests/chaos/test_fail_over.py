"""The primary dies, and its synchronous standby takes its place, again and again under load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from outbox_plugin import Settings
from outbox_plugin.bench.replication import ReplicatedPostgres
from outbox_plugin.bench.servers import Servers
from outbox_plugin.bench.temporary_outbox import temporary_outbox
from outbox_plugin.bench.writer import Mix
from tests.chaos.loading import load

pytestmark = [pytest.mark.chaos, pytest.mark.long]

TIMES = 3


@pytest.fixture(scope="module")
def own_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Servers, Settings]]:
    servers = Servers(tmp_path_factory.mktemp("fail-over"), print)
    with servers.running() as settings:
        yield servers, settings


@pytest.fixture
def postgres(own_servers: tuple[Servers, Settings]) -> ReplicatedPostgres:
    return own_servers[0].postgres


@pytest.fixture(params=["exactly-once", "at-least-once"])
def settings(own_servers: tuple[Servers, Settings], request: pytest.FixtureRequest) -> Iterator[Settings]:
    with temporary_outbox(own_servers[1]) as settings:
        yield settings.model_copy(update={"delivery": request.param})


def test_a_synchronous_standby_is_promoted(postgres: ReplicatedPostgres, settings: Settings, tmp_path: Path) -> None:
    with load(settings, tmp_path, Mix(rows_per_second=1_500)) as running:
        for _ in range(TIMES):
            before = postgres.primary
            postgres.fail_over()
            assert postgres.primary is not before
            running.flows()
            postgres.add_standby()
            running.flows()


def test_a_leader_dies_together_with_the_primary(
    postgres: ReplicatedPostgres, settings: Settings, tmp_path: Path
) -> None:
    with load(settings, tmp_path, Mix(rows_per_second=1_500)) as running:
        for _ in range(TIMES):
            running.fleet.kill(running.leader())
            postgres.fail_over()
            running.flows()
            postgres.add_standby()


def test_commits_wait_for_the_standby(postgres: ReplicatedPostgres, settings: Settings) -> None:
    """What these tests rest on: no acknowledged commit is lost by a fail-over."""
    with psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection:
        connection.execute("CREATE TABLE kept (number INT)")
        for number in range(100):
            connection.execute("INSERT INTO kept VALUES (%s)", (number,))
    postgres.fail_over()
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        assert connection.execute("SELECT count(*) FROM kept").fetchone() == (100,)
        connection.execute("DROP TABLE kept")
    postgres.add_standby()
