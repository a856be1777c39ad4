"""No statement waits for ever on a path that is dead, and none is given up while the server works on it."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from outbox_plugin import Settings
from outbox_plugin.adapters.harvester_registration import HarvesterRegistration
from outbox_plugin.adapters.postgres_marked_store import PostgresMarkedStore
from outbox_plugin.adapters.postgres_wake_up import PostgresWakeUp
from outbox_plugin.adapters.postgres_window_store import PostgresWindowStore
from outbox_plugin.bench.proxy import DIRECTIONS, Direction, Proxy
from outbox_plugin.core.postgres_ports import ReadRequest
from outbox_plugin.core.shards import Layout
from outbox_plugin.errors import StoreUnavailable
from outbox_plugin.inbox import Inbox
from outbox_plugin.schema.connection import connect, connect_async
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.status.reader import read_status
from tests.harvesting import (
    assert_exactly_once_in_order,
    backlog,
    by_key,
    consume,
    drained,
    harvesters,
    insert,
    insert_numbered,
    members,
)
from tests.inbox_support import effects, make_effect_table, produce, record_effect
from tests.postgres_sessions import sessions_waiting_to_write
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.integration

GIVEN_UP_SECONDS = 3.0


@pytest.fixture
def proxy(settings: Settings) -> Iterator[Proxy]:
    """A way to Postgres that can be made to go wrong."""
    given = conninfo_to_dict(settings.dsn.get_secret_value())
    with Proxy(int(str(given["port"]))) as proxy:
        yield proxy


@pytest.fixture
def through(settings: Settings, proxy: Proxy) -> Settings:
    """Settings whose DSN leads through the proxy."""
    dsn = settings.dsn.get_secret_value().replace(f":{proxy.target}/", f":{proxy.port}/")
    return settings.model_copy(update={"dsn": type(settings.dsn)(dsn)})


def assert_given_up(began: float) -> None:
    assert time.monotonic() - began < GIVEN_UP_SECONDS * PATIENCE


def test_a_statement_on_a_stuck_path_is_given_up(through: Settings, proxy: Proxy) -> None:
    with closing(connect(through)) as connection:
        connection.execute("SELECT 1")
        proxy.hold(*DIRECTIONS)
        began = time.monotonic()
        with pytest.raises(psycopg.OperationalError, match="does not answer"):
            connection.execute("SELECT 1")
        assert_given_up(began)
        assert connection.closed


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_statement_whose_packets_vanish_is_given_up(through: Settings, proxy: Proxy, direction: Direction) -> None:
    with closing(connect(through)) as connection:
        proxy.discard(direction)
        began = time.monotonic()
        with pytest.raises(psycopg.OperationalError, match="does not answer"):
            connection.execute("SELECT 1")
        assert_given_up(began)


def test_a_connection_that_alone_is_half_open_is_given_up(through: Settings, proxy: Proxy) -> None:
    """New connections reach the server, which has never heard of the statement."""
    with closing(connect(through)) as connection:
        proxy.half_open()
        began = time.monotonic()
        with pytest.raises(psycopg.OperationalError, match="does not answer"):
            connection.execute("SELECT 1")
        assert_given_up(began)


@pytest.mark.parametrize("statement", ["SELECT pg_sleep(4)", "LOCK TABLE outbox"])
def test_a_statement_that_the_server_works_on_is_waited_for(settings: Settings, statement: str) -> None:
    """However long: for its own sake, or for a lock."""
    with psycopg.connect(settings.dsn.get_secret_value()) as holder, closing(connect(settings)) as connection:
        holder.execute("LOCK TABLE outbox")
        release = threading.Timer(4.0, holder.rollback)
        release.start()
        with connection.transaction():
            connection.execute(statement)
        release.join()


def test_an_async_statement_on_a_stuck_path_is_given_up(through: Settings, proxy: Proxy) -> None:
    async def asks() -> None:
        connection = await connect_async(through)
        try:
            await connection.execute("SELECT 1")
            proxy.hold(*DIRECTIONS)
            with pytest.raises(psycopg.OperationalError, match="does not answer"):
                await connection.execute("SELECT 1")
        finally:
            await connection.close()

    began = time.monotonic()
    asyncio.run(asks())
    assert_given_up(began)


def test_a_server_that_accepts_and_says_nothing_does_not_hold_up_a_connection(through: Settings, proxy: Proxy) -> None:
    proxy.hold(*DIRECTIONS)
    began = time.monotonic()
    with pytest.raises(psycopg.OperationalError):
        connect(through)
    assert time.monotonic() - began < 5.0 * PATIENCE


def test_the_wake_up_does_not_wait_for_ever(through: Settings, proxy: Proxy) -> None:
    with closing(PostgresWakeUp(through, 0)) as wake_up:
        wake_up.arm()
        proxy.hold(*DIRECTIONS)
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            wake_up.disarm()
        assert_given_up(began)


def test_status_says_so_and_leaves_no_thread_behind(through: Settings, proxy: Proxy) -> None:
    proxy.hold(*DIRECTIONS)
    status = read_status(through)
    assert status.backlog is None
    assert "Postgres" in status.errors[0]
    eventually(lambda: not {each.name for each in threading.enumerate()} & {"outbox-status", "outbox-connect"}, 10)


def test_a_marking_that_is_not_received_does_not_keep_its_rows_from_the_next_leader(
    settings: Settings, through: Settings, proxy: Proxy
) -> None:
    """As of a leader that is stopped, or whose packets vanish, while the rows that it has marked are sent to it."""
    old_id, new_id = str(uuid.uuid4()), str(uuid.uuid4())
    insert(settings, "t", [(f"key-{number}", "x" * 900_000) for number in range(9)])
    layout = layout_of(settings)
    with (
        closing(PostgresMarkedStore(through, 0, layout)) as old,
        closing(PostgresMarkedStore(settings, 0, layout)) as new,
    ):
        old.lead(old_id)
        proxy.hold("to client")
        marking = threading.Thread(target=lambda: mark_in_vain(old, old_id))
        marking.start()
        eventually(lambda: sessions_waiting_to_write(settings), 10)
        new.lead(new_id)
        began = time.monotonic()
        assert new.mark(new_id, ReadRequest(10))
        assert time.monotonic() - began < 4.0 * PATIENCE
        proxy.restore()
        marking.join(90)


def test_a_read_that_is_not_received_does_not_keep_others_from_the_table(
    settings: Settings, through: Settings, proxy: Proxy
) -> None:
    """While it lasts, whoever alters the table waits for its lock, and everybody else behind them."""
    insert(settings, "t", [(f"key-{number}", "x" * 1_000) for number in range(10_000)])
    with (
        closing(PostgresWindowStore(through, 0, layout_of(settings))) as store,
        closing(connect(settings)) as migration,
    ):
        store.lead(str(uuid.uuid4()))
        proxy.hold("to client")
        reading = threading.Thread(target=lambda: read_in_vain(store))
        reading.start()
        eventually(lambda: sessions_waiting_to_write(settings), 10)
        began = time.monotonic()
        with migration.transaction():
            migration.execute("ALTER TABLE outbox ADD COLUMN note INT")
        assert time.monotonic() - began < 4.0 * PATIENCE
        proxy.restore()
        reading.join(90)


def test_a_transaction_that_a_leader_left_open_does_not_keep_the_next_one_out(settings: Settings) -> None:
    """As of a leader whose path dies between two statements."""
    layout = layout_of(settings)
    with (
        closing(PostgresMarkedStore(settings, 0, layout)) as old,
        closing(PostgresMarkedStore(settings, 0, layout)) as new,
    ):
        old.lead(str(uuid.uuid4()))
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            lead_beside_an_open_transaction(old, new)
        assert time.monotonic() - began < 4.0 * PATIENCE


def lead_beside_an_open_transaction(old: PostgresMarkedStore, new: PostgresMarkedStore) -> None:
    with old.session.durable_transaction() as run:
        run("control", "lead", leader_id=str(uuid.uuid4()))
        new.lead(str(uuid.uuid4()))


def mark_in_vain(store: PostgresMarkedStore, leader_id: str) -> None:
    with pytest.raises(StoreUnavailable):
        store.mark(leader_id, ReadRequest(10))


def read_in_vain(store: PostgresWindowStore) -> None:
    with pytest.raises(StoreUnavailable):
        store.read(ReadRequest(10_000))


def layout_of(settings: Settings) -> Layout:
    with closing(connect(settings)) as connection:
        return HarvesterRegistration(settings, connection).layout()


def test_an_inbox_goes_on_when_its_connections_are_half_open(
    settings: Settings, through: Settings, proxy: Proxy, topic: str, group: str
) -> None:
    make_effect_table(settings)
    with Inbox(through, group=group, topics=[topic], handler=record_effect):
        produce(settings, topic, [(f"k{number}", "1") for number in range(20)])
        eventually(lambda: len(effects(settings)) == 20, 30)
        proxy.half_open()
        began = time.monotonic()
        produce(settings, topic, [(f"k{number}", "2") for number in range(20)])
        eventually(lambda: len(effects(settings)) == 40, 30)
        assert time.monotonic() - began < 5.0 * PATIENCE


@pytest.mark.chaos
@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_a_leader_whose_path_to_postgres_is_stuck_makes_room(
    settings: Settings, through: Settings, proxy: Proxy, topic: str, tmp_path: Path, delivery: str
) -> None:
    """The standby takes over, and the old leader does not come back while its path is stuck, nor after."""
    settings, through = (each.model_copy(update={"delivery": delivery}) for each in (settings, through))
    migrate(settings)
    insert_numbered(settings, topic, 0, 1_000)
    with harvesters(through, tmp_path / "stuck") as [leader]:
        drained(settings)
        with harvesters(settings, tmp_path / "healthy") as [standby]:
            eventually(lambda: len(members(settings)) == 2, 60)
            proxy.hold(*DIRECTIONS)
            insert_numbered(settings, topic, 1_000, 1_000)
            began = time.monotonic()
            eventually(standby.leads, 30)
            eventually(lambda: backlog(settings) == 0, 30)
            print(f"the standby had relayed all after {time.monotonic() - began:.2f} s")
            assert time.monotonic() - began < 4.0 * PATIENCE
            proxy.restore()
            insert_numbered(settings, topic, 2_000, 1_000)
            drained(settings)
            assert standby.leads()
            assert leader.alive
    records = consume(settings, topic)
    if delivery == "exactly-once":
        assert_exactly_once_in_order(records, 0, 3_000)
    else:
        firsts = [list(dict.fromkeys(values)) for values in by_key(records).values()]
        assert all(values == sorted(values, key=lambda each: int(each or -1)) for values in firsts)
        assert {int(value or -1) for values in firsts for value in values} == {*range(3_000)}
