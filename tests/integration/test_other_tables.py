"""What is named as the outbox by mistake: `outbox migrate` leaves it as it is, and says what is wrong in one line."""

from __future__ import annotations

import psycopg
import pytest

from outbox_plugin import Harvester, Settings
from outbox_plugin.adapters.harvester_registration import HarvesterRegistration
from outbox_plugin.errors import SchemaMissing
from outbox_plugin.schema.migrate import migrate
from tests.harvesting import (
    assert_exactly_once_in_order,
    consume,
    create_topic,
    drained,
    environment,
    insert_numbered,
    run_outbox,
)

pytestmark = pytest.mark.integration

COLUMNS = {
    "id": "BIGSERIAL PRIMARY KEY",
    "create_time": "TIMESTAMPTZ NOT NULL DEFAULT now()",
    "kafka_topic": "TEXT NOT NULL",
    "kafka_key": "TEXT NOT NULL",
    "kafka_value": "TEXT",
    "kafka_header_keys": "TEXT[] NOT NULL",
    "kafka_header_values": "TEXT[] NOT NULL",
    "leader_id": "UUID",
}


def table(**others: str) -> str:
    """The definition of an outbox with columns of other types."""
    return f"CREATE TABLE given ({', '.join(f'{name} {kind}' for name, kind in {**COLUMNS, **others}.items())})"


FOREIGN_TABLE = (
    "CREATE FOREIGN DATA WRAPPER elsewhere; CREATE SERVER there FOREIGN DATA WRAPPER elsewhere; "
    + table(id="BIGINT").replace("CREATE TABLE", "CREATE FOREIGN TABLE")
    + " SERVER there"
)


def described(connection: psycopg.Connection[tuple[object, ...]]) -> list[tuple[object, ...]]:
    """All columns and triggers of the database's own tables."""
    return connection.execute(
        """
        SELECT attrelid::regclass::text, attname::text FROM pg_attribute WHERE attrelid >= 16384
        UNION ALL SELECT tgrelid::regclass::text, tgname::text FROM pg_trigger ORDER BY 1, 2
        """
    ).fetchall()


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ("CREATE TABLE given (id BIGSERIAL PRIMARY KEY, name TEXT)", "the table 'given' lacks the column(s) "),
        (
            "CREATE MATERIALIZED VIEW given AS SELECT 1 AS id",
            "'given' is a materialized view; an outbox is a table, or ",
        ),
        (
            f"{table()}; ALTER TABLE given RENAME TO rows; CREATE MATERIALIZED VIEW given AS SELECT * FROM rows",
            "'given' is a materialized view; an outbox is a table, or a view of one",
        ),
        (FOREIGN_TABLE, "'given' is a foreign table; an outbox is a table, or a view of one"),
        ("CREATE SEQUENCE given", "'given' is a sequence; an outbox is a table, or a view of one"),
        (table(id="UUID PRIMARY KEY"), "the column id of 'given' is a uuid; a harvester expects a BIGINT"),
        (table(id="NUMERIC PRIMARY KEY"), "the column id of 'given' is a numeric; a harvester expects a BIGINT"),
        (table(kafka_topic="INT"), "the column kafka_topic of 'given' is a integer; a harvester expects a TEXT"),
        (table(kafka_key="UUID"), "the column kafka_key of 'given' is a uuid; a harvester expects a TEXT"),
        (table(kafka_key="BYTEA"), "the column kafka_key of 'given' is a bytea; a harvester expects a TEXT"),
        (
            f"CREATE TYPE word AS ENUM ('k'); {table(kafka_key='word')}",
            "the column kafka_key of 'given' is a public.word; a harvester expects a TEXT",
        ),
        (table(kafka_header_values="UUID[]"), "the column kafka_header_values of 'given' is a uuid[]; a harvester ex"),
        (
            table(kafka_value="JSONB"),
            "the column kafka_value of 'given' is a jsonb; a harvester expects a TEXT or a BY",
        ),
        (table(kafka_header_keys="JSONB"), "the column kafka_header_keys of 'given' is a jsonb; a harvester expects a"),
    ],
)
@pytest.mark.parametrize("options", [[], ["--sql"]])
def test_what_is_no_outbox_is_not_altered(unmigrated: Settings, made: str, reason: str, options: list[str]) -> None:
    with psycopg.connect(unmigrated.dsn.get_secret_value(), autocommit=True) as connection:
        connection.execute(made)
        before = described(connection)
        done = run_outbox("migrate", *options, env={**environment(unmigrated), "OUTBOX_TABLE": "given"})
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert done.stderr.startswith(f"outbox: {reason}")
        assert described(connection) == before


@pytest.mark.parametrize("name", ["outbox_history", "outbox_identity", "outbox_migration"])
@pytest.mark.parametrize("options", [[], ["--sql"]])
def test_the_name_of_another_table_of_ours_is_refused(unmigrated: Settings, name: str, options: list[str]) -> None:
    done = run_outbox("migrate", *options, env={**environment(unmigrated), "OUTBOX_TABLE": name})
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == f"outbox: OUTBOX_TABLE: expected a name that no other table of an outbox has (given: '{name}')\n"
    )


@pytest.mark.parametrize(
    "others",
    [
        {"id": "SERIAL PRIMARY KEY", "kafka_topic": "VARCHAR(249)", "kafka_key": "VARCHAR(100)"},
        {"id": "ours_id PRIMARY KEY", "kafka_value": "ours_text", "kafka_header_keys": "ours_texts NOT NULL"},
        {"kafka_value": "BYTEA", "kafka_header_values": "VARCHAR(100)[]"},
    ],
)
def test_other_names_of_the_same_types_are_taken(unmigrated: Settings, others: dict[str, str]) -> None:
    with psycopg.connect(unmigrated.dsn.get_secret_value(), autocommit=True) as connection:
        connection.execute("CREATE DOMAIN ours_id AS BIGINT; CREATE DOMAIN ours_text AS TEXT")
        connection.execute("CREATE DOMAIN ours_texts AS TEXT[]")
        connection.execute(table(**others))
        ours = unmigrated.model_copy(update={"table": "given"})
        assert run_outbox("migrate", env=environment(ours)).returncode == 0
        HarvesterRegistration(ours, connection).check_outbox()


# What the extension citext makes, but for its operators.
TEXT_OF_AN_EXTENSION = """
CREATE TYPE cased;
CREATE FUNCTION cased_in(cstring) RETURNS cased LANGUAGE internal IMMUTABLE STRICT AS 'textin';
CREATE FUNCTION cased_out(cased) RETURNS cstring LANGUAGE internal IMMUTABLE STRICT AS 'textout';
CREATE FUNCTION cased_receive(internal) RETURNS cased LANGUAGE internal STABLE STRICT AS 'textrecv';
CREATE FUNCTION cased_send(cased) RETURNS bytea LANGUAGE internal STABLE STRICT AS 'textsend';
CREATE TYPE cased (INPUT = cased_in, OUTPUT = cased_out, RECEIVE = cased_receive, SEND = cased_send,
                   INTERNALLENGTH = variable, STORAGE = extended, CATEGORY = 'S', COLLATABLE = true);
CREATE CAST (cased AS text) WITHOUT FUNCTION AS IMPLICIT;
CREATE CAST (text AS cased) WITHOUT FUNCTION AS ASSIGNMENT;
"""


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_texts_of_an_extension_are_relayed_by_few_and_by_many(settings: Settings, group: str, delivery: str) -> None:
    settings = settings.model_copy(update={"delivery": delivery, "shards": 2})
    topic = create_topic(settings, f"{group}-events")
    with psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection:
        connection.execute(TEXT_OF_AN_EXTENSION)
        for column in ("kafka_topic", "kafka_key", "kafka_value"):
            connection.execute(f"ALTER TABLE outbox ALTER {column} TYPE cased")
    migrate(settings)
    with Harvester(settings):
        insert_numbered(settings, topic, 1, 1)
        drained(settings)
        insert_numbered(settings, topic, 2, 4_999)
        drained(settings)
        insert_numbered(settings, topic, 5_001, 1)
        drained(settings)
    assert_exactly_once_in_order(consume(settings, topic), 1, 5_001)


def test_a_column_whose_type_is_changed_ends_the_next_term_with_the_reason(settings: Settings) -> None:
    with psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection:
        connection.execute("ALTER TABLE outbox ALTER kafka_value TYPE JSONB USING '1'")
        with pytest.raises(SchemaMissing, match="the column kafka_value of 'outbox' is a jsonb"):
            HarvesterRegistration(settings, connection).check_outbox()
