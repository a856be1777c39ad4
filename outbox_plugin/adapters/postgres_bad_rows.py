"""Parks or dead-letters the bad rows of a shard in Postgres, while no other leader leads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outbox_plugin.adapters.leadership import Leadership
from outbox_plugin.adapters.row_reader import RowReader
from outbox_plugin.adapters.sql_refusals import concerns_all_rows, is_refusal, storable
from outbox_plugin.adapters.untranslatable_rows import details_or_misfits
from outbox_plugin.core.bad_rows import BadRow
from outbox_plugin.core.row import Misfit, OutboxRow
from outbox_plugin.errors import Refusal, StoreUnavailable
from outbox_plugin.printable import logger_of
from outbox_plugin.schema.connection import errors_as_unavailable

logger = logger_of("outbox_plugin.harvester")


def park(leadership: Leadership, bad: Sequence[BadRow]) -> Sequence[BadRow]:
    """Park the ordering keys of the bad rows; durable when it returns.

    Returns the rows that the database refuses to park, each with its reason.

    Raises:
        Fenced: another leader leads the shard.
        StoreUnavailable: Postgres is away.
    """

    def handle(rows: Sequence[BadRow]) -> Sequence[BadRow]:
        with leadership.transaction() as run:
            run("control", "park", **_values(rows))
        return []

    return _one_by_one_if_refused(handle, bad, "to park it")


def dead_letter(leadership: Leadership, bad: Sequence[BadRow]) -> Sequence[BadRow]:
    """Move the bad rows to the dead letters; durable when it returns.

    Returns the rows that the database refuses to move, each with its reason; they are still in the outbox.

    Raises:
        Fenced: another leader leads the shard.
        StoreUnavailable: Postgres is away.
    """

    def move(rows: Sequence[BadRow]) -> Sequence[BadRow]:
        with leadership.transaction() as run:
            if run("control", "dead_letter", **_values(rows)).rowcount == len(rows):
                return []
            ids = [row.row.id for row in rows]
            kept = {id_ for (id_,) in run("control", "there", ids=ids).fetchall()}
        reason = "the table keeps it: a trigger or a policy prevents its deletion"
        return [row.because(reason) for row in rows if row.row.id in kept]

    return _one_by_one_if_refused(move, bad, "to make it a dead letter")


def dead_letter_untranslatable(
    leadership: Leadership, reader: RowReader, conditions: tuple[str, ...], values: dict[str, object]
) -> None:
    """Dead-letter the earliest rows of whose topic or key Postgres cannot send the text; durable when it returns.

    No ordering key can wait for such a row, because nobody could name it. All rows with that key are bad as well, so
    none of them is published before an earlier one.

    Args:
        leadership: of the term.
        reader: of the term; it has failed to read rows.
        conditions: those that `RowReader.conditions` has returned for that read, and perhaps others.
        values: those of the read.

    Raises:
        StoreUnavailable: there is no such row, or it cannot be moved.
        Fenced: another leader leads the shard.
    """
    with errors_as_unavailable():
        ids = reader.ids("earliest_ids", conditions, values)
        found = details_or_misfits(reader, "topics_and_keys", ids)
    bad = [
        BadRow(OutboxRow(id_, 0, "", "", None, [], [], 0), Refusal(misfit.reason))
        for id_, (misfit, *_) in found.items()
        if isinstance(misfit, Misfit)
    ]
    stuck = dead_letter(leadership, bad) if bad else []
    if stuck or not bad:
        reason = f": row {stuck[0].row.id}: {stuck[0].refusal.reason}" if stuck else ""
        raise StoreUnavailable(f"Postgres: rows have texts that cannot be written in UTF-8{reason}")
    for row in bad:
        logger.warning("row %d is a dead letter now: topic or key: %s", row.row.id, row.refusal.reason)


def _values(bad: Sequence[BadRow]) -> dict[str, object]:
    return {
        "ids": [row.row.id for row in bad],
        "whole_topics": [row.ordering_key.whole_topic for row in bad],
        "reasons": [storable(row.refusal.reason) for row in bad],
    }


def _one_by_one_if_refused(
    handle: Callable[[Sequence[BadRow]], Sequence[BadRow]], bad: Sequence[BadRow], purpose: str
) -> Sequence[BadRow]:
    """Call `handle` for all rows. If the database refuses them, call it for each half, and so on.

    So the database's refusal of one row has no effect on the other rows.

    Args:
        handle: returns the rows that it could not handle, each with its reason.
        bad: the rows.
        purpose: what it does, for the reason of a row that the database refuses.

    Raises:
        StoreUnavailable: an error that is no refusal of a row.
    """
    try:
        return handle(bad)
    except StoreUnavailable as error:
        if not is_refusal(error.__cause__):
            raise
        if len(bad) > 1 and not concerns_all_rows(error.__cause__):
            middle = len(bad) // 2
            halves = bad[:middle], bad[middle:]
            return [row for half in halves for row in _one_by_one_if_refused(handle, half, purpose)]
        return [row.because(f"the database refuses {purpose}: {error}") for row in bad]
