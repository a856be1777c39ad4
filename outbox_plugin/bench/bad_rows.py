"""Rows that Kafka refuses: a chaos run writes them, repairs them as an operator would, and looks where they ended.

Where they must end:

    OUTBOX_BAD_ROWS    unequal headers, or too large    a topic that does not exist
    park               in the topic, once repaired      in that topic, once it is created
    dead-letter        in outbox_dead_letter            in outbox_dead_letter
"""

from __future__ import annotations

from confluent_kafka import KafkaError, KafkaException
from psycopg import sql

from outbox_plugin import operate
from outbox_plugin.bench.faults import Kind
from outbox_plugin.bench.judge import ReadRecord, RowId
from outbox_plugin.bench.reader import read_until
from outbox_plugin.bench.temporary_outbox import connect, create_topic, table_of
from outbox_plugin.bench.writer import HOT_KEYS, PADDING, Row
from outbox_plugin.settings import Settings

_TOO_LARGE = "x" * 2_000_000  # Kafka's default limit is 1 MB.
_MENDED_LENGTH = 200
_READ_SECONDS = 30.0


class BadRows:
    """The bad rows of one run."""

    def __init__(self, settings: Settings) -> None:
        """Make the helper. It writes no rows yet."""
        self._settings = settings
        self._number = 0
        self._missing_topics: set[str] = set()
        self.can_be_mended = settings.bad_rows == "park"

    def rows(self, kind: Kind) -> list[Row]:
        """The rows of a transaction: a bad one on a hot key, one on an ordinary key, and good ones around them."""
        self._number += 1
        topic = f"chaos-missing-{self._number}" if kind == "bad topic" else None
        if topic is not None:
            self._missing_topics.add(topic)
        return [
            row
            for key in (f"hot-{self._number % HOT_KEYS}", f"key-{self._number}")
            for row in (
                Row(key),
                Row(
                    key,
                    topic=topic,
                    padding=_TOO_LARGE if kind == "bad size" else PADDING,
                    header_keys=("one", "two") if kind == "bad headers" else (),
                    header_values=("one",) if kind == "bad headers" else (),
                    belongs_aside=not self.can_be_mended or kind == "bad topic",
                ),
                Row(key),
            )
        ]

    def mend(self) -> None:
        """Repair all parked rows: create the missing topics, correct the rows, release the keys.

        Raises:
            OutboxError, KafkaException, psycopg.Error: a server is away; try again later.
        """
        for topic in self._missing_topics:
            try:
                create_topic(self._settings, topic, 1)
            except KafkaException as error:
                if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise
        with connect(self._settings) as connection:
            connection.execute(
                sql.SQL(
                    "UPDATE {} SET kafka_value = left(kafka_value, %s), kafka_header_values = kafka_header_keys "
                    "WHERE length(kafka_value) >= %s "
                    "OR cardinality(kafka_header_keys) <> cardinality(kafka_header_values)"
                ).format(table_of(self._settings)),
                (_MENDED_LENGTH, len(_TOO_LARGE)),
            )
        operate.release(self._settings)

    def found_aside(self) -> list[RowId | None]:
        """The rows among the dead letters and in the topics that were missing, with duplicates."""
        with connect(self._settings) as connection:
            *schema, _ = self._settings.table.split(".")
            query = "SELECT kafka_key, left(convert_from(kafka_value, 'UTF8'), %s) FROM {}"
            dead_letters = connection.execute(
                sql.SQL(query).format(sql.Identifier(*schema, "outbox_dead_letter")), (_MENDED_LENGTH,)
            ).fetchall()
        found = [RowId.of(key, value) for key, value in dead_letters]
        if self.can_be_mended:
            for topic in self._missing_topics:
                records: list[ReadRecord] = read_until(
                    self._settings, topic, lambda seen: len(seen) >= 2, _READ_SECONDS
                )
                found += [RowId.of(record.key, record.value) for record in records]
        return found
