"""Consumers' positions in Postgres, which alone decide what has been consumed."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any, Literal

import psycopg

from outbox_plugin.consuming.topic_state import topic_state
from outbox_plugin.core.topic_ranges import Position, TopicRange, remaining
from outbox_plugin.errors import HandlerMisuse, OutboxError, RangeRefused
from outbox_plugin.schema.connection import connect, errors_as_refusals
from outbox_plugin.schema.statements import statement
from outbox_plugin.settings import Settings

Where = Literal["beginning", "end", "here"]
_Connection = psycopg.Connection[tuple[Any, ...]]


class RangeMoved(OutboxError):
    """Another run consumed a part of the range meanwhile; nothing was written: run it again."""


def read_position(settings: Settings, consumer: str, topic: str, backfill: str = "") -> Position | None:
    """The consumer's position in the topic; None if it has consumed nothing yet.

    Args:
        settings: name Postgres and the outbox.
        consumer: the consumer's name.
        topic: the topic.
        backfill: the id of a backfill, which has a position of its own; by default, the ordinary position.

    Raises:
        ServerRefused, SchemaMissing: Postgres refuses us, or the table is missing.
    """
    with errors_as_refusals(settings), closing(connect(settings, purpose="outbox consumer")) as connection:
        return _find(connection, settings.table, "read", _key(consumer, topic, backfill))


def lock_and_advance(connection: _Connection, table: str, wanted: TopicRange, lost: int = 0) -> bool:
    """Lock the position and move it to the end of a range, for callers that run no handler in between.

    Args:
        connection: in a transaction, which the caller commits.
        table: the outbox.
        wanted: the range to consume.
        lost: how many offsets of the range Kafka had deleted.

    Returns:
        False if all of it was consumed before: the effects must not be written again.

    Raises:
        RangeMoved: a part of it was consumed meanwhile.
        RangeRefused, TopicReplaced: it cannot be consumed from the present position.
    """
    if not lock(connection, table, wanted):
        return False
    advance(connection, table, wanted, lost)
    return True


def lock(connection: _Connection, table: str, wanted: TopicRange) -> bool:
    """Lock the position, in the transaction of the effects of `wanted`.

    Until the transaction ends, every other lock of the same consumer and topic waits. If this machine loses its power,
    the server ends the transaction within about 15 seconds.

    Args:
        connection: in a transaction that writes the effects of all of `wanted`, and of nothing else of the topic.
        table: the outbox, beside which positions are kept.
        wanted: the range to consume.

    Returns:
        False if all of it was consumed before: the effects must not be written again.

    Raises:
        RangeMoved: a part of it was consumed meanwhile.
        RangeRefused, TopicReplaced: it cannot be consumed from the present position.
    """
    key = _key(wanted.consumer, wanted.topic, wanted.backfill)
    connection.execute(statement("probe", "watch_client", table))
    connection.execute(statement("position", "begin", table), {**key, "topic_id": wanted.topic_id})
    rest = remaining(wanted, _find(connection, table, "lock", key))
    if not rest.offsets:
        return False
    if rest != remaining(wanted, None):
        raise RangeMoved(f"{wanted.name}: a part of the range {wanted.text()} was consumed meanwhile: run it again")
    return True


def advance(connection: _Connection, table: str, wanted: TopicRange, lost: int = 0) -> None:
    """Move the position, which this transaction has locked, to the end of `wanted`.

    Args:
        connection: in the transaction that has locked the position and written the effects.
        table: the outbox, beside which positions are kept.
        wanted: the range that is consumed.
        lost: how many of its offsets Kafka had deleted.

    Raises:
        HandlerMisuse: a handler has removed the position meanwhile.
    """
    key = _key(wanted.consumer, wanted.topic, wanted.backfill)
    moved = psycopg.Cursor(connection).execute(
        statement("position", "advance", table), {**key, "next_offsets": _text(wanted.end), "lost": lost}
    )
    if moved.rowcount != 1:
        raise HandlerMisuse(
            f"the position of {wanted.name} was locked, and is not there any more: the handler must not write to "
            "outbox_consumer_position"
        )


def set_position(settings: Settings, consumer: str, topic: str, where: Where) -> str:
    """Set an operator's choice of a consumer's position. Returns a sentence that describes the change.

    Args:
        settings: the outbox, and the Kafka of the topic.
        consumer: its name.
        topic: the topic that it consumes.
        where: `beginning` or `end` of the topic as it is now, even if it was recreated; `here` leaves the position
            as it is, and only acknowledges the loss of offsets.

    Raises:
        LogUnavailable, ServerRefused, SchemaMissing: a server is away, or refuses us.
        RangeRefused: `where` is another text.
    """
    key = _key(consumer, topic, "")
    if where == "here":
        _execute(settings, "acknowledge", key)
        return f"{consumer} goes on in {topic} where it was; the loss of offsets is acknowledged"
    if where not in ("beginning", "end"):
        raise RangeRefused(f"where: expected beginning, end or here (given: {where!r})")
    state = topic_state(settings, topic)
    offsets = state.first if where == "beginning" else state.end
    _execute(settings, "set", {**key, "topic_id": state.topic_id, "next_offsets": _text(offsets)})
    return f"{consumer} goes on at the {where} of {topic}"


def _execute(settings: Settings, name: str, values: dict[str, Any]) -> None:
    with errors_as_refusals(settings), closing(connect(settings, purpose="outbox consumer")) as connection:
        connection.execute(statement("position", name, settings.table), values)


def _find(connection: _Connection, table: str, name: str, key: dict[str, Any]) -> Position | None:
    row = connection.execute(statement("position", name, table), key).fetchone()
    if row is None:
        return None
    topic_id, offsets, lost = row
    return Position(topic_id, {int(partition): offset for partition, offset in offsets.items()}, lost)


def _key(consumer: str, topic: str, backfill: str) -> dict[str, Any]:
    return {"consumer": consumer, "topic": topic, "backfill": backfill}


def _text(offsets: Any) -> str:
    return json.dumps({str(partition): offset for partition, offset in offsets.items()})
