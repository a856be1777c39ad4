"""What is seen of tenants' outboxes on one connection, while other sessions change and lock them."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from pydantic import SecretStr

from outbox_plugin import Settings
from outbox_plugin.adapters.tenant_activity import TenantActivityReader
from outbox_plugin.core.resting_tenants import OutboxActivity
from outbox_plugin.embedded.postgres import EmbeddedPostgres
from tests.postgres_sessions import sessions_waiting_for_a_lock
from tests.roles import as_role, let_in
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.integration

TENANTS = 3_000


@pytest.fixture
def pattern(unmigrated: Settings) -> Settings:
    return unmigrated.model_copy(update={"table": "tenant_*.outbox"})


@pytest.fixture
def reader(pattern: Settings) -> Iterator[TenantActivityReader]:
    with closing(TenantActivityReader(pattern)) as reader:
        yield reader


def execute(pattern: Settings, *statements: str) -> None:
    with psycopg.connect(pattern.dsn.get_secret_value()) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def create(pattern: Settings, schema: str) -> None:
    execute(pattern, f"CREATE SCHEMA {schema}", f"CREATE TABLE {schema}.outbox (id BIGSERIAL PRIMARY KEY)")


def seen(reader: TenantActivityReader) -> OutboxActivity | None:
    return reader.activity(["tenant_a"]).get("tenant_a")


def test_whoever_waits_for_a_lock_on_a_sequence_hides_its_own_tenant_alone(
    pattern: Settings, reader: TenantActivityReader
) -> None:
    both = ["tenant_a", "tenant_b"]
    for schema in both:
        create(pattern, schema)
    waiting = threading.Thread(target=execute, args=(pattern, "TRUNCATE tenant_a.outbox RESTART IDENTITY"))
    with psycopg.connect(pattern.dsn.get_secret_value()) as drawing:
        drawing.execute("SELECT nextval('tenant_a.outbox_id_seq')")
        waiting.start()
        eventually(lambda: sessions_waiting_for_a_lock(pattern) == 1, 10)
        assert set(reader.activity(both)) == {"tenant_b"}
    waiting.join()
    assert set(reader.activity(both)) == set(both)


@pytest.mark.parametrize(
    "statements",
    [
        ("TRUNCATE tenant_a.outbox RESTART IDENTITY", "INSERT INTO tenant_a.outbox DEFAULT VALUES"),
        ("TRUNCATE tenant_a.outbox", "INSERT INTO tenant_a.outbox VALUES (7)"),
        (
            "DROP TABLE tenant_a.outbox",
            "CREATE TABLE tenant_a.outbox (id BIGSERIAL PRIMARY KEY)",
            "INSERT INTO tenant_a.outbox DEFAULT VALUES",
        ),
        ("ALTER SCHEMA tenant_a RENAME TO was_a", "ALTER SCHEMA tenant_b RENAME TO tenant_a"),
        (
            "CREATE SEQUENCE tenant_a.other",
            "ALTER TABLE tenant_a.outbox ALTER id SET DEFAULT nextval('tenant_a.other')",
            "DELETE FROM tenant_a.outbox",
            "INSERT INTO tenant_a.outbox DEFAULT VALUES",
        ),
    ],
)
def test_an_outbox_that_is_recreated_with_the_same_last_id_is_seen_to_have_changed(
    statements: tuple[str, ...], pattern: Settings, reader: TenantActivityReader
) -> None:
    for schema in ("tenant_a", "tenant_b"):
        create(pattern, schema)
        execute(pattern, f"INSERT INTO {schema}.outbox DEFAULT VALUES")
    before = seen(reader)
    assert before == seen(reader) is not None
    execute(pattern, *statements)
    assert before != seen(reader) is not None


def test_the_first_id_of_a_sequence_is_seen_also_if_it_is_zero(pattern: Settings, reader: TenantActivityReader) -> None:
    create(pattern, "tenant_a")
    execute(pattern, "ALTER SEQUENCE tenant_a.outbox_id_seq MINVALUE 0 RESTART 0")
    before = seen(reader)
    execute(pattern, "INSERT INTO tenant_a.outbox DEFAULT VALUES")
    assert before != seen(reader)


def test_ids_of_several_sequences_do_not_tell(pattern: Settings, reader: TenantActivityReader) -> None:
    create(pattern, "tenant_a")
    execute(
        pattern,
        "CREATE SEQUENCE tenant_a.even",
        "ALTER TABLE tenant_a.outbox ALTER id SET DEFAULT"
        " CASE WHEN random() < 0.5 THEN nextval('tenant_a.even') ELSE nextval('tenant_a.outbox_id_seq') END",
    )
    assert seen(reader) is None


@pytest.fixture
def foreign_reader(pattern: Settings) -> Iterator[TenantActivityReader]:
    """Reads, as a role that owns nothing, one tenant: policies apply to it."""
    role, dsn = f"harvester_{uuid.uuid4().hex[:8]}", pattern.dsn.get_secret_value()
    create(pattern, "tenant_a")
    execute(pattern, f"CREATE ROLE {role} LOGIN", f"GRANT USAGE ON SCHEMA tenant_a TO {role}")
    execute(pattern, *(f"GRANT ALL ON ALL {each} IN SCHEMA tenant_a TO {role}" for each in ("TABLES", "SEQUENCES")))
    let_in(dsn, role)
    with closing(TenantActivityReader(pattern.model_copy(update={"dsn": SecretStr(as_role(dsn, role))}))) as reader:
        yield reader
    execute(pattern, f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def test_rows_that_no_policy_lets_us_read_and_delete_keep_their_tenant_awake(
    pattern: Settings, foreign_reader: TenantActivityReader
) -> None:
    """Its harvester says what is wrong; at rest, the tenant would be called well for ever."""
    can_rest = []
    for statement in (
        "INSERT INTO tenant_a.outbox DEFAULT VALUES",
        "ALTER TABLE tenant_a.outbox ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY readers ON tenant_a.outbox FOR SELECT USING (true)",
        "CREATE POLICY others ON tenant_a.outbox FOR DELETE TO pg_monitor USING (true)",
        "CREATE POLICY deletions ON tenant_a.outbox FOR DELETE USING (true)",
    ):
        execute(pattern, statement)
        can_rest.append(seen(foreign_reader) is not None)
    assert can_rest == [True, False, False, False, True]
    assert foreign_reader.have_rows(["tenant_a"]) == {"tenant_a": True}


def test_outboxes_that_cannot_be_read_soon_hold_the_others_up_for_a_moment_only(
    pattern: Settings, reader: TenantActivityReader
) -> None:
    create(pattern, "tenant_a")
    execute(
        pattern,
        "CREATE SCHEMA tenant_slow",
        "CREATE VIEW tenant_slow.outbox AS SELECT WHERE pg_sleep(60) IS NULL",
    )
    reader.activity(["tenant_a"])
    assert reader.have_rows(["tenant_a", "tenant_slow", "tenant_a"]) == {"tenant_a": False, "tenant_slow": True}
    many = [f"tenant_{number}" for number in range(100)]
    for schema in many:
        create(pattern, schema)
    with psycopg.connect(pattern.dsn.get_secret_value()) as locking:
        for schema in many:
            locking.execute(f"LOCK TABLE {schema}.outbox".encode())
        began = time.monotonic()
        some = reader.have_rows(many)
        assert time.monotonic() - began < 5.0 * PATIENCE
        assert 0 < len(some) < len(many)
        assert set(some.values()) == {True}


def test_many_tenants_take_few_locks_at_a_time(tmp_path: Path, pattern: Settings) -> None:
    """All sessions of a server share a table of locks. If it were full, no session could go on."""
    server = EmbeddedPostgres(tmp_path / "postgres", {"max_locks_per_transaction": "10", "max_connections": "20"})
    server.launch()
    try:
        server.wait()
        small = pattern.model_copy(update={"dsn": SecretStr(server.dsn)})
        schemas = [f"tenant_{number}" for number in range(TENANTS)]
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            for schema in schemas:
                connection.execute(f"CREATE SCHEMA {schema} CREATE TABLE outbox (id BIGSERIAL)".encode())
        with closing(TenantActivityReader(small)) as reader:
            assert set(reader.activity(schemas)) == set(schemas)
    finally:
        server.stop()
