"""What a new leader concludes from the shard's last progress record, and from what the database remembers of terms.

For each slice, the database remembers the last term that wrote a progress record. It remembers the term from its first
record on, and forgets it when the leader knows that nothing is in flight: all published rows have been deleted, and the
outcome of every transaction is known.

If the database expects a record and none is there, the record was lost or hidden. The table may then still have rows
that Kafka has too, and they would be published again. If the database expects no record, a missing one is
normal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from outbox_plugin.core.progress import OutboxIdentity, ProgressRecord, Publication
from outbox_plugin.errors import ForeignOutbox, ProgressLost


@dataclass(frozen=True, slots=True)
class TermHistory:
    """What the database remembers of terms.

    `number` is that of the last term, of any shard. `recorded` has the terms whose rows may still be in flight, by the
    names of their slices. `unsigned` names the slices whose last leader may have been of a version that did not sign.
    """

    number: int = 0
    recorded: Mapping[str, int] = field(default_factory=dict)
    unsigned: frozenset[str] = frozenset()


def left_behind(
    record: ProgressRecord | None, identity: OutboxIdentity, *, adopt: bool = False
) -> tuple[Publication, ...]:
    """What the last leader published and may not have deleted: the new leader deletes it before it reads anything.

    Returns nothing if the record is of an earlier incarnation in the same place: its table was dropped, so its rows are
    gone.

    Args:
        record: the slice's last committed progress record; None if there is none.
        identity: the outbox's.
        adopt: whether to take over the group of an outbox that no longer exists. Then its record counts for nothing.

    Raises:
        ForeignOutbox: the record is of another outbox, which shares our group by mistake.
    """
    if record is None:
        return ()
    if record.identity.incarnation == identity.incarnation:
        return record.publications
    if record.identity.place == identity.place or adopt:
        return ()
    raise ForeignOutbox(
        f"this group relays another outbox: {record.identity.place}, not {identity.place}. Give this one an "
        "OUTBOX_GROUP of its own; or, if the other is gone for good, start once with `outbox harvest --adopt`"
    )


def require_recorded(
    record: ProgressRecord | None, slice_name: str, terms: TermHistory, *, adopt: bool = False
) -> None:
    """Check that a slice's last progress record is not older than the one that the database expects.

    Args:
        record: the slice's last progress record; None if there is none.
        slice_name: the slice.
        terms: what the database knows about the terms of all slices.
        adopt: expect nothing. Rows that were in flight may then be published again.

    Raises:
        ProgressLost: it is older, or there is none.
    """
    expected = terms.recorded.get(slice_name)
    if adopt or expected is None or (record is not None and record.term >= expected):
        return
    raise ProgressLost(
        f"Kafka: the progress topic lacks the last record of the shard {slice_name}, of term {expected}: somebody "
        "deleted it. Rows of the outbox that Kafka has already may be published again. If that is all right, start "
        "once with `outbox harvest --adopt`"
    )
