"""Writers tell a process whose tenants rest that they have inserted a row."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from pydantic import SecretStr

from outbox_plugin import Settings
from outbox_plugin.adapters import tenant_wake_up
from outbox_plugin.adapters.tenant_wake_up import TenantWakeUp
from outbox_plugin.embedded.postgres import EmbeddedPostgres
from outbox_plugin.schema.migrate import migrate
from tests.postgres_sessions import leaders_asleep
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.integration

ENDED = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name ~ 'outbox tenants .wake-up.'"


@pytest.fixture
def pattern(unmigrated: Settings) -> Settings:
    return unmigrated.model_copy(update={"table": "tenant_*.outbox"})


@pytest.fixture(autouse=True)
def _arms_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_wake_up, "ARM_AGAIN_SECONDS", 0.1)


class Process:
    """What one process is told by writers."""

    def __init__(self, pattern: Settings) -> None:
        self._told = threading.Event()
        self.wake_up = TenantWakeUp(pattern, lambda _: self._told.set())

    def is_told_of(self, write: Callable[[], object]) -> bool:
        """Whether it is told within a moment after `write`."""
        self._told.clear()
        write()
        return self._told.wait(2.0)

    def was_told(self, write: Callable[[], object]) -> bool:
        """Whether it is told of `write`, for which it waits patiently."""
        self._told.clear()
        write()
        return self._told.wait(30 * PATIENCE)


@pytest.fixture
def process(pattern: Settings) -> Iterator[Process]:
    process = Process(pattern)
    with closing(process.wake_up):
        yield process


def execute(pattern: Settings, statement: str) -> list[tuple[object, ...]]:
    with psycopg.connect(pattern.dsn.get_secret_value()) as connection:
        found = connection.execute(statement.encode())
        return found.fetchall() if found.description else []


def create(pattern: Settings, schema: str, *, wake_up: bool = True) -> None:
    execute(pattern, f"CREATE SCHEMA {schema}")
    migrate(pattern.of_schema(schema), wake_up=wake_up)


def insert(pattern: Settings, schema: str, rows: int = 1) -> None:
    execute(
        pattern,
        f"INSERT INTO {schema}.outbox (kafka_topic, kafka_key) SELECT 't', 'k' FROM generate_series(1, {rows})",
    )


def test_a_writer_tells_of_a_row_of_a_tenant_at_rest_and_of_no_other(pattern: Settings, process: Process) -> None:
    for schema in ("tenant_a", "tenant_b"):
        create(pattern, schema)
    process.wake_up.follow(["tenant_a"])
    eventually(lambda: leaders_asleep(pattern) == 1, 10)
    assert process.was_told(lambda: insert(pattern, "tenant_a"))
    assert not process.is_told_of(lambda: insert(pattern, "tenant_b"))
    process.wake_up.follow(["tenant_b"])
    eventually(lambda: process.is_told_of(lambda: insert(pattern, "tenant_b")), 20)
    assert leaders_asleep(pattern) == 1
    process.wake_up.follow([])
    eventually(lambda: leaders_asleep(pattern) == 0, 10)
    assert not process.is_told_of(lambda: insert(pattern, "tenant_b"))


def test_a_tenant_without_the_trigger_is_passed_over_until_it_has_one(pattern: Settings, process: Process) -> None:
    create(pattern, "tenant_a", wake_up=False)
    process.wake_up.follow(["tenant_a", "tenant_that_is_not_there"])
    assert not process.is_told_of(lambda: insert(pattern, "tenant_a"))
    assert leaders_asleep(pattern) == 0
    migrate(pattern.of_schema("tenant_a"), wake_up=True)
    eventually(lambda: leaders_asleep(pattern) == 1, 10)
    assert process.was_told(lambda: insert(pattern, "tenant_a"))


def test_a_tenant_that_is_recreated_is_listened_to_again(pattern: Settings, process: Process) -> None:
    create(pattern, "tenant_a")
    process.wake_up.follow(["tenant_a"])
    eventually(lambda: leaders_asleep(pattern) == 1, 10)
    execute(pattern, "DROP SCHEMA tenant_a CASCADE")
    create(pattern, "tenant_a")
    eventually(lambda: process.is_told_of(lambda: insert(pattern, "tenant_a")), 20)
    assert leaders_asleep(pattern) == 1


def test_a_process_listens_when_the_one_that_did_has_ended(pattern: Settings, process: Process) -> None:
    create(pattern, "tenant_a")
    first = Process(pattern)
    first.wake_up.follow(["tenant_a"])
    eventually(lambda: leaders_asleep(pattern) == 1, 10)
    process.wake_up.follow(["tenant_a"])
    assert first.was_told(lambda: insert(pattern, "tenant_a"))
    first.wake_up.close()
    eventually(lambda: process.is_told_of(lambda: insert(pattern, "tenant_a")), 20)


def test_a_lost_connection_is_replaced(pattern: Settings, process: Process) -> None:
    create(pattern, "tenant_a")
    process.wake_up.follow(["tenant_a"])
    eventually(lambda: leaders_asleep(pattern) == 1, 10)
    assert execute(pattern, ENDED) == [(True,)]
    eventually(lambda: leaders_asleep(pattern) == 1, 20)
    eventually(lambda: process.is_told_of(lambda: insert(pattern, "tenant_a")), 20)


def test_a_tenant_is_listened_to_as_soon_as_a_writer_that_knows_of_nobody_has_ended(
    pattern: Settings, process: Process
) -> None:
    create(pattern, "tenant_a")
    with psycopg.connect(pattern.dsn.get_secret_value()) as writing:
        writing.execute("INSERT INTO tenant_a.outbox (kafka_topic, kafka_key) VALUES ('t', 'k')")
        process.wake_up.follow(["tenant_a"])
        assert not process.is_told_of(writing.commit)
    eventually(lambda: leaders_asleep(pattern) == 1, 10)
    assert process.was_told(lambda: insert(pattern, "tenant_a"))


def test_tenants_at_rest_leave_room_for_the_locks_of_others(tmp_path: Path, pattern: Settings) -> None:
    """All sessions of a server share a table of locks. If it were full, no session could go on."""
    server = EmbeddedPostgres(tmp_path / "postgres", {"max_locks_per_transaction": "10", "max_connections": "20"})
    server.launch()
    try:
        server.wait()
        small = pattern.model_copy(update={"dsn": SecretStr(server.dsn)})
        schemas = [f"tenant_{number}" for number in range(300)]
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            connection.execute("CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'")
            for schema in schemas:
                connection.execute(
                    f"CREATE SCHEMA {schema} CREATE TABLE outbox (id BIGSERIAL) CREATE TRIGGER outbox_wake_up AFTER "
                    "INSERT ON outbox FOR EACH STATEMENT EXECUTE FUNCTION public.nothing('t', '1')".encode()
                )
        process = Process(small)
        with closing(process.wake_up):
            process.wake_up.follow(schemas)
            eventually(lambda: 50 <= leaders_asleep(small) <= 100, 20)
            assert not process.is_told_of(lambda: None)
            assert leaders_asleep(small) <= 100
    finally:
        server.stop()
