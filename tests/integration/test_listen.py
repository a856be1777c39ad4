"""The port for operators, of real harvesters: metrics, and whether they are ready."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from outbox_plugin import Harvester, Settings
from outbox_plugin.bench.proxy import DIRECTIONS, Proxy
from outbox_plugin.embedded.free_ports import free_port
from outbox_plugin.embedded.kafka import EmbeddedKafka
from outbox_plugin.operate import pause, resume
from tests.harvesting import drained, environment, harvesters, insert, insert_numbered, run_outbox
from tests.processes import paused
from tests.scraping import HOST, get, leader_and_standby, listening, metrics, not_ready, ready, shown
from tests.support import eventually

pytestmark = pytest.mark.integration


def hears_no_leader(settings: Settings) -> bool:
    return "no leader has been heard" in not_ready(settings)


def new_threads(before: set[threading.Thread]) -> set[threading.Thread]:
    """Those that have been started since, and have not ended."""
    return set(threading.enumerate()) - before


def deleted(settings: Settings) -> float:
    """Published rows that are gone: after their purge, or by the leader of the next term."""
    found = metrics(settings)
    return sum(found.get((f"outbox_{how}_rows_total",), 0) for how in ("purged", "recovered"))


@pytest.fixture
def proxy(settings: Settings) -> Iterator[Proxy]:
    """A way to Postgres that can be made to go wrong."""
    with Proxy(int(str(conninfo_to_dict(settings.dsn.get_secret_value())["port"]))) as proxy:
        yield proxy


@pytest.fixture
def through(settings: Settings, proxy: Proxy) -> Settings:
    """Settings whose DSN leads through the proxy."""
    dsn = settings.dsn.get_secret_value().replace(f":{proxy.target}/", f":{proxy.port}/")
    return settings.model_copy(update={"dsn": type(settings.dsn)(dsn)})


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_what_was_sent_is_shown(settings: Settings, topic: str, delivery: str) -> None:
    ours = listening(settings.model_copy(update={"delivery": delivery}))
    threads_before = set(threading.enumerate())
    with Harvester(ours):
        insert_numbered(ours, topic, 1, 500)
        drained(ours)
        eventually(lambda: deleted(ours) >= 500, 20)
        eventually(lambda: get(ours, "/readyz") == (200, f"group {ours.group}, shard 0: ready: leads\n"), 20)
        eventually(lambda: shown(ours, "outbox_is_leader", "0") == shown(ours, "outbox_ready", "0") == 1, 20)
        found = metrics(ours)
        assert get(ours, "/livez") == (200, f"group {ours.group}: alive\n")
    sent = found["outbox_sent_messages_total", topic]
    assert sent == 500 or (delivery == "at-least-once" and sent > 500)
    assert found[("outbox_takeover_duration_seconds_count",)] >= 1  # More where a busy machine ends a term.
    assert found[("outbox_delivery_delay_seconds_count",)] >= 1
    assert found[("outbox_read_duration_seconds_count",)] >= 1
    assert found[("outbox_purge_duration_seconds_count",)] >= 1
    assert (found[("outbox_transaction_duration_seconds_count",)] >= 1) is (delivery == "exactly-once")
    assert get(ours, "/livez") == (0, "")
    eventually(lambda: not any(each.name.startswith("outbox-") for each in new_threads(threads_before)), 10)


def test_rows_that_wait_are_shown_and_a_paused_leader_is_ready(settings: Settings, topic: str) -> None:
    ours = listening(settings)
    pause(ours)
    insert(ours, topic, [("key", "value")] * 3)
    with Harvester(ours):
        eventually(lambda: metrics(ours).get(("outbox_waiting_rows", "0")) == 3, 30)
        eventually(lambda: "leads, paused" in ready(ours), 30)
        eventually(lambda: (shown(ours, "outbox_oldest_row_age_seconds", "0") or 0) > 0, 30)
        resume(ours)
        drained(ours)
        eventually(lambda: metrics(ours).get(("outbox_waiting_rows", "0")) == 0, 30)


def test_what_postgres_says_of_the_table_is_shown(settings: Settings, topic: str) -> None:
    ours = listening(settings)
    with psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection:
        connection.execute("ALTER TABLE outbox SET (autovacuum_enabled = false)")
        insert(ours, topic, [(f"key-{number}", "x" * 1_000) for number in range(500)])
        connection.execute("DELETE FROM outbox WHERE id IN (SELECT id FROM outbox ORDER BY id LIMIT 200)")
        connection.execute("SELECT pg_stat_force_next_flush()")
        pause(ours)
        with Harvester(ours):
            eventually(lambda: (shown(ours, "outbox_table_dead_rows") or 0) >= 200, 30)
            [size] = connection.execute("SELECT pg_total_relation_size('outbox')").fetchone() or (0,)
            assert shown(ours, "outbox_table_bytes") == size > 500_000
            connection.execute("VACUUM outbox")
            eventually(lambda: shown(ours, "outbox_table_dead_rows") == 0, 30)
            resume(ours)


def test_bad_rows_are_shown(settings: Settings, topic: str) -> None:
    ours = listening(settings)
    insert(ours, "__forbidden", [("key", "value")])
    insert(ours, topic, [("key", "value")])
    with Harvester(ours):
        eventually(lambda: metrics(ours).get(("outbox_parked_keys",)) == 1, 30)
        found = metrics(ours)
        assert found[("outbox_parked_rows_total",)] == 1
        assert found["outbox_failed_transactions_total", "RowsRefused"] >= 1
        eventually(lambda: shown(ours, "outbox_waiting_rows", "0") == 0, 30)  # What is parked waits for an operator.


def test_a_standby_is_ready_and_is_scraped_while_it_takes_over(settings: Settings, tmp_path: Path) -> None:
    both = listening(settings), listening(settings)
    with harvesters(both[0], tmp_path / "0") as [first], harvesters(both[1], tmp_path / "1") as [second]:
        leader, standby = leader_and_standby(*both)
        eventually(lambda: shown(standby, "outbox_is_leader", "0") == 0, 30)
        with ThreadPoolExecutor(20) as scrapers:
            (first if leader is both[0] else second).kill()
            scrapes = scrapers.map(lambda _: shown(standby, "outbox_is_leader", "0"), range(200))
            eventually(lambda: "leads" in ready(standby), 60)
            assert set(scrapes) <= {0, 1, None}
        eventually(lambda: shown(standby, "outbox_is_leader", "0") == 1, 30)


@pytest.mark.parametrize("leads", [True, False])
def test_who_cannot_reach_postgres_is_not_ready_until_it_can(
    settings: Settings, through: Settings, proxy: Proxy, leads: bool
) -> None:
    ours, other = listening(through), listening(settings)
    with Harvester(ours if leads else other) as _:
        eventually(lambda: "leads" in ready(ours if leads else other), 60)
        with Harvester(other if leads else ours) as _:
            eventually(lambda: ready(ours) and ready(other), 60)
            proxy.hold(*DIRECTIONS)
            eventually(lambda: "not ready: Postgres: " in not_ready(ours), 60)
            assert get(ours, "/livez")[0] == 200
            eventually(lambda: "leads" in ready(other), 60)
            proxy.restore()
            eventually(lambda: ready(ours), 60)


def test_who_cannot_reach_kafka_is_not_ready_until_it_can(settings: Settings, kafka: EmbeddedKafka) -> None:
    elsewhere = settings.model_copy(update={"bootstrap_servers": kafka.bootstrap_servers})
    both = listening(elsewhere), listening(elsewhere)
    with Harvester(both[0]), Harvester(both[1]):
        leader_and_standby(*both)
        with paused(kafka.pid):
            for each in both:
                eventually(partial(hears_no_leader, each), 60)
                assert get(each, "/livez")[0] == 200
        eventually(lambda: all(map(ready, both)), 60)


def test_who_was_stopped_becomes_ready_again(settings: Settings, tmp_path: Path) -> None:
    """A process that was stopped knows at first nothing of what happened since."""
    ours = listening(settings)
    with harvesters(ours, tmp_path) as [leader]:
        eventually(lambda: "leads" in ready(ours), 60)
        leader.signal(signal.SIGSTOP)
        with socket.create_connection((HOST, int(ours.listen or 0))), Harvester(settings):
            leader.signal(signal.SIGCONT)
            eventually(lambda: "ready: stands by" in ready(ours) or "ready: leads" in ready(ours), 60)
        eventually(lambda: "ready: leads" in ready(ours), 60)


def test_a_taken_port_is_one_line_and_nothing_is_relayed(settings: Settings, topic: str) -> None:
    insert(settings, topic, [("key", "value")])
    with socket.create_server((HOST, free_port())) as other:
        port = other.getsockname()[1]
        done = run_outbox("harvest", "--listen", str(port), env=environment(settings))
    assert done.returncode == 2
    assert done.stderr == f"outbox: OUTBOX_LISTEN: cannot listen on {HOST}:{port}: another program listens there\n"
    assert done.stdout == ""


def test_two_outboxes_of_a_process_share_the_port(settings: Settings) -> None:
    first = listening(settings)
    second = first.model_copy(update={"group": f"{settings.group}-2"})
    with Harvester(first):
        eventually(lambda: ready(first), 60)
        with pytest.raises(Exception, match=r"OUTBOX_GROUP|--adopt"), Harvester(second):
            pass
        eventually(lambda: get(first, "/readyz") == (200, f"group {first.group}, shard 0: ready: leads\n"), 60)
        with Harvester(first):
            eventually(lambda: ready(first).count("stands by") == 1, 60)
            eventually(lambda: shown(first, "outbox_is_leader", "0") == 1, 30)
    assert get(first, "/readyz") == (0, "")
