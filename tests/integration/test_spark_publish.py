"""What the sink's commit does in Postgres, without Spark: it stages nothing itself."""

from __future__ import annotations

import psycopg
import pytest
from pyspark.sql.types import StringType, StructField, StructType

from outbox_plugin import Settings
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.spark.sink import CheckpointTooOld, OutboxDataSource, OutboxStreamWriter, _Message
from outbox_plugin.spark.staging import Attempt
from tests.consuming import make_effect_table, query

pytestmark = pytest.mark.integration

QUERY_ID = "d1b7e2f0-0000-4000-8000-000000000000"
EVENT = StructType([StructField("key", StringType()), StructField("value", StringType())])
NOTE = """
CREATE FUNCTION note_keepalives() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO effect (event, key, value)
    VALUES ('', current_setting('tcp_keepalives_idle'), current_setting('tcp_user_timeout'));
    RETURN NULL;
END $$
"""


@pytest.fixture
def settings(dsn: str) -> Settings:
    settings = Settings(dsn=dsn, bootstrap_servers="127.0.0.1:1")
    migrate(settings)
    return settings


def commit(settings: Settings, batch_id: int) -> None:
    """Commit a batch of which one task has staged nothing."""
    dsn = settings.dsn.get_secret_value()
    writer = OutboxDataSource({"dsn": dsn, "topic": "t"}).streamWriter(EVENT, overwrite=False)
    assert isinstance(writer, OutboxStreamWriter)
    table = writer._sink.new_table()
    with psycopg.connect(dsn, autocommit=True) as connection:
        table.create_leased(connection, QUERY_ID)
    attempt = Attempt("00000000-0000-0000-0000-000000000001", 0, 0, 0)
    writer.commit([_Message(attempt, table, QUERY_ID)], batch_id)


def last_batch(settings: Settings) -> list[tuple[object, ...]]:
    return query(settings, "SELECT batch_id FROM outbox_stream")


def test_a_checkpoint_that_is_older_than_what_was_emitted_is_refused(settings: Settings) -> None:
    commit(settings, 7)
    commit(settings, 7)  # As after a crash between the commit here and Spark's own.
    with pytest.raises(CheckpointTooOld, match=r"older than what was emitted: batch 3 .* after its batch 7"):
        commit(settings, 3)
    assert last_batch(settings) == [(7,)]
    commit(settings, 8)
    assert last_batch(settings) == [(8,)]


def test_the_server_notices_the_loss_of_a_driver_within_seconds(settings: Settings) -> None:
    make_effect_table(settings)
    query(settings, NOTE)
    query(settings, "CREATE TRIGGER note AFTER INSERT ON outbox_stream EXECUTE FUNCTION note_keepalives()")
    commit(settings, 0)
    assert query(settings, "SELECT key, value FROM effect") == [("5", "10000")]
