"""What an operator does about rows that Kafka refuses: lists, releases, retries and discards them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import psycopg

from outbox_plugin.core.ordering_keys import ParkedKey
from outbox_plugin.errors import UserError
from outbox_plugin.operate.operator_transaction import OperatorTransaction, notifying_transaction, operator_transaction
from outbox_plugin.schema.connection import one_line
from outbox_plugin.settings import Settings

# The outbox's columns cannot hold the event: a null, bytes that are no text, or a text that is too long.
_NOT_AS_IT_WAS = (psycopg.DataError, psycopg.IntegrityError)


class DeadLetterAltered(UserError):
    """A dead letter cannot be emitted as the event was."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A row that Kafka refused, and that the outbox went on without; or an event that Spark has set aside.

    Spark's may lack a topic or a key.
    """

    id: int
    topic: str | None
    key: str | None
    reason: str
    buried_at: datetime


def parked_lanes(settings: Settings) -> list[ParkedKey]:
    """The ordering keys that wait.

    Raises:
        SchemaMissing: our tables are not there.
        ServerRefused: Postgres cannot be reached, or refuses.
    """
    with operator_transaction(settings) as transaction:
        return [ParkedKey(*row) for row in transaction.run("control", "parked")]


def release(settings: Settings, *, topic: str | None = None, key: str | None = None) -> list[ParkedKey]:
    """Let parked keys go on, in their order: of a topic, of a key, or all. A row that is still bad parks again.

    Raises:
        SchemaMissing: our tables are not there.
        ServerRefused: Postgres cannot be reached, or refuses.
    """
    with notifying_transaction(settings) as transaction:
        return [ParkedKey(*row) for row in transaction.run("control", "release", topic=topic, key=key)]


def dead_letters(settings: Settings) -> list[DeadLetter]:
    """The dead letters, earliest first.

    Raises:
        SchemaMissing: our tables are not there.
        ServerRefused: Postgres cannot be reached, or refuses.
    """
    with operator_transaction(settings) as transaction:
        return [DeadLetter(*row) for row in transaction.run("control", "dead_letters")]


def retry_dead_letters(settings: Settings, ids: Sequence[int] | None = None) -> int:
    """Make dead letters rows of the outbox again, behind all others. Returns how many.

    Args:
        settings: the outbox.
        ids: which; None is all that can be emitted as they were, and the others stay dead letters.

    Raises:
        DeadLetterAltered: one of `ids` cannot be emitted as it was; no dead letter has become a row.
        SchemaMissing: our tables are not there.
        ServerRefused: Postgres cannot be reached, or refuses.
    """
    with notifying_transaction(settings) as transaction:
        chosen = transaction.run("control", "dead_letters_to_retry", ids=None if ids is None else list(ids)).fetchall()
        left = {id_: reason for id_, altered, reason in chosen if altered}
        fit = [id_ for id_, altered, _ in chosen if not altered]
        try:
            with transaction.savepoint():
                retried = _retry(transaction, fit)
        except _NOT_AS_IT_WAS:
            retried = 0
            for id_ in fit:  # One by one, to know which.
                try:
                    with transaction.savepoint():
                        retried += _retry(transaction, [id_])
                except _NOT_AS_IT_WAS as error:
                    left[id_] = one_line(error)
        if left and ids is not None:
            first = min(left)
            more = f", nor can {len(left) - 1} others" if len(left) > 1 else ""
            raise DeadLetterAltered(
                f"dead letter {first} cannot be emitted as it was ({left[first]}){more}: nothing is retried; "
                "write the event again from its source, then discard the dead letter"
            )
        return retried


def _retry(transaction: OperatorTransaction, ids: Sequence[int]) -> int:
    return transaction.run("control", "retry_dead_letters", ids=ids).rowcount


def discard_dead_letters(settings: Settings, ids: Sequence[int] | None = None) -> int:
    """Forget dead letters; all where `ids` is None. Returns how many.

    Raises:
        SchemaMissing: our tables are not there.
        ServerRefused: Postgres cannot be reached, or refuses.
    """
    with notifying_transaction(settings) as transaction:
        return transaction.run("control", "discard_dead_letters", ids=None if ids is None else list(ids)).rowcount
