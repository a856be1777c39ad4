"""A simulated Postgres with one outbox, as a harvester sees it: transactions, snapshots, a sequence, locks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from typing import NamedTuple, TypeVar

from outbox_plugin.core.bad_rows import BadRow
from outbox_plugin.core.delivery_options import Delivery
from outbox_plugin.core.id_watermark import BEGINNING, IdRange, SequenceState
from outbox_plugin.core.key_summary import HASH_BITS, HASH_BYTES
from outbox_plugin.core.ordering_key import OrderingKey, OrderingKeys
from outbox_plugin.core.postgres_ports import Control, ReadRequest
from outbox_plugin.core.progress import OutboxIdentity, Publication
from outbox_plugin.core.recovery import TermHistory
from outbox_plugin.core.row import OutboxRow
from outbox_plugin.core.shards import Layout, Slice
from outbox_plugin.errors import Fenced, LayoutChanged, StoreUnavailable
from tests.simulation.network import Server
from tests.simulation.scheduler import Process, Scheduler

Answer = TypeVar("Answer")

PLACE = "outbox in database simulated"
STATEMENT_SECONDS = 2.0
WAIT_FOR_MARKS_SECONDS = 0.5
SLOW_MARK_SECONDS = 3.0  # Which waits for a row that somebody has locked, or whose leader receives nothing.
_LOCKS = ("reads", "purges", "recovers", "marks", "deletes", "resets", "parks", "dead_letters")
KEYS_PER_PART = 2
HIDDEN_ROW_SECONDS = 0.005  # What an invisible row costs a read: each stands for thousands.
_SPREAD = 0x9E3779B97F4A7C15  # Odd: a product with it has the number's bits in its upper half too.


@cache
def hash_of(key: str) -> int:
    """The hash by which a key's shard is found."""
    return zlib.crc32(key.encode())


@dataclass(eq=False, slots=True)
class Event:
    """An event that the application wrote, and what became of its row. Moments are numbered in their order."""

    name: str
    topic: str
    key: str
    began: int
    transaction: int
    place_in_transaction: int
    committed: int | None = None
    committed_at: float = 0.0  # Seconds.
    erased: bool = False  # By a truncation, or by restoring a backup without it.
    forgotten: bool = False  # Erased by a backup that lacks a later layout, whose leaders nobody fences.
    dead_lettered: bool = False  # It is, or was, a dead letter.
    restored: bool = False  # By a backup that still had it, or a standby that had not received its deletion.
    large: bool = False  # A read leaves its value out at first. So does a mark, of a whole record.
    given_again: bool = False  # Its id is a reused one, so reads may be above it already.


@dataclass(eq=False, slots=True)
class Row:
    """A version of a row."""

    id: int
    xid: int
    create_time: int
    event: Event
    leader_id: str | None = None


class Service(NamedTuple):
    """How an outbox is harvested."""

    delivery: Delivery
    group: str = "g0"


class Disconnected(Exception):
    """The application's connection is broken; its transaction is rolled back."""


@dataclass(eq=False)
class Transaction:
    """A transaction of the application. It holds the table's write lock from the first id that it draws."""

    database: Database
    number: int
    began: int
    create_time: int
    locks: bool = False
    notifies: bool = False
    xid: int | None = None
    over: bool = False
    ids: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def _check(self) -> None:
        if self.over:
            raise Disconnected

    def draw(self) -> int:
        """Lock the table and draw an id, which stays used after a rollback."""
        self._check()
        self.locks = True
        self.database.sequence += 1
        self.ids.append(self.database.sequence)
        self.database.used.add(self.database.sequence)
        return self.database.sequence

    def insert(self, id_: int, topic: str, key: str, *, large: bool = False) -> None:
        """Insert a row with an id that was drawn before."""
        self._check()
        database = self.database
        if self.xid is None:
            self.xid, database.next_xid = database.next_xid, database.next_xid + 1
        database.events.append(
            event := Event(f"e{len(database.events)}", topic, key, self.began, self.number, len(self.rows), large=large)
        )
        event.given_again = id_ <= database.last_before_set_back
        database.by_name[event.name] = event
        database.used.add(id_)
        self.rows.append(Row(id_, self.xid, self.create_time, event))
        self.notifies = self.notifies or database.armed

    def commit(self) -> None:
        """Commit: make the rows visible."""
        self._check()
        self._end()
        stamp = self.database.instant()
        for row in self.rows:
            row.event.committed, row.event.committed_at = stamp, self.database.scheduler.now
            self.database.rows[row.id] = row
        self.database.say("app", "commits", *(f"{row.id}={row.event.name}/{row.event.key}" for row in self.rows))
        self.database.flush()
        if self.notifies:
            self.database.notify()

    def roll_back(self) -> None:
        """Roll back."""
        if not self.over:
            self._end()
            self.database.used.difference_update(self.ids)
            self.database.say("app", "rolls back", *(row.id for row in self.rows))

    def _end(self) -> None:
        self.over = True
        self.database.ended += 1
        del self.database.open[self]


@dataclass(frozen=True)
class Backup:
    """The content of a backup."""

    incarnation: int
    rows: tuple[Row, ...]
    sequence: int
    next_xid: int
    parked: dict[OrderingKey, int]
    dead: tuple[Row, ...]
    layout: Layout
    leaders: dict[int, str]
    terms: TermHistory
    served: Service
    id_generations: dict[str, int]


class Database:
    """The server's state. Its methods take no time."""

    def __init__(self, scheduler: Scheduler, say: Callable[..., None], shards: int, served: Service) -> None:
        self.scheduler = scheduler
        self.served = served
        self.say = say
        self.rows: dict[int, Row] = {}
        self.used: set[int] = set()  # Ids that a row has or had, or may yet get.
        self.sequence = 0
        self.last_before_set_back = 0
        self.next_xid = 100
        self.incarnation = 1
        self._incarnations = 1  # How many incarnations there were so far.
        self.layout = Layout(1, shards)
        self.leaders: dict[int, str] = {}
        self.marking: set[Store] = set()  # Whose marks are under way.
        self.slow_marks = 0.0  # How many of the marks take long.
        self.id_generations: dict[str, int] = {}  # The generations of transactional ids, by the names of slices.
        self.terms = TermHistory()
        self.replaced_at: dict[str, float] = {}  # When each leader was replaced, in seconds, by leader id.
        self.paused = False
        self.parked: dict[OrderingKey, int] = {}
        self.dead: list[Row] = []
        self.open: dict[Transaction, None] = {}  # A dict, because the order of a set would differ from run to run.
        self.generation = 0  # Connections of an earlier generation are broken.
        self.closed_to_writers = False
        self.locked = False  # By a migration: readers and writers of the table wait.
        self.wall = 1_000_000_000  # How far the clock is ahead, in microseconds.
        self.notifies = 0.97  # The share of notifications that arrive.
        self.sleepers: list[WakeUpCall] = []
        self.events: list[Event] = []
        self.by_name: dict[str, Event] = {}
        self._instants = 0
        self._transactions = 0
        self.ended = 0  # How many transactions have ended.
        self._not_durable: list[Callable[[], None]] = []

    def instant(self) -> int:
        """The number of the next moment."""
        self._instants += 1
        return self._instants

    def begin(self) -> Transaction:
        """Begin a transaction of the application."""
        self._transactions += 1
        transaction = Transaction(self, self._transactions, self.instant(), self.clock())
        self.open[transaction] = None
        return transaction

    def clock(self) -> int:
        """The server's clock, in microseconds."""
        return self.wall + int(self.scheduler.now * 1e6)

    def flush(self) -> None:
        """Make everything up to now durable."""
        self.ended += 1
        self._not_durable.clear()

    def note_not_durable(self, undo: Callable[[], None]) -> None:
        """Note a change that is not durable yet, with how a crash undoes it."""
        self.ended += 1
        self._not_durable.append(undo)

    def restart(self, *, immediate: bool) -> None:
        """Break every connection. After an immediate stop, some changes that were not durable are lost."""
        for transaction in list(self.open):
            transaction.roll_back()
        if immediate and self._not_durable:
            kept = int(self.scheduler.random() * (len(self._not_durable) + 1))
            for undo in reversed(self._not_durable[kept:]):
                undo()
        self.flush()
        self.generation += 1
        self.sleepers.clear()

    @property
    def armed(self) -> bool:
        """Whether a harvester asks to be woken."""
        return bool(self.sleepers)

    def notify(self) -> None:
        """Wake the harvesters that asked for it."""
        for sleeper in self.sleepers:
            sleeper.ring()

    def truncate(self, *, restart_identity: bool) -> None:
        """TRUNCATE the table, once nobody writes."""
        for row in self.rows.values():
            row.event.erased = True
        self.rows.clear()
        if restart_identity:
            self.used.clear()
            self.sequence = self.last_before_set_back = 0
        self.next_xid += 1
        self.incarnation = self._new_incarnation()
        self.flush()

    def rewrite(self, share: float = 1.0) -> None:
        """Give rows another version: all of them, as a migration does, or a share of them, as an UPDATE."""
        for row in self.rows.values():
            if self.scheduler.random() < share:
                row.xid = self.next_xid
        self.next_xid += 1
        self.flush()

    def erase(self, share: float) -> None:
        """Delete rows, as somebody other than the harvester would."""
        for row in list(self.rows.values()):
            if self.scheduler.random() < share:
                row.event.erased = True
                del self.rows[row.id]
        self.flush()

    def set_sequence_back(self) -> None:
        """Set the sequence back to ids that no row has, once nobody writes."""
        self.last_before_set_back = max(self.last_before_set_back, self.sequence)
        self.sequence = max(self.rows, default=0)
        self.used = set(self.rows)

    def _new_incarnation(self) -> int:
        self._incarnations += 1
        return self._incarnations

    def back_up(self) -> Backup:
        """Make a backup."""
        return Backup(
            self.incarnation,
            tuple(map(copy, self.rows.values())),
            self.sequence,
            self.next_xid,
            dict(self.parked),
            tuple(self.dead),
            self.layout,
            dict(self.leaders),
            self.terms,
            self.served,
            dict(self.id_generations),
        )

    def restore(self, backup: Backup, *, new_incarnation: bool = False) -> None:
        """Restore the backup: in place, or in a recreated table whose rows are inserted now."""
        self._return_to(backup)
        for row in (*backup.rows, *backup.dead):
            row.event.restored, row.event.erased = True, False
        if new_incarnation:
            self.incarnation = self._new_incarnation()
            self.layout = replace(self.layout, unsettled=())
            for row in self.rows.values():
                row.xid = self.next_xid
            self.next_xid += 1
        else:
            self.next_xid, self.incarnation = backup.next_xid, backup.incarnation
            self.layout, self.leaders, self.served = backup.layout, dict(backup.leaders), backup.served
            self.id_generations = dict(backup.id_generations)
            self.terms = backup.terms

    def fail_over(self, standby: Backup | None) -> None:
        """Continue from the standby's state: everything that was durable, or an earlier state.

        A sequence jumps ahead, as its numbers are logged in advance.
        """
        if standby is None:
            self.restart(immediate=True)
            self.sequence += int(self.scheduler.random() * 33)
            return
        here = {row.event.name for row in self.rows.values()}
        self._return_to(standby)
        for row in (*standby.rows, *standby.dead):
            row.event.restored = row.event.restored or row.event.name not in here
            row.event.erased = False
        self.next_xid, self.incarnation = standby.next_xid, standby.incarnation
        self.layout, self.leaders, self.served = standby.layout, dict(standby.leaders), standby.served
        self.id_generations = dict(standby.id_generations)
        self.terms = standby.terms
        self.sequence = standby.sequence + int(self.scheduler.random() * 33)

    def _return_to(self, backup: Backup) -> None:
        """Replace the rows by those of the backup."""
        self.restart(immediate=False)
        kept = {row.event.name for row in (*backup.rows, *backup.dead)}
        forgets = backup.layout.number != self.layout.number
        for event in self.events:
            event.forgotten = event.forgotten or (forgets and event.name not in kept)
            event.erased = event.erased or event.name not in kept
        self.rows = {row.id: copy(row) for row in backup.rows}
        self.sequence, self.parked, self.dead = backup.sequence, dict(backup.parked), list(backup.dead)

    def change_layout(self, shards: int) -> None:
        """Change the number of shards. The layout's number is the time, so that it is never reused."""
        if self.layout.shards != shards:
            self.end_marks(self.marking)
        was = self.layout
        if was.shards != shards:
            self.leaders.clear()
            unsettled = [each for each in (*was.unsettled, was.shards) if each != shards]
            self.layout = Layout(max(was.number + 1, self.clock()), shards, tuple(dict.fromkeys(unsettled)))

    def end_marks(self, marking: Iterable[Store]) -> None:
        """Wait a moment for the marks that are under way, and end the sessions of those that take longer."""
        deadline = self.scheduler.now + WAIT_FOR_MARKS_SECONDS
        while (late := [store for store in marking if store in self.marking]) and self.scheduler.now < deadline:
            self.scheduler.sleep(0.05)
        self.marking.difference_update(late)

    def adopt(self, service: Service) -> None:
        """Record how the outbox is harvested now. Leaders that harvest it in another way read nothing more."""
        if service.group != self.served.group:
            self.terms = replace(self.terms, recorded={})
        self.served = service
        self.layout = replace(self.layout, number=max(self.layout.number + 1, self.clock()))
        self.flush()

    def delete(self, rows: Sequence[Row]) -> int:
        """Delete rows."""
        for row in rows:
            del self.rows[row.id]
        return len(rows)


def is_in(id_: int, ids: IdRange, open_transactions: Iterable[Transaction]) -> bool:
    """Whether a read of the span may return the row."""
    above, writers = ids.above, ids.open_writers
    if writers is not None and {each.number for each in open_transactions}.issuperset(writers.transaction_ids):
        above = writers.up_to
    return id_ > above and (ids.up_to is None or id_ <= ids.up_to)


def age(xid: int, next_xid: int) -> int:
    """How many transactions ago it was, as Postgres says it of an id of 32 bits: negative after 2^31 of them."""
    return (next_xid - xid + 2**31) % 2**32 - 2**31


class WakeUpCall:
    """`WakeUp` in the database."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = store.process.lock()
        self._changed = store.process.condition(self._lock)
        self._rung = False
        self._interrupted = False

    def arm(self) -> bool:
        database = self._store.database

        def ask() -> bool:
            if self not in database.sleepers:
                database.sleepers.append(self)
            return not any(transaction.locks and not transaction.notifies for transaction in database.open)

        return self._store.call("asks to be woken", ask)

    def wait(self, seconds: float) -> bool:
        with self._lock:
            self._changed.wait_for(lambda: self._rung or self._interrupted, seconds)
            rung = self._rung or self._interrupted
            self._rung = False
        return rung

    def ring(self) -> None:
        """The notification, which may be lost, arrives a little later."""
        scheduler = self._store.process.scheduler
        if self._store.reaches() and scheduler.random() < self._store.database.notifies:
            scheduler.at(scheduler.now + scheduler.random() * 0.01, self._arrive)

    def _arrive(self) -> None:
        self._rung = True
        self._changed.notify_all()

    def interrupt(self) -> None:
        with self._lock:
            self._interrupted = True
            self._changed.notify_all()

    def disarm(self) -> None:
        self.close()

    def close(self) -> None:
        if self in self._store.database.sleepers and self._store.process.alive:
            self._store.database.sleepers.remove(self)


class Store:
    """`WindowStore` and `MarkedStore` on a `Database`, for one term of a slice."""

    def __init__(self, database: Database, server: Server, process: Process, slice_: Slice, layout: Layout) -> None:
        """Connect."""
        self.database = database
        self.process = process
        self._server = server
        self._slice = slice_
        self._generation = database.generation
        self._leader_id: str | None = None
        found = self.call("connects", lambda: (database.incarnation, database.layout))
        self._incarnation, self._layout = found
        if self._layout.number != layout.number:
            raise LayoutChanged("another number of shards")

    def reaches(self) -> bool:
        """Whether the connections still work."""
        return self._generation == self.database.generation and self._server.reaches(self.process)

    def call(self, doing: str, effect: Callable[[], Answer]) -> Answer:
        """Send the server a request."""

        self._wait_for_locks(doing)

        def checked() -> Answer:
            if self._generation != self.database.generation:
                raise StoreUnavailable("Postgres: the connection was lost")
            return effect()

        return self._server.call(self.process, doing, checked)

    def _wait_for_locks(self, doing: str) -> None:
        """Wait as long as the table is locked, until the statement times out."""
        scheduler = self.process.scheduler
        deadline = scheduler.now + STATEMENT_SECONDS
        while self.database.locked and doing.split(" ", 1)[0] in _LOCKS:
            if scheduler.now > deadline:
                raise StoreUnavailable(f"Postgres: canceling statement due to statement timeout: {doing}")
            scheduler.sleep(0.05)

    @property
    def identity(self) -> OutboxIdentity:
        return OutboxIdentity(str(self._incarnation), PLACE)

    @property
    def layout(self) -> Layout:
        return self._layout

    def _is_same_table(self) -> bool:
        return self._incarnation == self.database.incarnation

    def _is_ours(self) -> bool:
        return self._is_same_table() and self._layout.number == self.database.layout.number

    def _leads(self) -> bool:
        return self.database.leaders.get(self._slice.number) == self._leader_id

    def _check_leads(self) -> None:
        if not self._is_ours() or not self._leads():
            raise Fenced("Postgres: another harvester leads the shard")

    def _slice_of(self, parked: frozenset[OrderingKey]) -> Iterator[Row]:
        """The rows of our slice by ascending id."""
        rows, count, number = self.database.rows, self._slice.count, self._slice.number
        parked_keys = OrderingKeys(parked)
        for id_ in sorted(rows):
            row = rows[id_]
            event = row.event
            if hash_of(event.key) % count == number and not (parked and self.as_read(row, 0) in parked_keys):
                yield row

    @staticmethod
    def as_read(row: Row, horizon: int) -> OutboxRow:
        """The row as the harvester sees it."""
        event = row.event
        return OutboxRow(row.id, row.create_time, event.topic, event.key, event.name, [], [], horizon)

    def control(self) -> Control:
        database = self.database

        def orders() -> tuple[bool, frozenset[OrderingKey], int]:
            if not self._is_same_table():
                raise StoreUnavailable("Postgres: the table was truncated, dropped or recreated")
            if self._layout.number != database.layout.number:
                raise LayoutChanged("another number of shards")
            return database.paused, frozenset(database.parked), database.sequence

        paused, parked, last_id = self.call("asks for orders", orders)
        writers = self.call(
            "asks for writers", lambda: {str(each.number): each.number for each in database.open if each.locks}
        )
        return Control(paused, parked, SequenceState(last_id, frozenset(writers), writers))

    def read(self, request: ReadRequest) -> Sequence[OutboxRow]:
        def effect() -> list[OutboxRow]:
            if not self._is_ours():
                return []
            horizon = self.database.next_xid
            found = []
            for row in self._slice_of(request.excluded_keys):
                if is_in(row.id, request.ids, self.database.open) and row.id not in request.in_flight:
                    found.append(self.as_read(row, horizon))
                    if len(found) == request.limit:
                        break
            if found:
                self.database.say(self.process.name, "is given", *(each.id for each in found))
            return found

        while True:
            found = self.call("reads", effect)
            self._pass_over_hidden_rows()
            if not any(map(self._is_large, found)):
                return found
            if whole := self.with_large_values(found):
                return whole  # Else all of them have vanished, and what is behind them was not read yet.

    def key_hashes(self, rows: Sequence[OutboxRow]) -> Sequence[int]:
        return self.call("hashes keys", lambda: [self._key_hash(row) for row in rows])

    def end_of_batch(self, up_to: int) -> int | None:
        def effect() -> int | None:
            latest = sorted((row.id, row.xid) for row in self.database.rows.values() if row.id <= up_to)[-8:]
            writers = [xid for _, xid in latest]
            return max((id_ for id_, xid in latest if writers.count(xid) > 2), default=None)

        return self.call("looks for a batch's end", effect)

    def key_hashes_up_to(self, bound: int, rows: int) -> Generator[bytes]:
        """In parts of a few rows each, as rows are deleted and inserted while keys are summarised."""
        above: int | None = BEGINNING

        def effect() -> tuple[int | None, list[OutboxRow]]:
            if not self._is_ours() or above is None:
                return None, []
            following = (self.as_read(row, 0) for row in self._slice_of(frozenset()) if above < row.id <= bound)
            found = list(islice(following, KEYS_PER_PART))
            return (found[-1].id if found else None), found

        while above is not None:
            above, part = self.call("reads keys", effect)
            yield b"".join(self._key_hash(row).to_bytes(HASH_BYTES, "big") for row in part)

    def cancel_key_hashes(self) -> None:
        """Each part takes little time."""

    @staticmethod
    def _key_hash(row: OutboxRow) -> int:
        return (hash_of(f"{row.topic} {row.key}") * _SPREAD) % (1 << HASH_BITS)

    def _is_large(self, row: OutboxRow) -> bool:
        return self.database.by_name[str(row.value)].large

    def with_large_values(self, rows: list[OutboxRow]) -> list[OutboxRow]:
        """The rows, with the values that the first statement of a read left out; without those that are gone by now."""
        values = self.large_values([row for row in rows if self._is_large(row)])
        return [row for row in rows if not self._is_large(row) or row.id in values]

    def large_values(self, rows: list[OutboxRow]) -> dict[int, str]:
        """The values that are still there, by their ids."""
        there = self.database.rows
        return self.call(
            "reads large values", lambda: {row.id: there[row.id].event.name for row in rows if row.id in there}
        )

    def snapshot(self) -> str:
        return str(self.call("asks for the snapshot", lambda: self.database.ended))

    def _pass_over_hidden_rows(self) -> None:
        """What takes a read so long, it does after it was told what it may see."""
        hidden = sum(len(each.rows) for each in self.database.open)
        self.process.scheduler.sleep(hidden * HIDDEN_ROW_SECONDS)

    def purge(self, publications: Sequence[Publication]) -> int:
        def effect() -> int:
            return sum(self.database.delete(self._published(each)) for each in publications)

        return self.call(f"purges {', '.join(each.ids.text() for each in publications)}", effect)

    def recover(self, publications: Sequence[Publication]) -> int:
        def effect() -> int:
            return sum(self.database.delete(self.proven_by_times(each)) for each in publications)

        return self.call(f"recovers {', '.join(each.ids.text() for each in publications)}", effect)

    def _published(self, publication: Publication) -> list[Row]:
        """The rows that a publication of this term names."""
        visible = self.visible_to_the_read(publication)
        if len(visible) == len(publication.ids):
            return visible
        return [*visible, *(row for row in self.proven_by_times(publication) if row not in visible)]

    def visible_to_the_read(self, publication: Publication) -> list[Row]:
        """The rows that a publication proves by what holds while transaction ids neither wrap nor go back."""
        self.database.flush()
        next_xid, horizon = self.database.next_xid, publication.horizon
        if not 0 <= next_xid - horizon <= 2_000_000_000:
            return []
        return [
            row
            for row in self.database.rows.values()
            if row.id in publication.ids
            and age(row.xid, next_xid) > age(horizon, next_xid)
            and (publication.created_until is None or row.create_time <= publication.created_until)
            and (publication.created_from is None or row.create_time >= publication.created_from)
        ]

    def proven_by_times(self, publication: Publication) -> list[Row]:
        """The rows that a publication proves by when they were created."""
        self.database.flush()
        if not self._is_same_table():
            return []
        published = dict(zip(publication.ids, publication.times or (), strict=publication.times is not None))
        return [row for row in self.database.rows.values() if row.create_time == published.get(row.id)]

    def is_settled(self) -> bool:
        def effect() -> bool:
            if not self._is_ours():
                raise StoreUnavailable("Postgres: another table, or another number of shards")
            return not self.database.layout.unsettled

        return self.call("asks whether the layout is settled", effect)

    def mark_settled(self) -> None:
        def effect() -> None:
            if self.database.layout.number == self._layout.number:
                self.database.layout = replace(self.database.layout, unsettled=())
                self._forget(*(each.name for each in self._layout.former))

        self.call("settles the layout", effect)

    def begin_term(self, above: int = 0) -> TermHistory:
        database = self.database

        def effect() -> TermHistory:
            if not self._is_ours():
                raise StoreUnavailable("Postgres: the table is another one now, or has other shards")
            number = max(database.terms.number + 1, above + 1, database.clock())
            database.terms = replace(database.terms, number=number)
            database.flush()
            return database.terms

        return self.call("numbers the term", effect)

    def mark_recorded(self, term: int) -> None:
        def effect() -> None:
            recorded = self.database.terms.recorded
            if not self._is_ours() or recorded.get(self._slice.name, 0) >= term:
                raise Fenced("Postgres: another harvester leads the shard")
            self.database.terms = replace(self.database.terms, recorded={**recorded, self._slice.name: term})
            self.database.flush()

        self.call("remembers its record", effect)

    def mark_nothing_in_flight(self, term: int) -> None:
        def effect() -> None:
            if self.database.terms.recorded.get(self._slice.name) == term:
                self._forget(self._slice.name)

        self.call("remembers that nothing is in flight", effect)

    def _forget(self, *names: str) -> None:
        terms = self.database.terms
        recorded = {name: term for name, term in terms.recorded.items() if name not in names}
        self.database.terms = replace(terms, recorded=recorded)

    def lead(self, leader_id: str) -> None:
        self._leader_id = leader_id

        def effect() -> None:
            if not self._is_ours():
                raise StoreUnavailable("Postgres: the outbox was truncated, or has another number of shards")
            self.database.marking -= set(self._marking_the_shard())  # They wait for us, and then see the new leader.
            if former := self.database.leaders.get(self._slice.number):
                self.database.replaced_at.setdefault(former, self.database.scheduler.now)
            self.database.leaders[self._slice.number] = leader_id
            self.database.flush()

        self.call("begins to lead", effect)

    def _marking_the_shard(self) -> list[Store]:
        return [each for each in self.database.marking if each._slice.number == self._slice.number]

    def check_leads(self) -> None:
        self.call("confirms that it leads", self._check_leads)

    def generation(self, slice_: Slice) -> int:
        def effect() -> int:
            if not self._is_ours():
                raise StoreUnavailable("Postgres: another table, or another number of shards")
            return self.database.id_generations.get(slice_.name, 0)

        return self.call("asks for the generation", effect)

    def raise_generation(self, slice_: Slice, present: int) -> int:
        def effect() -> int:
            self._check_leads()
            known = self.database.id_generations
            known[slice_.name] = max(present, known.get(slice_.name, 0)) + 1
            self.database.flush()
            return known[slice_.name]

        return self.call("raises the generation", effect)

    def park(self, bad: Sequence[BadRow]) -> Sequence[BadRow]:
        def effect() -> None:
            self._check_leads()
            for each in bad:
                if each.row.id in self.database.rows:
                    self.database.parked.setdefault(each.ordering_key, each.row.id)
            self.database.flush()

        self.call(f"parks {[each.row.id for each in bad]}", effect)
        return ()

    def dead_letter(self, bad: Sequence[BadRow]) -> Sequence[BadRow]:
        def effect() -> None:
            self._check_leads()
            for each in bad:
                if row := self.database.rows.pop(each.row.id, None):
                    row.event.dead_lettered = True
                    self.database.dead.append(row)
            self.database.flush()

        self.call(f"dead_letters {[each.row.id for each in bad]}", effect)
        return ()

    def has_unmarked(self, mark_id: str, request: ReadRequest) -> bool:
        return self.call("asks for rows to mark", lambda: bool(self._to_mark(mark_id, request)))

    def _to_mark(self, mark_id: str, request: ReadRequest) -> list[Row]:
        if not self._is_ours() or not self._leads():
            return []
        rows, transactions = self._slice_of(request.excluded_keys), self.database.open
        behind = [row for row in rows if is_in(row.id, request.ids, transactions)]
        return [row for row in behind if row.leader_id != mark_id][: request.limit]

    def mark(self, mark_id: str, request: ReadRequest) -> Sequence[OutboxRow]:
        def find() -> list[Row]:
            return self._to_mark(mark_id, request)

        def mark(found: Sequence[Row]) -> list[OutboxRow]:
            for row in found:
                self._set_mark(row, mark_id)
            return [self.as_read(row, 0) for row in found]

        if self._marks_slowly():
            with self._marking():
                behind = self.call(f"begins to mark for {mark_id}", find)
                self.process.scheduler.sleep(self.process.scheduler.random() ** 2 * SLOW_MARK_SECONDS)
                found = self.call(f"marks for {mark_id}", lambda: mark(self._still_to_mark(behind, mark_id)))
        else:
            found = self.call(f"marks for {mark_id}", lambda: mark(find()))
        self._pass_over_hidden_rows()
        return self.with_large_values(found) if any(map(self._is_large, found)) else found

    def _marks_slowly(self) -> bool:
        """Whether the next mark takes long. None does once all faults are over."""
        scheduler, share = self.process.scheduler, self.database.slow_marks
        return bool(share) and scheduler.now < self._server.mishaps.until and scheduler.random() < share

    @contextmanager
    def _marking(self) -> Iterator[None]:
        self.database.marking.add(self)
        try:
            yield
        finally:
            self.database.marking.discard(self)

    def _still_to_mark(self, found: Sequence[Row], mark_id: str) -> list[Row]:
        """Those of the rows that a mark has found, and that may be marked when it comes to them."""
        if self not in self.database.marking:
            raise StoreUnavailable("Postgres: terminating connection due to administrator command")
        rows = self.database.rows
        return [row for row in found if rows.get(row.id) is row and row.leader_id != mark_id]

    def _set_mark(self, row: Row, leader_id: str | None) -> None:
        former = row.leader_id
        row.leader_id = leader_id

        def undo() -> None:
            row.leader_id = former

        self.database.note_not_durable(undo)

    def delete(self, mark_id: str, ids: Sequence[int]) -> int:
        def effect() -> int:
            rows = self.database.rows
            gone = [rows[id_] for id_ in ids if id_ in rows and rows[id_].leader_id == mark_id]

            def undo() -> None:
                rows.update({row.id: row for row in gone})

            self.database.note_not_durable(undo)
            return self.database.delete(gone)

        return self.call(f"deletes {list(ids)} of {mark_id}", effect)

    def reset(self, mark_id: str, ids: Sequence[int]) -> None:
        def effect() -> None:
            for id_ in ids:
                row = self.database.rows.get(id_)
                if row is not None and row.leader_id == mark_id:
                    row.leader_id = None
            self.database.flush()

        self.call(f"resets {list(ids)} of {mark_id}", effect)

    def close(self) -> None:
        """Nothing is open."""


class MarkingStore(Store):
    """A `Store` for at-least-once delivery, whose term ends when another leader has begun to lead."""

    def lead(self, leader_id: str) -> None:
        self.database.end_marks(self._marking_the_shard())
        super().lead(leader_id)

    def control(self) -> Control:
        control = super().control()
        self.check_leads()
        return control

    def check_leads(self) -> None:
        def effect() -> None:
            if not self._leads():
                raise Fenced("Postgres: another harvester leads the shard")

        self.call("confirms that it leads", effect)
