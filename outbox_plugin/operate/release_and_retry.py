"""Commands about rows that Kafka refuses: list, release, retry and discard them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import psycopg

from outbox_plugin.adapters.untranslatable_rows import UNTRANSLATABLE
from outbox_plugin.core.bad_rows import ParkedKey
from outbox_plugin.errors import UserError
from outbox_plugin.operate.operator_transaction import OperatorTransaction, notifying_transaction, operator_transaction
from outbox_plugin.printable import one_line
from outbox_plugin.settings import Settings

# The outbox's columns cannot hold the event: it has a null, bytes that are not text, or a text that is too long.
_DOES_NOT_FIT = (psycopg.DataError, psycopg.IntegrityError)


class DeadLetterAltered(UserError):
    """A dead letter cannot be emitted unchanged."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A row that Kafka refused, or an event that a Spark job dead-lettered. The latter may lack a topic or a key."""

    id: int
    topic: str | None
    key: str | None
    reason: str
    dead_lettered_at: datetime


def parked_keys(settings: Settings) -> list[ParkedKey]:
    """The parked ordering keys.

    Raises:
        SchemaMissing: the outbox's tables are missing.
        ServerRefused: Postgres cannot be reached, or refuses.
        StoreUnavailable: Postgres went away meanwhile.
    """
    with operator_transaction(settings) as transaction:
        return [ParkedKey(*row) for row in transaction.run("control", "parked")]


def release(settings: Settings, *, topic: str | None = None, key: str | None = None) -> list[ParkedKey]:
    """Release parked keys, so that their rows are published in order. If a row is still bad, its key is parked again.

    Args:
        settings: name the outbox.
        topic: only keys of this topic.
        key: only this key.

    Raises:
        SchemaMissing: the outbox's tables are missing.
        ServerRefused: Postgres cannot be reached, or refuses.
        StoreUnavailable: Postgres went away meanwhile. If that was at the commit, nobody knows whether it was done.
    """
    with notifying_transaction(settings) as transaction:
        return [ParkedKey(*row) for row in transaction.run("control", "release", topic=topic, key=key)]


def dead_letters(settings: Settings) -> list[DeadLetter]:
    """The dead letters, the earliest first.

    Where a topic or a key cannot be written in UTF-8, hexadecimal numbers stand for its bytes that are not UTF-8.

    Raises:
        SchemaMissing: the outbox's tables are missing.
        ServerRefused: Postgres cannot be reached, or refuses.
        StoreUnavailable: Postgres went away meanwhile.
    """
    with operator_transaction(settings) as transaction:
        try:
            with transaction.savepoint():
                return [DeadLetter(*row) for row in transaction.run("control", "dead_letters")]
        except UNTRANSLATABLE:
            found = transaction.run("control", "dead_letters_in_bytes").fetchall()
            return [DeadLetter(id_, _shown(topic), _shown(key), *more) for id_, topic, key, *more in found]


def _shown(text: bytes | None) -> str | None:
    return None if text is None else text.decode(errors="backslashreplace")


def retry_dead_letters(settings: Settings, ids: Sequence[int] | None = None) -> int:
    """Move dead letters back to the outbox, behind all other rows. Returns how many.

    Args:
        settings: name the outbox.
        ids: which dead letters. None means all that can be emitted unchanged; the others stay dead letters.

    Raises:
        DeadLetterAltered: one of `ids` cannot be emitted unchanged; nothing was moved.
        UserError: the outbox is a view that takes no rows.
        SchemaMissing: the outbox's tables are missing.
        ServerRefused: Postgres cannot be reached, or refuses.
        StoreUnavailable: Postgres went away meanwhile. If that was at the commit, nobody knows whether it was done.
    """
    return len(retried(settings, ids))


def retried(settings: Settings, ids: Sequence[int] | None) -> list[int]:
    """As `retry_dead_letters`, but returns the ids of the dead letters that were moved."""
    with notifying_transaction(settings) as transaction, transaction.emission():
        chosen = transaction.run("control", "dead_letters_to_retry", ids=None if ids is None else list(ids)).fetchall()
        left = {id_: reason for id_, altered, reason in chosen if altered}
        fit = [id_ for id_, altered, _ in chosen if not altered]
        try:
            with transaction.savepoint():
                _retry(transaction, fit)
        except _DOES_NOT_FIT:
            for id_ in fit:  # One by one, to find out which of them do not fit.
                try:
                    with transaction.savepoint():
                        _retry(transaction, [id_])
                except _DOES_NOT_FIT as error:
                    left[id_] = one_line(error)
        if left and ids is not None:
            first = min(left)
            more = f", nor can {len(left) - 1} others" if len(left) > 1 else ""
            raise DeadLetterAltered(
                f"dead letter {first} cannot be emitted as it was ({left[first]}){more}: nothing is retried; "
                "write the event again from its source, then discard the dead letter"
            )
        return [id_ for id_ in fit if id_ not in left]


def _retry(transaction: OperatorTransaction, ids: Sequence[int]) -> None:
    transaction.run("control", "retry_dead_letters", ids=ids)


def discard_dead_letters(settings: Settings, ids: Sequence[int] | None = None) -> int:
    """Delete dead letters; all if `ids` is None. Returns how many.

    Raises:
        SchemaMissing: the outbox's tables are missing.
        ServerRefused: Postgres cannot be reached, or refuses.
        StoreUnavailable: Postgres went away meanwhile. If that was at the commit, nobody knows whether it was done.
    """
    return len(discarded(settings, ids))


def discarded(settings: Settings, ids: Sequence[int] | None) -> list[int]:
    """As `discard_dead_letters`, but returns the ids of the dead letters that were deleted."""
    with notifying_transaction(settings) as transaction:
        found = transaction.run("control", "discard_dead_letters", ids=None if ids is None else list(ids))
        return [id_ for (id_,) in found]
