"""Moving here from Debezium: its rows and ours are each relayed once and in order, and what would not do is refused."""

from __future__ import annotations

import json
import struct
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer

from outbox_plugin import Harvester, Settings
from outbox_plugin.embedded.postgres import EmbeddedPostgres
from outbox_plugin.schema.migrate import migrate
from tests.harvesting import backlog, by_key, consume, create_topic, drained, environment, run_outbox
from tests.support import eventually

pytestmark = pytest.mark.integration

TABLE = """
CREATE TABLE outboxevent (
    id            UUID PRIMARY KEY,
    aggregatetype VARCHAR(255) NOT NULL,
    aggregateid   VARCHAR(255) NOT NULL,
    type          VARCHAR(255),
    payload       JSONB,
    size          INT GENERATED ALWAYS AS (length(aggregateid)) STORED
)
"""
STRING = "org.apache.kafka.connect.storage.StringConverter"
JSON = "org.apache.kafka.connect.json.JsonConverter"
PROPERTIES = {
    "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
    "plugin.name": "pgoutput",
    "publication.autocreate.mode": "disabled",
    "table.include.list": "public.outboxevent",
    "transforms": "outbox",
    "transforms.outbox.type": "io.debezium.transforms.outbox.EventRouter",
    "key.converter": STRING,
    "value.converter": STRING,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    """A Postgres whose log can be decoded."""
    server = EmbeddedPostgres(tmp_path_factory.mktemp("logical") / "postgres", {"wal_level": "logical"})
    server.launch()
    server.wait()
    yield server
    server.stop()


@pytest.fixture
def outbox(server: EmbeddedPostgres, bootstrap_servers: str, group: str) -> Iterator[Settings]:
    """Settings for the view of a table that Debezium reads."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    dsn = server.dsn.rsplit("/", 1)[0] + f"/{name}"
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(TABLE)
        connection.execute("CREATE PUBLICATION dbz_publication FOR TABLE outboxevent")
        connection.execute("SELECT pg_create_logical_replication_slot('debezium', 'pgoutput')")
        yield Settings(dsn=dsn, bootstrap_servers=bootstrap_servers, group=group, table="outboxevent_relayed")
        connection.execute("SELECT pg_drop_replication_slot('debezium')")


@pytest.fixture
def connector(tmp_path: Path) -> Path:
    return written(tmp_path, {})


def written(folder: Path, changed: Mapping[str, str]) -> Path:
    file = folder / "a connector.json"
    file.write_text(json.dumps({"name": "outbox", "config": {**PROPERTIES, **changed}}))
    return file


def run(settings: Settings, query: str, *values: object) -> list[tuple[Any, ...]]:
    with psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection:
        cursor = connection.execute(query, values or None)
        return cursor.fetchall() if cursor.description else []


def debezium(command: str, settings: Settings, connector: Path) -> str:
    done = run_outbox("debezium", command, str(connector), env=environment(settings))
    assert (done.returncode, done.stdout[:0]) == (0, ""), done.stderr
    return done.stdout


def refused(command: str, settings: Settings, connector: Path) -> str:
    done = run_outbox("debezium", command, str(connector), env=environment(settings))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def prepare(settings: Settings, connector: Path) -> None:
    """As `psql` would: one statement after the other."""
    with psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection:
        for statement in debezium("prepare", settings, connector).split(";\n\n"):
            connection.execute(statement)
    migrate(settings)


class Connector:
    """Relays, as Debezium does, what a publication lets it read, and confirms it afterwards."""

    def __init__(self, settings: Settings, topic: str) -> None:
        self._topic = topic
        self._dsn = settings.dsn.get_secret_value()
        self._producer = Producer({"bootstrap.servers": settings.bootstrap_servers, "enable.idempotence": True})
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._relay, name="connector")
        self.relayed = 0

    def __enter__(self) -> Connector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _relay(self) -> None:
        query = (
            "SELECT data FROM pg_logical_slot_peek_binary_changes('debezium', NULL, 50, 'proto_version', '1', "
            "'publication_names', 'dbz_publication', 'messages', 'true')"
        )
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            while not self._stop.is_set():
                changes = [data for (data,) in connection.execute(query).fetchall()]
                for data in changes:
                    if data[:1] == b"I":
                        self._publish(inserted(data))
                self._producer.flush()
                self._stop.wait(0.1)  # Behind the writers, so that rows of its own are left when new ones are ours.
                if commits := [data for data in changes if data[:1] == b"C"]:
                    connection.execute(
                        "SELECT pg_replication_slot_advance('debezium', %s::pg_lsn)", (end_of(commits[-1]),)
                    )

    def _publish(self, row: list[str | None]) -> None:
        id_, _, key, *_ = row
        self._producer.produce(self._topic, row[4], key, headers=[("id", id_)])
        self.relayed += 1


def end_of(commit: bytes) -> str:
    """Where the log goes on behind a Commit message of the logical replication's protocol."""
    high, low = struct.unpack_from("!II", commit, 10)
    return f"{high:X}/{low:X}"


def inserted(data: bytes) -> list[str | None]:
    """The values of an Insert message of the logical replication's protocol, as text."""
    [count] = struct.unpack_from("!h", data, 6)
    place, found = 8, list[str | None]()
    for _ in range(count):
        kind, place = data[place : place + 1], place + 1
        if kind == b"t":
            [length] = struct.unpack_from("!i", data, place)
            found.append(data[place + 4 : place + 4 + length].decode())
            place += 4 + length
        else:
            found.append(None)
    return found


class Writer:
    """Writes events of its own keys; if it `deletes`, it deletes each at once, as many applications do."""

    def __init__(self, settings: Settings, number: int, kind: str, *, deletes: bool) -> None:
        self._settings, self._number, self._kind, self._deletes = settings, number, kind, deletes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write, name=f"writer-{number}")
        self.written: dict[str, list[str]] = defaultdict(list)

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _write(self) -> None:
        with psycopg.connect(self._settings.dsn.get_secret_value()) as connection:
            number = 0
            while not self._stop.is_set():
                key = f"{self._number}-{number % 5}"
                for _ in range(1 + number % 3):
                    number += 1
                    id_ = uuid.uuid4()
                    connection.execute(
                        "INSERT INTO outboxevent VALUES (%s, %s, %s, 'Happened', to_jsonb(%s::int))",
                        (id_, self._kind, key, number),
                    )
                    if self._deletes:
                        gone = connection.execute("DELETE FROM outboxevent WHERE id = %s", (id_,))
                        assert gone.rowcount == 1
                    self.written[key].append(str(number))
                connection.commit()
                time.sleep(0.003)


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_each_row_is_relayed_once_and_in_order(outbox: Settings, connector: Path, delivery: str) -> None:
    settings = outbox.model_copy(update={"delivery": delivery})
    topic = create_topic(settings, f"outbox.event.{settings.group}", 1)
    with (
        Connector(settings, topic) as relaying,
        Writer(settings, 0, settings.group, deletes=False) as first,
        Writer(settings, 1, settings.group, deletes=True) as second,
    ):
        eventually(lambda: relaying.relayed > 50, 30)
        prepare(settings, connector)
        with Harvester(settings):
            before = relaying.relayed
            eventually(lambda: relaying.relayed > before + 50, 30)
            assert backlog(settings) == 0  # No row is ours yet.
            debezium("switch", settings, connector)
            of_debezium = relaying.relayed
            eventually(lambda: sum(map(len, first.written.values())) > of_debezium, 60)
            debezium("switch", settings, connector)  # Once more does no harm.
            first.__exit__()
            second.__exit__()
            drained(settings)
        assert relaying.relayed == of_debezium
    received: dict[str, list[str | None]] = by_key(consume(settings, topic))
    if delivery == "at-least-once":  # A leader that is told of the second switch may send its last rows again.
        received = {key: list(dict.fromkeys(values)) for key, values in received.items()}
    assert received == first.written | second.written


def test_an_event_that_is_deleted_later_is_gone(outbox: Settings, connector: Path) -> None:
    prepare(outbox, connector)
    with Connector(outbox, "nothing"):
        debezium("switch", outbox, connector)
    values = "VALUES (gen_random_uuid(), 'kind', 'key', NULL, NULL)"
    run(outbox, f"INSERT INTO outboxevent {values}")
    assert backlog(outbox) == 1
    run(outbox, "DELETE FROM outboxevent")
    assert backlog(outbox) == 0
    run(outbox, f"BEGIN; INSERT INTO outboxevent {values}; DELETE FROM outboxevent; COMMIT")
    assert run(outbox, "SELECT kafka_key, kafka_header_keys FROM outboxevent_relayed") == [("key", ["id"])]


def test_a_role_that_inserts_can_go_on(outbox: Settings, connector: Path, group: str) -> None:
    role = f"app_{group.replace('-', '_')}"
    run(outbox, f"CREATE ROLE {role} LOGIN; GRANT INSERT, SELECT, DELETE ON outboxevent TO {role}")
    try:
        prepare(outbox, connector)
        run(outbox, f"REVOKE USAGE ON SEQUENCE outboxevent_outbox_place_seq FROM {role}")
        assert f"the role '{role}', which may insert" in refused("switch", outbox, connector)
        prepare(outbox, connector)
        with Connector(outbox, "nothing"):
            debezium("switch", outbox, connector)
        run(
            outbox,
            f"SET ROLE {role}; BEGIN; INSERT INTO outboxevent VALUES (gen_random_uuid(), 'kind', 'key', NULL, NULL); "
            "DELETE FROM outboxevent; COMMIT",
        )
        assert backlog(outbox) == 1
    finally:
        run(outbox, f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_the_outbox_must_be_the_view(outbox: Settings, connector: Path) -> None:
    assert "is not a view of public.outboxevent" in refused("switch", outbox, connector)
    with psycopg.connect(outbox.dsn.get_secret_value(), autocommit=True) as connection:
        for statement in debezium("prepare", outbox, connector).split(";\n\n"):
            connection.execute(statement)
    assert "run `outbox migrate` first" in refused("switch", outbox, connector)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"publication.autocreate.mode": "filtered"}, "publication.autocreate.mode: expected 'disabled'"),
        ({"publication.name": "no_such"}, "there is no publication 'no_such'"),
        ({"publication.name": "everything"}, "'everything' contains all tables"),
        ({"slot.name": "no_such"}, "there is no replication slot 'no_such'"),
        ({"plugin.name": "decoderbufs"}, "plugin.name: expected 'pgoutput'"),
    ],
)
def test_what_would_relay_rows_twice_is_refused_before_anything_is_changed(
    outbox: Settings, connector: Path, tmp_path: Path, changed: dict[str, str], said: str
) -> None:
    prepare(outbox, connector)
    run(outbox, "CREATE PUBLICATION everything FOR ALL TABLES")
    assert said in refused("switch", outbox, written(tmp_path, changed))
    assert run(outbox, "SELECT paused FROM outbox_identity") == [(False,)]
    run(outbox, "INSERT INTO outboxevent VALUES (gen_random_uuid(), 'kind', 'key', NULL, NULL)")
    assert backlog(outbox) == 0
    assert run(outbox, "SELECT count(*) FROM pg_publication_tables WHERE pubname = 'dbz_publication'") == [(1,)]


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "expected JSON"), ("[]", "expected a JSON object"), ('{"config": 1}', "config: expected an object")],
)
def test_a_file_without_a_configuration_is_refused(outbox: Settings, tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "connector.json"
    file.write_text(content)
    assert said in refused("prepare", outbox, file)


@pytest.mark.parametrize("table", ["parted", "part"])
def test_a_partitioned_table_and_a_partition_are_refused(outbox: Settings, tmp_path: Path, table: str) -> None:
    run(outbox, "CREATE TABLE parted (LIKE outboxevent) PARTITION BY RANGE (aggregateid)")
    run(outbox, "CREATE TABLE part PARTITION OF parted DEFAULT")
    connector = written(tmp_path, {"table.include.list": f"public.{table}"})
    assert f"table.include.list: public.{table} is partitioned or a partition" in refused("prepare", outbox, connector)


def test_an_index_that_was_not_finished_is_refused(outbox: Settings, connector: Path) -> None:
    prepare(outbox, connector)
    run(outbox, "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'outboxevent_outbox_place_key'::regclass")
    assert "no valid unique index" in refused("switch", outbox, connector)


@pytest.mark.parametrize(
    ("collated", "changed"),
    [
        ("aggregatetype", {"transforms.outbox.route.by.field": "type"}),
        ("aggregateid", {"transforms.outbox.table.field.event.key": "type"}),
        ("aggregateid", {"key.converter": JSON, "key.converter.schemas.enable": "false"}),
        ("type", {"transforms.outbox.table.field.event.payload": "type"}),
        ("type", {"transforms.outbox.table.fields.additional.placement": "type:header"}),
        (
            "type",
            {
                "transforms.outbox.table.field.event.payload": "type",
                "transforms.outbox.table.expand.json.payload": "true",
                "value.converter": JSON,
                "value.converter.schemas.enable": "false",
            },
        ),
    ],
)
def test_a_view_with_another_collation_is_refused(
    outbox: Settings, tmp_path: Path, connector: Path, collated: str, changed: dict[str, str]
) -> None:
    run(outbox, "ALTER TABLE outboxevent DROP size")
    run(outbox, f'ALTER TABLE outboxevent ALTER {collated} TYPE VARCHAR(255) COLLATE "C"')
    prepare(outbox, connector)
    prepare(outbox, connector)
    error = refused("prepare", outbox, written(tmp_path, changed))
    assert "of the collation" in error
    assert "stop the harvesters, drop the view" in error
    run(outbox, "DROP VIEW outboxevent_relayed")
    for _ in range(2):
        prepare(outbox, written(tmp_path, changed))


def test_odd_names_are_only_names(outbox: Settings, tmp_path: Path) -> None:
    table, column, quoted = 'out%s $keep$ "box', "pay;load$keep$", '"out%s $keep$ ""box"'
    create = TABLE.replace("outboxevent", quoted).replace("payload", f'"{column}"')
    run(outbox, f"{create}; CREATE PUBLICATION odd FOR TABLE {quoted}")
    file = written(
        tmp_path,
        {
            "table.include.list": f"public.{table}",
            "publication.name": "odd",
            "transforms.outbox.table.field.event.payload": column,
        },
    )
    prepare(outbox, file)
    with Connector(outbox, "nothing"):
        debezium("switch", outbox, file)
    event = "VALUES (gen_random_uuid(), 'kind', 'key', NULL, '1')"
    run(outbox, f"BEGIN; INSERT INTO {quoted} {event}; DELETE FROM {quoted}; COMMIT")
    assert run(outbox, "SELECT kafka_key, kafka_value FROM outboxevent_relayed") == [("key", "1")]


def test_a_table_that_is_not_there_is_refused(outbox: Settings, tmp_path: Path) -> None:
    file = written(tmp_path, {"table.include.list": "public.no_such"})
    assert "there is no table public.no_such" in refused("prepare", outbox, file)
