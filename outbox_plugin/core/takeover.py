"""What a new leader may conclude from the shard's last committed progress record."""

from __future__ import annotations

from outbox_plugin.core.progress import Identity, ProgressRecord, Publication
from outbox_plugin.errors import ForeignOutbox


def left_behind(record: ProgressRecord | None, identity: Identity, *, adopt: bool = False) -> tuple[Publication, ...]:
    """What the last leader published and may not have deleted: the new leader deletes it before it reads anything.

    Nothing, if the record speaks of an earlier incarnation in the same place (its table was dropped, so its rows are
    gone), or if the caller adopts the group of an outbox that is no more.

    Raises:
        ForeignOutbox: the record speaks of another outbox, which shares our group by mistake.
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
