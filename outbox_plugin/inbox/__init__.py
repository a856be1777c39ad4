"""The inbox: consume topics, and let each event have its effect once.

The handler runs inside a database transaction that also records the event's idempotency key. So the transaction is the
commit point: an event that Kafka delivers again, after a crash or to another process, finds its key and is left out.
Offsets are committed afterwards, and positions written, as a hint where to go on: for as long as keys are remembered,
nothing rests on them but work saved.

Records of one key go one after the other, through a lane; lanes run side by side, up to a limit. A record that fails
holds up its own lane, until it succeeds or is laid among the dead letters. In the rush, what many lanes hold is handled
in one transaction, whose claims are one statement; if any handler fails, it is all undone and done again one by one.

Authority: the primary key of `outbox_inbox`. Two processes that hold one record, as they may around a rebalance, meet
there: the second waits for the first one's transaction, and leaves out what that has committed.

    received    what a handler gets                       pure
    lanes       which records may run now; offsets        pure
    retry       again, later, or a dead letter            pure
    seat        a connection and a handler, sync or async; proves that a transaction is the one that was begun
    handling    records -> transactions -> outcomes       on seats
    consumer    `Inbox`: polls, dispatches, commits offsets, takes part in rebalances
    positions   where a group goes on, when Kafka has forgotten it
    dead_letters, cleaning                                the tables' upkeep
"""

from __future__ import annotations

from outbox_plugin.inbox.consumer import Inbox
from outbox_plugin.inbox.received import Received
from outbox_plugin.inbox.retry import Retry

__all__ = ["Inbox", "Received", "Retry"]
