"""Dead letters of an inbox whose keys are long: they are kept through an upgrade, and there can be more of them."""

from __future__ import annotations

import secrets

import psycopg
import pytest
from psycopg import sql

from outbox_plugin import Settings
from outbox_plugin.schema.migrate import migrate

pytestmark = pytest.mark.integration

TOPIC = "t" * 249
EARLIER = """DROP INDEX outbox_inbox_dead_letter_record;
DELETE FROM outbox_migration WHERE name >= '0054';
ALTER TABLE outbox_inbox_dead_letter ADD UNIQUE (consumer_group, idempotency_key)"""
# As 0054 made it at first.
WIDE = """DROP INDEX outbox_inbox_dead_letter_record;
DELETE FROM outbox_migration WHERE name >= '0055';
CREATE UNIQUE INDEX outbox_inbox_dead_letter_record ON outbox_inbox_dead_letter
    (consumer_group, idempotency_key, kafka_topic, kafka_partition, kafka_offset)"""
BURY = sql.SQL("""INSERT INTO outbox_inbox_dead_letter (consumer_group, idempotency_key, kafka_topic, kafka_partition,
    kafka_offset, kafka_timestamp, kafka_header_keys, kafka_header_values, error, attempts)
    VALUES ('billing', %s, %s, 0, %s, 0, '{}', '{}', 'error', 1) ON CONFLICT DO NOTHING""")


def long_key() -> str:
    """Of a length that an index takes, but not beside a long topic; it cannot be compressed."""
    return secrets.token_urlsafe(2_000)[:2_600]


@pytest.mark.parametrize("before", [EARLIER, WIDE], ids=["0053", "0054"])
def test_an_upgrade_takes_long_keys_and_later_ones_have_room(settings: Settings, before: str) -> None:
    key = long_key()
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute(before.encode())
        connection.execute(BURY, (key if before == EARLIER else "short", TOPIC, 0))
    migrate(settings)
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute(BURY, (key, TOPIC, 1))
        other = connection.execute(BURY, (long_key() * 4, TOPIC, 1)).rowcount  # A topic that was recreated.
        again = connection.execute(BURY, (key, TOPIC, 1)).rowcount
        assert (other, again) == (1, 0)
        [(count,)] = connection.execute("SELECT count(*) FROM outbox_inbox_dead_letter").fetchall()
    assert count == 3
