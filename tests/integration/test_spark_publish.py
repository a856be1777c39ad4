"""What the sink's commit does in Postgres, without Spark: the tests stage by themselves."""

from __future__ import annotations

import re
import uuid

import psycopg
import pytest
from psycopg import sql
from pyspark.sql.types import StringType, StructField, StructType

from outbox_plugin import Settings
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.spark.sink import CheckpointTooOld, OutboxDataSource, OutboxStreamWriter, _Message
from outbox_plugin.spark.staging import PARTITION_BITS, Attempt
from tests.inbox_support import make_effect_table, query

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


def commit(settings: Settings, batch_id: int, *events: tuple[str, str | None], tasks: int = 1) -> None:
    """Commit a batch whose tasks have staged these events, by turns."""
    dsn = settings.dsn.get_secret_value()
    writer = OutboxDataSource({"dsn": dsn, "topic": "t"}).streamWriter(EVENT, overwrite=False)
    assert isinstance(writer, OutboxStreamWriter)
    table = writer._sink.new_table()
    attempts = [Attempt(str(uuid.uuid4()), task, len(events[task::tasks])) for task in range(tasks)]
    with psycopg.connect(dsn, autocommit=True) as connection:
        table.create_leased(connection, QUERY_ID)
        insert = sql.SQL(
            "INSERT INTO {} (outbox_attempt, outbox_ordinal, kafka_topic, kafka_key, kafka_value, kafka_header_keys,"
            " kafka_header_values) VALUES (%s, %s, 't', %s, %s, ARRAY['at'], ARRAY[now()::text])"
        ).format(table.identifier)
        for attempt in attempts:
            for place, event in enumerate(events[attempt.partition :: tasks]):
                connection.execute(insert, (attempt.id, (attempt.partition << PARTITION_BITS) + place, *event))
    writer.commit([_Message(attempt, table, QUERY_ID) for attempt in attempts], batch_id)


def last_batch(settings: Settings) -> list[tuple[object, ...]]:
    return query(settings, "SELECT batch_id FROM outbox_stream")


RESTORE = r"Restore the checkpoint as it was at batch 7 or later\. Or begin with a new checkpoint: .*"
OLDER = (
    rf"^the checkpoint of the stream {QUERY_ID} was set back: expected batch 7, which it has emitted last, or a later "
    rf"one \(given: batch 3\); nothing was written\. {RESTORE}\.$"
)
OTHERS = (
    rf"^batch 7 of the stream {QUERY_ID} was emitted before: expected the same events again "
    rf"\(given: others\); nothing was written\. If the checkpoint was set back: {RESTORE}\. "
    r"If the query makes other keys or values each time it runs, .*, by (UPDATE .*), and start the stream again$"
)


def test_a_checkpoint_that_is_older_than_what_was_emitted_is_refused(settings: Settings) -> None:
    commit(settings, 7)
    commit(settings, 7)  # As after a crash between the commit here and Spark's own.
    with pytest.raises(CheckpointTooOld, match=OLDER):
        commit(settings, 3)
    assert last_batch(settings) == [(7,)]
    commit(settings, 8)
    assert last_batch(settings) == [(8,)]


FIRST, SECOND = ("k", "1"), ("k", "2")


def emitted(settings: Settings) -> list[object]:
    return [value for (value,) in query(settings, "SELECT kafka_value FROM outbox ORDER BY id")]


@pytest.mark.parametrize(
    "others",
    [
        pytest.param([FIRST], id="fewer"),
        pytest.param([FIRST, SECOND, SECOND], id="more"),
        pytest.param([FIRST, FIRST], id="other values"),
        pytest.param([FIRST, ("k", None)], id="a tombstone"),
        pytest.param([FIRST, ("other", "2")], id="other keys"),
        pytest.param([], id="none"),
    ],
)
def test_a_checkpoint_that_is_older_by_one_batch_is_refused(
    settings: Settings, others: list[tuple[str, str | None]]
) -> None:
    """Spark gives the last batch's number to what it puts together anew."""
    commit(settings, 6, ("k", "0"))
    commit(settings, 7, FIRST, SECOND)
    with pytest.raises(CheckpointTooOld, match=OTHERS):
        commit(settings, 7, *others)
    assert emitted(settings) == ["0", "1", "2"]
    commit(settings, 8, *others)
    assert emitted(settings) == ["0", "1", "2", *(value for _, value in others)]


def test_a_query_that_is_never_the_same_goes_on_as_the_refusal_says(settings: Settings) -> None:
    commit(settings, 7, FIRST)
    with pytest.raises(CheckpointTooOld) as refused:
        commit(settings, 7, SECOND)
    said = re.match(OTHERS, str(refused.value))
    assert said is not None
    query(settings, said[1])
    commit(settings, 7, SECOND)
    commit(settings, 8, SECOND)
    assert emitted(settings) == ["1", "2"]


def test_the_last_batch_is_known_again_however_its_tasks_share_it(settings: Settings) -> None:
    commit(settings, 7, FIRST, SECOND)
    commit(settings, 7, SECOND, FIRST, tasks=2)
    assert emitted(settings) == ["1", "2"]


@pytest.mark.parametrize("said", ["NULL", "'6:1:1'"])
def test_a_batch_that_a_version_before_committed_is_taken_for_a_repeat(settings: Settings, said: str) -> None:
    """That one wrote no digest, or left that of a batch before."""
    commit(settings, 7, FIRST)
    query(settings, f"UPDATE outbox_stream SET digest = {said}")
    commit(settings, 7, SECOND)
    assert emitted(settings) == ["1"]


def test_the_server_notices_the_loss_of_a_driver_within_seconds(settings: Settings) -> None:
    make_effect_table(settings)
    query(settings, NOTE)
    query(settings, "CREATE TRIGGER note AFTER INSERT ON outbox_stream EXECUTE FUNCTION note_keepalives()")
    commit(settings, 0)
    assert query(settings, "SELECT key, value FROM effect") == [("5", "10000")]
