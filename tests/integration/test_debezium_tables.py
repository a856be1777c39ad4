"""Moving here from Debezium: tables of many kinds, which are relayed as Debezium relays them, or refused."""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path

import psycopg
import pytest

from outbox_plugin import Harvester, Settings
from outbox_plugin.errors import UserError
from outbox_plugin.schema.migrate import migrate
from tests.harvesting import backlog, consume, create_topic, drained, environment
from tests.integration.test_debezium import (
    TABLE,
    Connector,
    connector,
    debezium,
    outbox,
    prepare,
    refused,
    run,
    server,
    written,
)

pytestmark = pytest.mark.integration
__all__ = ["connector", "outbox", "server"]  # Fixtures.

INSERT = (
    "INSERT INTO outboxevent (id, aggregatetype, aggregateid, payload) VALUES (gen_random_uuid(), 'kind', 'key', '1');"
)
DELETED_AT_ONCE = f"BEGIN; {INSERT} DELETE FROM outboxevent; COMMIT"
JSON = {"value.converter": "org.apache.kafka.connect.json.JsonConverter", "value.converter.schemas.enable": "false"}
FUNCTION = "CREATE FUNCTION fired() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RETURN NEW; END$$;"


def switch(settings: Settings, connector: Path) -> None:
    with Connector(settings, "nothing"):
        debezium("switch", settings, connector)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("CREATE TABLE child () INHERITS (outboxevent)", "has tables that inherit from it"),
        (
            f"{FUNCTION} CREATE TRIGGER mine BEFORE INSERT ON outboxevent FOR EACH ROW EXECUTE FUNCTION fired()",
            "mine on",
        ),
        (f"{FUNCTION} CREATE TRIGGER mine AFTER INSERT ON outboxevent EXECUTE FUNCTION fired()", "the trigger mine on"),
        ("CREATE RULE mine AS ON INSERT TO outboxevent DO ALSO NOTHING", "the rule mine on"),
        ("CREATE SEQUENCE outboxevent_outbox_place_seq", "does not belong to public.outboxevent"),
        ("CREATE TABLE outboxevent_relayed ()", "OUTBOX_TABLE: 'outboxevent_relayed' exists, and is not a view of"),
        ("CREATE TABLE other (id int); CREATE VIEW outboxevent_relayed AS TABLE other", "and is not a view of"),
        ("CREATE ROLE {role}; ALTER TABLE outboxevent OWNER TO {role}", "belongs to '{role}': connect as that role"),
    ],
)
def test_a_table_whose_events_would_be_lost_is_refused_at_once(
    outbox: Settings, connector: Path, made: str, said: str
) -> None:
    role = f"role_{uuid.uuid4().hex[:8]}"
    run(outbox, made.format(role=role))
    try:
        assert said.format(role=role) in refused("prepare", outbox, connector)
    finally:
        if "ROLE" in made:
            run(outbox, f"DROP OWNED BY {role} CASCADE; DROP ROLE {role}")


def test_a_trigger_that_does_not_fire_for_a_row_that_is_put_back_may_stay(outbox: Settings, connector: Path) -> None:
    when = "FOR EACH ROW WHEN (pg_trigger_depth() = 0)"
    run(outbox, f"{FUNCTION} CREATE TRIGGER mine BEFORE INSERT ON outboxevent {when} EXECUTE FUNCTION fired()")
    prepare(outbox, connector)
    switch(outbox, connector)
    run(outbox, DELETED_AT_ONCE)
    assert backlog(outbox) == 1


@pytest.mark.parametrize(
    ("publication", "said"),
    [
        ("FOR TABLE outboxevent, TABLES IN SCHEMA public", "contains all tables, or all tables of a schema"),
        ("FOR TABLE outboxevent WHERE (aggregatetype <> 'x')", "omits rows or columns"),
        ("FOR TABLE outboxevent (id, payload)", "omits rows or columns"),
    ],
)
def test_a_publication_of_other_rows_is_refused(outbox: Settings, connector: Path, publication: str, said: str) -> None:
    run(outbox, f"DROP PUBLICATION dbz_publication; CREATE PUBLICATION dbz_publication {publication}")
    prepare(outbox, connector)
    assert said in refused("switch", outbox, connector)
    assert run(outbox, "SELECT paused FROM outbox_identity") == [(False,)]


def test_a_table_that_is_in_the_publication_again_is_refused(outbox: Settings, connector: Path) -> None:
    prepare(outbox, connector)
    switch(outbox, connector)
    run(outbox, "ALTER PUBLICATION dbz_publication ADD TABLE outboxevent")
    assert "contains the table again" in refused("switch", outbox, connector)


@pytest.mark.parametrize("identity", ["DEFAULT", "NOTHING"])
def test_a_table_that_no_row_can_be_deleted_from_is_refused(outbox: Settings, connector: Path, identity: str) -> None:
    run(outbox, f"ALTER TABLE outboxevent DROP CONSTRAINT outboxevent_pkey, REPLICA IDENTITY {identity}")
    prepare(outbox, connector)
    run(outbox, "CREATE PUBLICATION others FOR ALL TABLES")
    assert "expected a table with a primary key or another replica" in refused("switch", outbox, connector)
    run(outbox, "ALTER TABLE outboxevent REPLICA IDENTITY FULL, DROP size")
    assert run(outbox, "SELECT paused FROM outbox_identity") == [(False,)]
    switch(outbox, connector)
    topic = create_topic(outbox, f"outbox.event.{outbox.group}", 1)
    run(outbox, INSERT.replace("kind", outbox.group))
    with Harvester(outbox):
        drained(outbox)
    assert len(consume(outbox, topic)) == 1


def test_row_level_security_that_hides_rows_is_refused(outbox: Settings, connector: Path) -> None:
    """Debezium reads the log, which has all rows."""
    role = f"role_{uuid.uuid4().hex[:8]}"
    prepare(outbox, connector)
    run(outbox, f"CREATE ROLE {role}; GRANT SELECT, DELETE, UPDATE ON outboxevent TO {role}")
    try:
        run(outbox, f"GRANT CREATE ON SCHEMA public TO {role}; ALTER VIEW outboxevent_relayed OWNER TO {role}")
        run(
            outbox,
            "ALTER TABLE outboxevent ENABLE ROW LEVEL SECURITY; CREATE POLICY few ON outboxevent USING (id IS NULL)",
        )
        assert "row level security can hide rows" in refused("switch", outbox, connector)
        run(outbox, "ALTER POLICY few ON outboxevent USING (true)")
        switch(outbox, connector)
        run(outbox, "DROP POLICY few ON outboxevent")
        with pytest.raises(UserError, match="row level security"), Harvester(outbox):
            pass
    finally:
        run(outbox, f"REASSIGN OWNED BY {role} TO CURRENT_USER; DROP OWNED BY {role}; DROP ROLE {role}")


def test_a_writer_that_names_every_column_loses_nothing(outbox: Settings, connector: Path) -> None:
    """It may have read before the switch what the columns are called, and say NULL where a default would stand."""
    prepare(outbox, connector)
    switch(outbox, connector)
    with psycopg.connect(outbox.dsn.get_secret_value()) as connection, connection.cursor() as cursor:
        columns = "id, aggregatetype, aggregateid, type, payload, outbox_place, outbox_created_at, outbox_leader"
        with cursor.copy(f"COPY outboxevent ({columns}) FROM STDIN") as copy:
            copy.write_row((uuid.uuid4(), "kind", "key", None, "1", None, None, None))
    with psycopg.connect(outbox.dsn.get_secret_value()) as connection:
        connection.execute("SET session_replication_role = replica")  # As a subscription writes.
        connection.execute(INSERT.replace("'1'", "'2'"))
        connection.execute(
            f"INSERT INTO outboxevent ({columns}) VALUES (gen_random_uuid(), 'kind', 'key', 't', '3', NULL, NULL, NULL)"
        )
    assert run(outbox, "SELECT kafka_value FROM outboxevent_relayed ORDER BY id") == [("1",), ("2",), ("3",)]


def test_what_a_subscription_writes_and_deletes_at_once_is_kept(outbox: Settings, connector: Path) -> None:
    prepare(outbox, connector)
    switch(outbox, connector)
    run(outbox, f"SET session_replication_role = replica; {DELETED_AT_ONCE}")
    assert backlog(outbox) == 1


def test_a_table_may_be_altered_after_the_switch(outbox: Settings, connector: Path) -> None:
    run(outbox, "ALTER TABLE outboxevent ADD found BOOLEAN, ADD stored BOOLEAN, ADD unused INT")
    prepare(outbox, connector)
    switch(outbox, connector)
    run(outbox, "ALTER TABLE outboxevent DROP unused, ADD tenant TEXT NOT NULL DEFAULT 't'")
    run(outbox, "ALTER TABLE outboxevent RENAME type TO sort")
    run(outbox, DELETED_AT_ONCE)
    assert run(outbox, "SELECT kafka_value FROM outboxevent_relayed") == [("1",)]


def test_two_tables_with_long_names_share_nothing(outbox: Settings, tmp_path: Path) -> None:
    names = [f"{'outbox_events_of_the_relationship_service__' * 2}"[:54] + each for each in ("orders", "billing")]
    views = [outbox.model_copy(update={"table": f"relayed_{number}"}) for number in range(2)]
    for name, view in zip(names, views, strict=True):
        run(outbox, TABLE.replace("outboxevent", name))
        run(outbox, f"ALTER PUBLICATION dbz_publication ADD TABLE {name}")
        file = written(tmp_path, {"table.include.list": f"public.{name}"})
        prepare(view, file)
        switch(view, file)
    run(outbox, DELETED_AT_ONCE.replace("outboxevent", names[0]))
    assert [backlog(view) for view in views] == [1, 0]


def test_nobody_else_can_put_a_row_into_the_outbox(outbox: Settings, connector: Path) -> None:
    prepare(outbox, connector)
    role = f"role_{uuid.uuid4().hex[:8]}"
    run(outbox, f"CREATE ROLE {role}; CREATE SCHEMA {role} AUTHORIZATION {role}")
    each = "FOR EACH ROW EXECUTE FUNCTION public.outboxevent_outbox_kept()"
    forge = f"CREATE TRIGGER forge AFTER DELETE ON {role}.mine"
    try:
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="function"):
            run(outbox, f"SET ROLE {role}; CREATE TABLE {role}.mine (a INT); {forge} {each}")
    finally:
        run(outbox, f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_functions_of_others_are_not_called(outbox: Settings, tmp_path: Path) -> None:
    """They would get each event, with the rights of whoever inserts or reads it."""
    functions = {"to_json(text)": "json", "convert_to(text, text)": "bytea", "nextval(text)": "bigint"}
    for function, result in functions.items():
        body = f"LANGUAGE plpgsql AS $$BEGIN RAISE 'called'; RETURN NULL::{result}; END$$"
        run(outbox, f"CREATE FUNCTION public.{function} RETURNS {result} {body}")
    run(outbox, "ALTER TABLE outboxevent ADD at TIMESTAMP")
    placed = {"transforms.outbox.table.fields.additional.placement": "type:header,type:envelope"}
    at = {"transforms.outbox.table.field.event.timestamp": "at"}
    file = written(tmp_path, {**placed, **at, **JSON})
    prepare(outbox, file)
    switch(outbox, file)
    run(outbox, INSERT)
    assert run(outbox, "SELECT kafka_value FROM outboxevent_relayed") == [('{"payload":"1","type":null}',)]


@pytest.mark.parametrize("terminal", ["utf-8", "latin-1"])
def test_names_are_utf_8_in_whichever_encoding_psql_reads_the_file(
    outbox: Settings, tmp_path: Path, terminal: str
) -> None:
    """Else a header would silently have another name, in a database or at a terminal of another encoding."""
    file = written(tmp_path, {"transforms.outbox.table.fields.additional.placement": "type:header:größe"})
    command = [sys.executable, "-m", "outbox_plugin", "debezium", "prepare", str(file)]
    env = {**environment(outbox), "PYTHONIOENCODING": terminal}
    printed = subprocess.run(command, env=env, capture_output=True, check=True).stdout
    with psycopg.connect(outbox.dsn.get_secret_value(), autocommit=True, client_encoding="latin1") as connection:
        for statement in printed.split(b";\n\n"):
            connection.execute(statement)
    migrate(outbox)
    switch(outbox, file)
    run(outbox, INSERT)
    assert run(outbox, "SELECT kafka_header_keys FROM outboxevent_relayed") == [(["id", "größe"],)]


def test_a_generated_column_is_refused(outbox: Settings, tmp_path: Path) -> None:
    """Debezium never gets it."""
    file = written(tmp_path, {"transforms.outbox.table.fields.additional.placement": "size:header"})
    assert "the column 'size' is generated" in refused("prepare", outbox, file)


def test_a_date_without_end_is_a_header_without_a_value(outbox: Settings, tmp_path: Path) -> None:
    """Else one such row would hold up all keys."""
    columns = {"day": "DATE", "at": "TIMESTAMP", "shortly": "TIMESTAMP(3)", "there": "TIMESTAMPTZ"}
    run(outbox, f"ALTER TABLE outboxevent {', '.join(f'ADD {name} {kind}' for name, kind in columns.items())}")
    headers = ",".join(f"{name}:header" for name in columns)
    connector = written(tmp_path, {"transforms.outbox.table.fields.additional.placement": headers})
    prepare(outbox, connector)
    switch(outbox, connector)
    insert = "INSERT INTO outboxevent (id, aggregatetype, aggregateid, day, at, shortly, there) VALUES (%s, %s, 'k', "
    topic = create_topic(outbox, f"outbox.event.{outbox.group}", 1)
    for each in (
        "'infinity', 'infinity', '-infinity', 'infinity')",
        "'1970-01-03', '294276-01-01', '1970-01-01 00:00:01', NULL)",
    ):
        run(outbox, insert + each, uuid.uuid4(), outbox.group)
    with Harvester(outbox):
        drained(outbox)
    [endless, last] = [dict(record.headers[1:]) for record in consume(outbox, topic)]
    assert endless == dict.fromkeys(columns, "")
    assert last == {"day": "2", "at": "9224286393600000000", "shortly": "1000", "there": ""}


def test_only_what_begins_like_json_is_expanded(outbox: Settings, tmp_path: Path) -> None:
    connector = written(tmp_path, {**JSON, "transforms.outbox.table.expand.json.payload": "true"})
    prepare(outbox, connector)
    switch(outbox, connector)
    for payload in ('{"a": 1}', "[1]", "123", '"text"', None):
        run(outbox, "INSERT INTO outboxevent VALUES (gen_random_uuid(), 'kind', 'key', NULL, %s)", payload)
    values = [value for (value,) in run(outbox, "SELECT kafka_value FROM outboxevent_relayed ORDER BY id")]
    assert values == ['{"a": 1}', "[1]", '"123"', '"\\"text\\""', "null"]


@pytest.mark.parametrize(
    ("changed", "altered", "said"),
    [
        ({"key.converter": "org.apache.kafka.connect.converters.ByteArrayConverter"}, "", "character varying(255)"),
        ({"transforms.outbox.table.fields.additional.placement": "price:header"}, "ADD price NUMERIC(10,7)", "price"),
    ],
)
def test_what_cannot_be_written_as_kafka_connect_does_is_refused(
    outbox: Settings, tmp_path: Path, changed: dict[str, str], altered: str, said: str
) -> None:
    if altered:
        run(outbox, f"ALTER TABLE outboxevent {altered}")
    assert said in refused("prepare", outbox, written(tmp_path, changed))


def test_a_connector_that_would_fail_at_our_messages_is_refused(outbox: Settings, tmp_path: Path) -> None:
    run(outbox, "ALTER TABLE outboxevent ALTER payload TYPE BYTEA USING NULL")
    connector = written(tmp_path, {"value.converter": "org.apache.kafka.connect.converters.ByteArrayConverter"})
    prepare(outbox, connector)
    assert "expected io.debezium.converters.BinaryDataConverter with" in refused("switch", outbox, connector)


def test_a_view_with_a_delete_of_its_own_is_refused(outbox: Settings, connector: Path) -> None:
    """It may delete nothing, and say that it has: each term would publish the row again."""
    prepare(outbox, connector)
    run(outbox, "CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RETURN OLD; END$$")
    run(outbox, "CREATE TRIGGER keep INSTEAD OF DELETE ON outboxevent_relayed FOR EACH ROW EXECUTE FUNCTION keep()")
    migrate(outbox)
    with pytest.raises(UserError, match="the trigger keep keeps the rows"), Harvester(outbox):
        pass
