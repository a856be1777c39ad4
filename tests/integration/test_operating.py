"""Pause and resume, retention and replay, wake-up, several outboxes: an operator's orders, obeyed by whoever leads."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from select import select

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from outbox_plugin import Harvester, Settings, operate
from outbox_plugin.adapters.harvester_registration import HarvesterRegistration
from outbox_plugin.adapters.history_partitions import HistoryPartitions
from outbox_plugin.adapters.postgres_marked_store import PostgresMarkedStore
from outbox_plugin.adapters.postgres_wake_up import PostgresWakeUp
from outbox_plugin.core import poll_schedule
from outbox_plugin.core.intervals import CONTROL_IDLE_SECONDS
from outbox_plugin.core.shards import Layout
from outbox_plugin.errors import InvalidSetting, ServerRefused, StoreUnavailable
from outbox_plugin.schema.connection import command_connection, connect
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.status.reader import read_status
from tests.harvesting import (
    DRAIN_SECONDS,
    HarvesterProcess,
    assert_exactly_once_in_order,
    backlog,
    by_key,
    consume,
    create_topic,
    drained,
    environment,
    insert,
    insert_numbered,
    run_outbox,
)
from tests.postgres_sessions import leaders_asleep
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.integration

SEVEN_DAYS = {"retention": timedelta(days=7)}


@pytest.fixture(params=["exactly-once", "at-least-once"])
def either(settings: Settings, request: pytest.FixtureRequest) -> Settings:
    return settings.model_copy(update={"delivery": request.param})


def stays(settings: Settings, rows: int, seconds: float = 1.0) -> bool:
    """Whether the backlog is `rows` all the time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if backlog(settings) != rows:
            return False
    return True


def test_a_paused_outbox_rests_until_it_is_resumed_whoever_leads(either: Settings, topic: str) -> None:
    env = environment(either)
    with Harvester(either):
        insert(either, topic, [("k", "1")])
        drained(either)
        assert run_outbox("pause", env=env).stdout == "paused outbox\n"
        assert read_status(either).shards[0].paused
        time.sleep(5 * CONTROL_IDLE_SECONDS)  # A leader asks for orders as often as that.
        insert(either, topic, [("k", "2")])
        assert stays(either, 1)
    with Harvester(either):
        eventually(lambda: read_status(either).shards[0].leader, 30)
        assert stays(either, 1)
        assert "paused: see `outbox resume`" in run_outbox("status", env=env).stdout
        assert run_outbox("resume", env=env).stdout == "resumed outbox\n"
        drained(either)
    assert by_key(consume(either, topic)) == {"k": ["1", "2"]}


def test_one_shard_can_be_paused(settings: Settings, topic: str) -> None:
    two = settings.model_copy(update={"shards": 2})
    with Harvester(two):
        operate.pause(two, 1)
        time.sleep(5 * CONTROL_IDLE_SECONDS)
        insert_numbered(two, topic, 0, 100)
        eventually(lambda: read_status(two).shards[0].lag_records == 0, 30)
        waiting = backlog(two)
        assert waiting == read_status(two).shards[1].lag_records > 0
        assert stays(two, waiting)
        operate.resume(two, 1)
        drained(two)
    assert_exactly_once_in_order(consume(two, topic), 0, 100)


def test_a_shard_that_is_not_there_cannot_be_paused(settings: Settings) -> None:
    with pytest.raises(InvalidSetting, match="there is no shard 3"):
        operate.pause(settings, 3)
    assert not read_status(settings).shards[0].paused


def test_published_rows_are_kept_by_day_and_emitted_again(either: Settings, topic: str) -> None:
    kept = either.model_copy(update=SEVEN_DAYS)
    with Harvester(kept):
        insert(kept, topic, [("a", "1"), ("b", "1"), ("a", "2")])
        drained(kept)
        said = run_outbox("replay", "--topic", topic, "--key", "a", "--since", "2026-01-01", env=environment(kept))
        assert said.stdout == "emitted again: 2\n"
        drained(kept)
    records = consume(kept, topic)
    assert by_key(records) == {"a": ["1", "2", "1", "2"], "b": ["1"]}
    assert [record.headers for record in records if record.key == "a"][2:] == [
        [("outbox-replay", "1")],
        [("outbox-replay", "3")],
    ]


def test_a_replay_that_finds_nothing_says_what_keeps_events(settings: Settings, topic: str) -> None:
    with Harvester(settings):
        insert(settings, topic, [("a", "1")])
        drained(settings)
    said = run_outbox("replay", "--topic", topic, env=environment(settings))
    assert (said.returncode, said.stdout) == (0, "emitted again: 0\n")
    assert "OUTBOX_RETENTION" in said.stderr


def test_bytes_are_kept_put_aside_and_emitted_again_as_they_are(either: Settings, topic: str) -> None:
    """An outbox whose values are BYTEA."""
    kept = either.model_copy(update={**SEVEN_DAYS, "bad_rows": "dead-letter"})
    with psycopg.connect(either.dsn.get_secret_value()) as connection:
        connection.execute("ALTER TABLE outbox ALTER kafka_value TYPE bytea USING convert_to(kafka_value, 'UTF8')")
        connection.execute(
            "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value, kafka_header_keys) "
            "VALUES (%(topic)s, 'k', 'good\\134', '{}'), (%(topic)s, 'k', 'bad', '{unpaired}')",
            {"topic": topic},
        )
    with Harvester(kept):
        drained(kept)
        eventually(lambda: operate.dead_letters(kept), 30)
        with psycopg.connect(either.dsn.get_secret_value()) as connection:
            connection.execute("UPDATE outbox_dead_letter SET kafka_header_keys = '{}'")
        assert operate.retry_dead_letters(kept) == 1
        drained(kept)
        assert operate.replay(kept, key="k") == 2
        drained(kept)
    assert by_key(consume(kept, topic)) == {"k": ["good\\", "bad", "good\\", "bad"]}


def test_days_are_dropped_after_their_time(settings: Settings) -> None:
    kept = settings.model_copy(update=SEVEN_DAYS)
    with connect(kept) as connection:
        for days_ago in (1, 6, 9, 30):
            day, next_day = connection.execute(
                "SELECT (now() AT TIME ZONE 'UTC')::date - %s, (now() AT TIME ZONE 'UTC')::date - %s + 1",
                (days_ago, days_ago),
            ).fetchone() or ("", "")
            connection.execute(
                sql.SQL("CREATE TABLE {} PARTITION OF outbox_history FOR VALUES FROM ({}) TO ({})").format(
                    sql.Identifier(f"outbox_history_{day:%Y%m%d}"),
                    sql.Literal(f"{day} 00:00+00"),
                    sql.Literal(f"{next_day} 00:00+00"),
                )
            )
        HistoryPartitions(kept).maintain(connection)
        partitions = connection.execute(
            "SELECT count(*) FROM pg_inherits WHERE inhparent = 'outbox_history'::regclass"
        ).fetchone()
    assert partitions == (4,)  # Yesterday, six days ago, today and tomorrow.


@pytest.mark.parametrize("days", [7, None])
def test_a_harvester_registers_for_how_long_it_keeps_rows(settings: Settings, days: int | None) -> None:
    retention = None if days is None else timedelta(days=days)
    with connect(settings) as connection:
        connection.execute("UPDATE outbox_identity SET history_kept = '1 day'")
        with Harvester(settings.model_copy(update={"retention": retention})):
            pass
        assert connection.execute("SELECT history_kept FROM outbox_identity").fetchall() == [(retention,)]


def test_a_day_is_kept_for_the_longest_time_of_the_outboxes_that_share_it(settings: Settings) -> None:
    other = settings.model_copy(update={"table": "other", "group": f"{settings.group}-other"})
    migrate(other)
    with connect(settings) as connection:
        connection.execute(
            "CREATE TABLE five_days_ago PARTITION OF outbox_history "
            "FOR VALUES FROM (current_date - 5) TO (current_date - 4)"
        )

        def after_a_term(kept: Settings, days: int | None) -> bool:
            """Whether the day is there after a term of an outbox with such a retention has begun."""
            retention = None if days is None else timedelta(days=days)
            kept = kept.model_copy(update={"retention": retention})
            with connect(kept) as connection:
                HarvesterRegistration(kept, connection).register_retention()
            with closing(PostgresMarkedStore(kept, 0, Layout(1, 1))):
                return "five_days_ago" in days_of(settings)

        assert after_a_term(settings, 7)
        assert after_a_term(other, 1)
        assert after_a_term(settings, None)
        assert not after_a_term(other, 1)


def test_an_outbox_that_was_dropped_keeps_no_day_of_the_others(settings: Settings) -> None:
    dropped = settings.model_copy(
        update={"table": "dropped", "group": f"{settings.group}-dropped", "retention": timedelta(days=7)}
    )
    migrate(dropped)
    kept = settings.model_copy(update={"retention": timedelta(days=1)})
    with connect(settings) as connection:
        HarvesterRegistration(dropped, connection).register_retention()
        connection.execute(
            "CREATE TABLE five_days_ago PARTITION OF outbox_history "
            "FOR VALUES FROM (current_date - 5) TO (current_date - 4)"
        )
        HistoryPartitions(kept).maintain(connection)
        assert "five_days_ago" in days_of(settings)
        connection.execute("ALTER TABLE dropped RENAME TO renamed")  # It is still there.
        HistoryPartitions(kept).maintain(connection)
        assert "five_days_ago" in days_of(settings)
        connection.execute("DROP TABLE renamed")
        HistoryPartitions(kept).maintain(connection)
    assert "five_days_ago" not in days_of(settings)


def days_of(settings: Settings) -> set[str]:
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        query = "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'outbox_history'::regclass"
        return {name for (name,) in connection.execute(query).fetchall()}


def test_who_reads_the_history_for_long_holds_up_no_row(settings: Settings, topic: str) -> None:
    """A nightly dump begins before today's partition is there, when one has expired; a user's table has its name."""
    kept = settings.model_copy(update=SEVEN_DAYS)
    dsn = settings.dsn.get_secret_value()
    with psycopg.connect(dsn, autocommit=True) as connection, psycopg.connect(dsn) as dump:
        connection.execute(
            "CREATE TABLE old PARTITION OF outbox_history FOR VALUES FROM ('2020-01-01') TO ('2020-01-02')"
        )
        [(today,)] = connection.execute("SELECT to_char(now() AT TIME ZONE 'UTC', 'YYYYMMDD')").fetchall()
        connection.execute(f"CREATE TABLE outbox_history_{today} (x int)")
        dump.execute("SELECT count(*) FROM outbox_history")
        with Harvester(kept):
            insert(settings, topic, [(f"k{number}", "1") for number in range(100)])
            drained(settings, 20)
        assert "old" in days_of(settings)
        assert len(days_of(settings)) == 3
        assert connection.execute("SELECT count(*) FROM outbox_history").fetchone() == (100,)
        dump.rollback()
        HistoryPartitions(kept).maintain(connection)
        assert "old" not in days_of(settings)
        assert connection.execute(f"SELECT count(*) FROM outbox_history_{today}").fetchone() == (0,)


def test_days_that_a_lock_prevents_are_tried_again_soon(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = settings.model_copy(update=SEVEN_DAYS)
    monkeypatch.setattr("outbox_plugin.adapters.history_partitions.RETRY_SECONDS", 0.0)
    history = HistoryPartitions(kept)
    with connect(kept) as connection, psycopg.connect(settings.dsn.get_secret_value()) as other:
        other.execute("LOCK TABLE outbox_history IN ACCESS EXCLUSIVE MODE")
        history.maintain(connection)
        other.rollback()
        assert days_of(settings) == set()
        history.maintain(connection)
    assert len(days_of(settings)) == 2


def test_nothing_is_kept_by_default(settings: Settings, topic: str) -> None:
    with Harvester(settings):
        insert(settings, topic, [("a", "1")])
        drained(settings)
    assert operate.replay(settings) == 0


def commits_a_second(settings: Settings, seconds: float) -> float:
    """Transactions a second in the test's database, over the next `seconds`."""
    before = commits(settings)
    time.sleep(seconds)
    return (commits(settings) - before) / seconds


def commits(settings: Settings) -> int:
    """Transactions that the test's database has seen."""
    with psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection:
        row = connection.execute(
            "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
        ).fetchone()
    return int(row[0]) if row else 0


@pytest.fixture
def _no_look_behind_the_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is relayed after a rest was relayed because a writer woke the harvester."""
    monkeypatch.setattr(poll_schedule, "READ_ASLEEP_SECONDS", 10 * DRAIN_SECONDS)


@pytest.mark.usefixtures("_no_look_behind_the_wake_up")
@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_an_idle_harvester_sleeps_and_a_writer_wakes_it(settings: Settings, topic: str, delivery: str) -> None:
    settings = settings.model_copy(update={"delivery": delivery})
    assert run_outbox("migrate", "--wake-up", env=environment(settings)).returncode == 0
    with Harvester(settings):
        for value in ("1", "2"):
            eventually(lambda: leaders_asleep(settings), 30)
            insert(settings, topic, [("k", value)])
            drained(settings)
    assert by_key(consume(settings, topic)) == {"k": ["1", "2"]}


@pytest.mark.usefixtures("_no_look_behind_the_wake_up")
def test_no_harvester_falls_asleep_beside_a_writer_that_would_not_wake_it(settings: Settings, topic: str) -> None:
    migrate(settings, wake_up=True)
    with psycopg.connect(settings.dsn.get_secret_value()) as writer:
        writer.execute("INSERT INTO outbox (kafka_topic, kafka_key, kafka_value) VALUES (%s, 'k', '1')", (topic,))
        with Harvester(settings):
            eventually(lambda: read_status(settings).shards[0].leader, 30)
            until = time.monotonic() + 2.0
            while time.monotonic() < until:
                assert not leaders_asleep(settings)
            writer.commit()
            drained(settings)
            eventually(lambda: leaders_asleep(settings), 30)


@pytest.mark.usefixtures("_no_look_behind_the_wake_up")
def test_a_notification_that_comes_with_an_answer_is_heard_at_once(settings: Settings) -> None:
    """Such as a command's that is given while the leader arms the wake-up."""
    with closing(PostgresWakeUp(settings, 0)) as wake_up, ThreadPoolExecutor(1) as pool:
        connection = wake_up._listening_connection()
        connection.execute("SELECT pg_notify('outbox', %s)", (settings.table,))
        heard = pool.submit(wake_up.wait, 600)
        try:
            assert heard.result(30 * PATIENCE)
        finally:
            wake_up.interrupt()


def test_an_order_wakes_a_harvester(settings: Settings, topic: str) -> None:
    migrate(settings, wake_up=True)
    operate.pause(settings)
    insert(settings, topic, [("k", "1")])
    with Harvester(settings):
        eventually(lambda: read_status(settings).shards[0].leader, 30)
        operate.resume(settings)
        drained(settings)


def test_only_the_leaders_that_the_trigger_knows_fall_asleep(settings: Settings) -> None:
    migrate(settings, wake_up=True)
    more = settings.model_copy(update={"shards": 2})
    with Harvester(more):
        eventually(lambda: leaders_asleep(settings) == 1, 30)
        eventually(lambda: all(shard.leader for shard in read_status(settings).shards), 30)
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            assert leaders_asleep(settings) < 2
    migrate(more, wake_up=True)
    with Harvester(more):
        eventually(lambda: leaders_asleep(settings) == 2, 30)


def test_the_trigger_can_be_removed(settings: Settings) -> None:
    migrate(settings, wake_up=True)
    migrate(settings, wake_up=False)
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        left = connection.execute("SELECT tgname FROM pg_trigger WHERE NOT tgisinternal").fetchall()
    assert left == [("outbox_truncated",)]


def test_an_idle_harvester_asks_postgres_next_to_nothing(settings: Settings) -> None:
    migrate(settings, wake_up=True)
    with Harvester(settings):
        eventually(lambda: leaders_asleep(settings), 30)
        # Postgres counts what a busy beginning did only later, so the first window may hold more than an idle one.
        eventually(lambda: commits_a_second(settings, 10.0) < 3, 60)


def test_several_outboxes_in_one_process(settings: Settings, group: str, tmp_path: Path) -> None:
    topics = [create_topic(settings, f"{group}-{name}") for name in ("one", "two")]
    own = [{"table": f"outbox_{name}", "group": f"{group}-{name}"} for name in ("one", "two")]
    both = settings.model_copy(update={"outboxes": own})
    env = environment(both)
    assert run_outbox("migrate", env=env).returncode == 0
    one, two = both.each()
    log = tmp_path / "harvester.log"
    harvester = HarvesterProcess(both, log)
    try:
        for outbox, topic in zip((one, two), topics, strict=True):
            insert_numbered(outbox, topic, 0, 100, keys=10)
        drained(one)
        drained(two)
        found = json.loads(run_outbox("status", "--json", env=env).stdout)
        assert {table: status["shards"][0]["leader"]["pid"] for table, status in found.items()} == {
            "outbox_one": harvester.pid,
            "outbox_two": harvester.pid,
        }
        assert harvester.terminate() == 0
    finally:
        if harvester.alive:
            harvester.kill()
    for topic in topics:
        assert_exactly_once_in_order(consume(settings, topic), 0, 100)


def test_one_shard_of_an_outbox_that_is_paused_as_a_whole_cannot_be_resumed(settings: Settings) -> None:
    """It would stay paused, and an operator would think that it goes on."""
    operate.pause(settings)
    with pytest.raises(InvalidSetting, match="outbox is paused as a whole: resume it without a shard, then pause"):
        operate.resume(settings, 0)
    operate.resume(settings)
    operate.pause(settings, 0)
    operate.resume(settings, 0)
    assert not read_status(settings).shards[0].paused


@pytest.mark.parametrize("command", ["retry", "discard"])
def test_a_dead_letter_that_is_not_there_is_named_and_the_others_are_still_served(
    settings: Settings, command: str
) -> None:
    """As after a command that was interrupted, or that two operators run at once."""
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        [(there,)] = connection.execute(
            "INSERT INTO outbox_dead_letter (table_name, reason, create_time, kafka_topic, kafka_key, "
            "kafka_header_keys, kafka_header_values) VALUES ('outbox', 'r', now(), 't', 'k', '{}', '{}') RETURNING id"
        ).fetchall()
    first, again = (
        run_outbox("dead-letters", command, str(there), "4711", str(there), env=environment(settings)) for _ in range(2)
    )
    assert (first.returncode, first.stderr) == (2, "outbox: there is no dead letter 4711\n")
    assert first.stdout.endswith(": 1\n")
    assert (again.returncode, again.stderr) == (2, f"outbox: there is no dead letter {there}, 4711\n")
    assert again.stdout.endswith(": 0\n")
    assert backlog(settings) == (1 if command == "retry" else 0)


def test_a_connection_that_is_lost_at_the_commit_leaves_it_open_whether_the_order_was_carried_out(
    settings: Settings,
) -> None:
    migrate(settings)
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute(
            """CREATE FUNCTION end_session() RETURNS trigger LANGUAGE plpgsql AS
            'BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END'"""
        )
        connection.execute(
            "CREATE CONSTRAINT TRIGGER ends_session AFTER UPDATE ON outbox_identity DEFERRABLE INITIALLY DEFERRED "
            "FOR EACH ROW EXECUTE FUNCTION end_session()"
        )
    said = run_outbox("pause", env=environment(settings))
    assert said.returncode == 1
    assert "went away: terminating connection due to administrator command. It may have been done" in said.stderr
    assert said.stderr.count("\n") == 1


def test_a_refusal_is_no_loss_of_the_connection_where_that_is_lost_after_it(settings: Settings) -> None:
    def is_refused() -> None:
        with command_connection(settings) as connection, closing(connection):
            connection.execute("SELECT 1 / 0")

    with pytest.raises(ServerRefused, match="division by zero"):
        is_refused()


def test_a_session_that_the_server_ends_is_a_loss_of_the_connection(settings: Settings) -> None:
    def has_no_session() -> None:
        with command_connection(settings) as connection, connection.transaction():
            connection.execute("SET idle_in_transaction_session_timeout = '50ms'")
            readable, _, _ = select([connection.fileno()], [], [], PATIENCE)
            assert readable
            connection.execute("SELECT 1")

    with pytest.raises(StoreUnavailable, match=r"went away: .*idle-in-transaction timeout"):
        has_no_session()


@pytest.mark.parametrize(
    ("option", "command", "said"),
    [
        ("role=pg_read_all_settings", "pause", "grant what `outbox grants --role operator` prints"),
        ("role=pg_read_all_settings", "inbox retry --all", "grant what `outbox grants --role operator` prints"),
        ("default_transaction_read_only=on", "pause", "name the primary, and a role whose transactions may write"),
    ],
)
def test_one_who_may_not_is_told_what_to_do(settings: Settings, option: str, command: str, said: str) -> None:
    dsn = make_conninfo(settings.dsn.get_secret_value(), options=f"-c {option}")
    done = run_outbox(*command.split(), env={**environment(settings), "OUTBOX_DSN": dsn})
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.rstrip().endswith(f"; {said}")
