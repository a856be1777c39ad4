"""A simulated Kafka, as a harvester sees it: partitions, transactions, fencing by epoch, and a group."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from outbox_plugin.core import repeated_requests
from outbox_plugin.core.heartbeat_codec import HeartbeatCodec, LeaderRecord
from outbox_plugin.core.kafka_ports import SendResult
from outbox_plugin.core.last_leader import TAIL_HEARTBEATS, LastLeader
from outbox_plugin.core.last_progress import LastProgress, LastRecordFinder, LogRecord, Numbering
from outbox_plugin.core.leader_heartbeat import LeaderHeartbeat
from outbox_plugin.core.progress import ProgressRecord
from outbox_plugin.core.row import OutboxRow
from outbox_plugin.core.shards import Slice
from outbox_plugin.core.signing import Headers, Signer, Slot
from outbox_plugin.errors import (
    Away,
    Fenced,
    LogUnavailable,
    OutcomeUnknown,
    Refusal,
    RowsRefused,
    TopicsAway,
    TransactionStuck,
)
from tests.simulation.network import LATE, PATIENCE, Answer, Server
from tests.simulation.scheduler import Killed, Process, Scheduler

SESSION_SECONDS = 6.0
TRANSACTION_SECONDS = 60.0
STALLED_SECONDS = STUCK_SECONDS = 0.5  # How long a client retries what cannot be done yet. Real clients take longer.
_PROGRESS = "progress"  # The progress topic's partition of a shard.
TAIL_RECORDS = 4  # How many records from its end a progress topic is read at first.
LEADER_TOPIC = "outbox-leader"
SIGNER = Signer(b"s" * 32)  # Has the secret of the simulated database.


@dataclass(eq=False, slots=True)
class KafkaTransaction:
    """A transaction; what it wrote is seen once `committed`."""

    leader_id: str = ""
    committed: bool = False
    over: bool = False
    partitions: set[Hashable] = field(default_factory=set)


@dataclass(slots=True)
class Record:
    """A record of the application's topics; `value` is the event's name."""

    transaction: KafkaTransaction | None
    leader_id: str
    value: str
    at: float  # Seconds.


@dataclass(slots=True)
class TransactionalId:
    """The transaction coordinator's state of a transactional id, and the partitions of its last Produce requests."""

    epoch: int = 0
    open: KafkaTransaction | None = None
    ending: KafkaTransaction | None = None  # Decided, but perhaps not every partition has taken its marker.
    last_sequence: int = 0  # Of the Produce requests of this epoch.


class Stalled(Exception):
    """An error after which a client silently retries the same request."""


class ProgressEntry(NamedTuple):
    """A record of a progress topic; without a transaction it is committed."""

    transaction: KafkaTransaction | None
    value: bytes
    headers: Headers


class Broker:
    """The cluster's state. Its methods take no time.

    Transactions work as in Kafka 4.1 for clients that use EndTxn version 1, request by request.
    """

    def __init__(self, scheduler: Scheduler, say: Callable[..., None], server: Server) -> None:
        self.scheduler = scheduler
        self.say = say
        self.server = server
        self.partitions: dict[tuple[str, str], list[Record]] = defaultdict(list)  # A key has one of its own.
        self.progress: dict[str, list[ProgressEntry]] = defaultdict(list)  # A slice of a group has a topic of its own.
        self.ids: dict[str, TransactionalId] = defaultdict(TransactionalId)
        self.refused_topics: set[str] = set()
        self.away_topics: set[str] = set()  # Without a leader, or not looked up yet; known as such at once.
        self.leaderless_topics: set[str] = set()  # Without a leader, which is noticed by who touches them.
        self.refused_events: set[str] = set()
        self.sends: list[tuple[str, float]] = []  # Without transactions: leader id, and seconds at the beginning.
        self.acknowledged: Counter[tuple[str, str]] = Counter()  # Without transactions: by leader id and event.
        self._groups: dict[str, Group] = {}

    @property
    def groups(self) -> list[Group]:
        """The leader groups there are."""
        return list(self._groups.values())

    def group(self, name: str) -> Group:
        """The leader group of the harvesters of a group."""
        if name not in self._groups:
            self._groups[name] = Group(self)
            self._groups[name].watch()
        return self._groups[name]

    def initialise(self, transactional_id: str) -> int:
        """InitProducerId: abort what is open, and give a new epoch."""
        known = self.ids[transactional_id]
        if self._cannot_end(known):
            raise TransactionStuck("Kafka: CONCURRENT_TRANSACTIONS")
        known.epoch += 1
        known.last_sequence = 0
        if known.open is not None:
            known.open.over, known.open, known.ending = True, None, known.open
            if self._cannot_end(known):
                raise TransactionStuck("Kafka: CONCURRENT_TRANSACTIONS")
        return known.epoch

    def _cannot_end(self, known: TransactionalId) -> bool:
        """Whether the last transaction waits until a partition has a leader that can take its marker."""
        touched = known.ending.partitions if known.ending else ()
        if any(isinstance(each, tuple) and each[0] in self.leaderless_topics for each in touched):
            return True
        known.ending = None
        return False

    def add_partitions(self, transactional_id: str, epoch: int, partitions: Iterable[Hashable], leader_id: str) -> None:
        """AddPartitionsToTxn: they belong to the transaction that is open, which is begun if there is none."""
        known = self._current(transactional_id, epoch)
        if self._cannot_end(known):
            raise Stalled
        if known.open is None:
            known.open = KafkaTransaction(leader_id)
            self.scheduler.at(
                self.scheduler.now + TRANSACTION_SECONDS, partial(self._time_out, transactional_id, known.open)
            )
        known.open.partitions.update(partitions)

    def produce(
        self,
        transactional_id: str,
        epoch: int,
        sequence: int,
        partitions: Iterable[Hashable],
        append: Callable[[KafkaTransaction], None],
    ) -> None:
        """Produce, once for each `sequence`: only to partitions of the transaction that is open (KIP-890, part 1)."""
        known = self._current(transactional_id, epoch)
        if sequence <= known.last_sequence:
            return
        if known.open is None or not known.open.partitions.issuperset(partitions):
            raise LogUnavailable("Kafka: INVALID_TXN_STATE")
        if any(isinstance(each, tuple) and each[0] in self.leaderless_topics for each in partitions):
            raise Stalled
        known.last_sequence = sequence
        append(known.open)

    def end(self, transactional_id: str, epoch: int, *, commit: bool) -> None:
        """EndTxn: commit or abort what is open, whichever transaction it was meant for."""
        known = self._current(transactional_id, epoch)
        if known.open is not None:
            known.open.committed, known.open.over, known.open, known.ending = commit, True, None, known.open

    def _current(self, transactional_id: str, epoch: int) -> TransactionalId:
        known = self.ids[transactional_id]
        if known.epoch != epoch:
            raise Fenced("Kafka: a newer producer")
        return known

    def _time_out(self, transactional_id: str, transaction: KafkaTransaction) -> None:
        if self.ids[transactional_id].open is transaction:
            self.say("kafka", "times a transaction out")
            with suppress(TransactionStuck):
                self.initialise(transactional_id)

    def refusal(self, row: OutboxRow) -> Refusal | None:
        """Why the row is not taken, for what it is."""
        if row.topic in self.refused_topics:
            return Refusal("no such topic", whole_topic=True)
        return Refusal("too large") if row.value in self.refused_events else None

    def away(self, rows: Sequence[OutboxRow], known: Set[str] = frozenset()) -> dict[str, Away]:
        """The topics of `rows` that cannot be written to now, as far as one sees who looks up all but the `known`."""
        topics = self.away_topics | (self.leaderless_topics - known)
        seconds = 0.1 + 0.4 * self.scheduler.random() if topics else 0.0
        return {row.topic: Away("no leader", seconds) for row in rows if row.topic in topics}

    def append(self, rows: Sequence[OutboxRow], transaction: KafkaTransaction | None, leader_id: str) -> None:
        """Write records."""
        for row in rows:
            self.partitions[row.topic, row.key].append(
                Record(transaction, leader_id, str(row.value), self.scheduler.now)
            )


class SimulatedLog:
    """`TransactionalLog` on a `Broker`: transactional producers that repeat their requests as librdkafka does."""

    largest_progress_bytes = 800  # So small that windows must be halved, and purged early.

    def __init__(
        self,
        broker: Broker,
        server: Server,
        process: Process,
        group: str,
        slice_: Slice,
        should_wait: Callable[[], bool],
    ) -> None:
        self._should_wait = should_wait
        self._broker = broker
        self._server = server
        self._process = process
        self._group = group
        self._name = self._id = f"{group}-{slice_.name}"  # The first one is that of the shard's progress records.
        self._epoch = 0
        self._slot = Slot("progress", f"{group}-progress", slice_.number)
        self._key = slice_.name.encode()
        self._numbering = Numbering(offsets_per_transaction=1)
        self._sequence = 0
        self._in_doubt = True
        self._closed = True
        self._known: set[str] = set()  # Topics that need not be looked up.

    @property
    def in_doubt(self) -> bool:
        return self._in_doubt

    def fence(self, generation: int) -> None:
        self._id = self._name + (f"-g{generation}" if generation else "")
        gives_up = self._process.now() + STUCK_SECONDS
        while True:
            try:
                self._epoch = self._request("fences", lambda: self._broker.initialise(self._id))
                break
            except TransactionStuck:
                if self._process.now() > gives_up:
                    raise
                self._process.scheduler.sleep(0.5)
        self._closed = False
        self._sequence = 0
        self._in_doubt = False

    def read_progress(self, *, fenced: bool, accepts_unsigned: bool = False) -> LastProgress:
        def effect() -> list[LogRecord]:
            entries = self._broker.progress[self._name]
            if fenced and any(each.transaction is not None and not each.transaction.over for each in entries):
                raise LogUnavailable("Kafka: an open transaction hides the end")
            return [
                LogRecord(offset, each.transaction is None or each.transaction.committed, each.value, each.headers)
                for offset, each in enumerate(entries)
            ]

        records = self._server.call(self._process, "reads progress", effect, should_wait=self._should_wait)
        finder = LastRecordFinder(SIGNER, self._slot, self._key, accepts_unsigned)
        reach, end, last = TAIL_RECORDS, len(records), None
        while last is None:
            start = max(0, end - reach)
            last = finder.conclude(records[start:], start, 0, end)
            reach *= 2
        self._numbering.read_to(end)
        return last

    def former(self, slice_: Slice) -> SimulatedLog:
        return SimulatedLog(self._broker, self._server, self._process, self._group, slice_, self._should_wait)

    def publish(self, rows: Sequence[OutboxRow], progress: ProgressRecord) -> bool:
        if self._closed:
            raise LogUnavailable("Kafka: the term's producer has been closed")
        if away := self._broker.away(rows, self._known):
            raise TopicsAway(away)
        self._known.update(row.topic for row in rows)
        try:
            return self._transact(rows, progress)
        except Stalled:
            self._known -= self._broker.leaderless_topics
            return False

    def _transact(self, rows: Sequence[OutboxRow], progress: ProgressRecord) -> bool:
        broker, id_, epoch, leader_id = self._broker, self._id, self._epoch, progress.leader_id
        refused = {row.id: refusal for row in rows if (refusal := broker.refusal(row)) is not None}
        accepted = [row for row in rows if row.id not in refused]
        self._in_doubt = True
        partitions = {_PROGRESS, *((row.topic, row.key) for row in accepted)}
        self._request("adds partitions", lambda: broker.add_partitions(id_, epoch, partitions, leader_id))

        value = self._numbering.numbered(progress).encode()
        headers = SIGNER.sign(self._slot, self._key, value)

        def append_progress(transaction: KafkaTransaction) -> None:
            broker.progress[self._name].append(ProgressEntry(transaction, value, headers))

        self._produce("progress", [_PROGRESS], append_progress)
        for part in self._parts(accepted):
            self._produce(
                str([row.id for row in part]),
                {(row.topic, row.key) for row in part},
                lambda transaction, part=part: broker.append(part, transaction, leader_id),  # type: ignore[misc]
            )
        if refused:
            raise RowsRefused(self._some(refused), maybe_oversize=self._any(row.id for row in rows))
        began = self._process.now()
        self._request(
            f"commits {[row.id for row in rows]} as {leader_id}",
            lambda: broker.end(id_, epoch, commit=True),
            unanswered=OutcomeUnknown,
        )
        self._in_doubt = repeated_requests.may_have_been_repeated(self._process.now() - began)
        self._numbering.committed()
        return True

    def _request(
        self, doing: str, effect: Callable[[], Answer], *, unanswered: type[Exception] | None = None
    ) -> Answer:
        gives_up = self._process.now() + STALLED_SECONDS
        while True:
            try:
                return self._server.call(
                    self._process,
                    doing,
                    effect,
                    unanswered=unanswered,
                    repeats=True,
                    should_wait=self._should_wait,
                )
            except Stalled:
                if self._process.now() > gives_up:
                    raise
                self._process.scheduler.sleep(0.1)

    def _produce(self, what: str, partitions: Iterable[Hashable], append: Callable[[KafkaTransaction], None]) -> None:
        self._sequence += 1
        request = partial(self._broker.produce, self._id, self._epoch, self._sequence, partitions, append)
        self._request(f"produces {what}", request)

    def _parts(self, rows: list[OutboxRow]) -> list[list[OutboxRow]]:
        """The rows of one request each; those of a partition are in one."""
        first = {(row.topic, row.key) for row in rows if self._process.scheduler.random() < 0.5}
        parts = (
            [row for row in rows if (row.topic, row.key) in first],
            [row for row in rows if (row.topic, row.key) not in first],
        )
        return [part for part in parts if part]

    def _some(self, refused: dict[int, Refusal]) -> dict[int, Refusal]:
        """A part of the refusals, at least one: Kafka need not report all at once."""
        chosen = [id_ for id_ in refused if self._process.scheduler.random() < 0.5]
        return {id_: refused[id_] for id_ in chosen or list(refused)[-1:]}

    def _any(self, ids: Iterable[int]) -> list[int]:
        """Some of the rows, perhaps none: those that may be too large, too, with or without reason."""
        chance = self._process.scheduler.random()
        return [id_ for id_ in ids if self._process.scheduler.random() < chance / 2]

    def close(self) -> None:
        self._closed = True


class SimulatedAcknowledgingLog:
    """`AcknowledgingLog` on a `Broker`: a producer without transactions."""

    def __init__(
        self, broker: Broker, server: Server, process: Process, leader_id: str, should_wait: Callable[[], bool]
    ) -> None:
        self._should_wait = should_wait
        self._broker = broker
        self._server = server
        self._process = process
        self._leader_id = leader_id

    def send(self, rows: Sequence[OutboxRow], confirm: Callable[[], None]) -> SendResult:
        broker, scheduler, mishaps = self._broker, self._process.scheduler, self._server.mishaps
        confirm()
        broker.sends.append((self._leader_id, scheduler.now))
        away = broker.away(rows)
        rows = [row for row in rows if row.topic not in away]

        def effect() -> SendResult:
            refused = {row.id: refusal for row in rows if (refusal := broker.refusal(row)) is not None}
            delivered = set()
            for row in rows:
                if row.id in refused:
                    continue
                dice = scheduler.random() if scheduler.now < mishaps.until else 1.0
                if dice < mishaps.rate * 2:  # Of one partition: its records fare otherwise than the others'.
                    self._unknown(row, dice / mishaps.rate / 2)
                    continue
                broker.append([row], None, self._leader_id)
                delivered.add(row.id)
            return SendResult(delivered, refused, away)

        try:
            sent = self._server.call(
                self._process,
                f"sends {[row.id for row in rows]} as {self._leader_id}",
                effect,
                should_wait=self._should_wait,
            )
        except LogUnavailable:
            return SendResult(frozenset(), {}, away)
        broker.acknowledged.update((self._leader_id, str(row.value)) for row in rows if row.id in sent.delivered)
        return sent

    def _unknown(self, row: OutboxRow, dice: float) -> None:
        """Send a record that is not acknowledged: it is written nevertheless, or late, or never."""
        scheduler, broker = self._process.scheduler, self._broker
        self._broker.say("kafka", f"does not acknowledge {row.id}")
        if dice < 0.3:
            broker.append([row], None, self._leader_id)
        elif dice < 0.5:
            arrives = scheduler.now + scheduler.random() * LATE
            scheduler.at(arrives, lambda: broker.append([row], None, self._leader_id))
            scheduler.disturbs(arrives)

    def close(self) -> None:
        """Nothing is open."""


@dataclass(eq=False)
class Member:
    """A member of the leader group: the coordinator's state of it, and its own."""

    process: Process
    shards: int
    assigned: set[int] = field(default_factory=set)  # By the coordinator.
    owned: set[int] = field(default_factory=set)  # As the member believes.
    seen_at: float = 0.0
    gone: bool = False  # Left, or expired.


class Group:
    """The leader group. A partition has at most one member, and a member that sends nothing loses its partitions."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._scheduler = broker.scheduler
        self.server = broker.server
        self.members: list[Member] = []
        self.listeners: list[SimulatedMembership] = []
        self.heartbeats: dict[int, list[LeaderRecord]] = defaultdict(list)  # By partition.
        self._firsts: dict[int, int] = {}  # The first offset that is kept, by partition, where some were deleted.
        self._decoded: dict[tuple[int, int], LeaderHeartbeat | None] = {}  # By partition and offset.
        self._wanted = False

    def join(self, member: Member) -> None:
        """Add a member. The others are asked to give it its share."""
        member.seen_at = self._scheduler.now
        member.gone = False
        self.members.append(member)
        self.rebalance()

    def leave(self, member: Member) -> None:
        """Remove a member that leaves, or whose session has expired."""
        if member in self.members:
            self.members.remove(member)
        member.gone = True
        member.assigned.clear()
        self.rebalance()

    def _expire(self) -> None:
        now = self._scheduler.now
        for member in list(self.members):
            here = member.process.alive and not member.process.paused and not member.gone
            if here and self.server.reaches(member.process):
                member.seen_at = now
            elif self.server.down:
                member.seen_at = max(member.seen_at, now - SESSION_SECONDS / 2)
            elif now - member.seen_at > SESSION_SECONDS:
                self._broker.say("kafka", f"takes {member.process.name} for dead")
                self.leave(member)

    def watch(self) -> None:
        """Check the sessions twice a second."""
        self._expire()
        self._scheduler.at(self._scheduler.now + 0.5, self.watch)

    def rebalance(self) -> None:
        """Share the partitions out again, soon."""
        if not self._wanted:
            self._wanted = True
            self._scheduler.at(self._scheduler.now + 0.1 + self._scheduler.random(), self._share_out)

    def _share_out(self) -> None:
        """Assign partitions: a member keeps its own, up to its fair share. Others wait until theirs are free."""
        self._wanted = False
        if self.server.down:
            self.rebalance()
            return
        if not self.members:
            return
        count = max(member.shards for member in self.members)
        fair, larger = divmod(count, len(self.members))  # So many members have one partition more than others.
        for place, member in enumerate(sorted(self.members, key=lambda member: -len(member.assigned))):
            for partition in sorted(member.assigned)[fair + (place < larger) :]:
                member.assigned.discard(partition)
        # What a member still believes to own is only given to another once it has heard, or is taken for dead.
        taken = {each for member in self.members for each in (*member.assigned, *member.owned)}
        for partition in range(count):
            if partition not in taken:
                least = min(self.members, key=lambda member: len(member.assigned))
                least.assigned.add(partition)
                self._broker.say("kafka", f"gives partition {partition} to {least.process.name}")
        if any(member.owned - member.assigned for member in self.members):
            self.rebalance()

    def write(self, shard: int, key: bytes | None, value: bytes | None, headers: Headers | None) -> None:
        """A record of the leader topic has been written; everybody who listens can fetch it."""
        partition = self.heartbeats[shard]
        partition.append(record := LeaderRecord(shard, len(partition), key, value, headers))
        for listener in self.listeners:
            listener.fetched(record)

    def empty(self) -> None:
        """Delete the records of the leader topic. Offsets go on."""
        self._firsts = {shard: len(records) for shard, records in self.heartbeats.items()}

    def kept(self, shard: int) -> list[LeaderRecord]:
        """The records of a partition that were not deleted."""
        return self.heartbeats.get(shard, [])[self._firsts.get(shard, 0) :]

    def decode(self, record: LeaderRecord, codec: HeartbeatCodec) -> LeaderHeartbeat | None:
        """The heartbeat in a record, which is the same for every member: one verifies the signature for all."""
        position = record.shard, record.offset
        if position not in self._decoded:
            self._decoded[position] = codec.decode(record)
        return self._decoded[position]


class SimulatedMembership:
    """`Membership` of a harvester in the group."""

    def __init__(
        self, broker: Broker, server: Server, process: Process, group: str, shards: int, instance: str
    ) -> None:
        self._group = broker.group(group)
        self._server = server
        self._process = process
        self._scheduler = process.scheduler
        self._member = Member(process, shards)
        self._arrived: list[LeaderRecord] = []
        self._on_the_way: list[LeaderRecord] = []
        self._codec = HeartbeatCodec(LEADER_TOPIC, SIGNER, instance)
        self._lock = process.lock()
        self._changed = process.condition(self._lock)
        self._lost_contact: float | None = None
        self._vacant = {shard for shard in range(shards) if self._is_vacant(shard)}
        self._group.listeners.append(self)
        self._group.join(self._member)

    def owned(self) -> set[int]:
        if not self._process.alive:
            raise Killed
        member, now = self._member, self._scheduler.now
        if not self._server.reaches(self._process):
            self._lost_contact = self._lost_contact or now
            if now - self._lost_contact > SESSION_SECONDS:
                member.owned = set()  # The client itself knows that its session is over.
            return set(member.owned)
        self._lost_contact = None
        if member.gone:
            member.owned = set()
            self._group.join(member)
        if member.owned != member.assigned:
            if member.owned - member.assigned:
                self._group.rebalance()
            member.owned = set(member.assigned)
        return set(member.owned)

    def fetched(self, record: LeaderRecord) -> None:
        """A record is there for us to fetch."""
        if not self._process.alive:
            return
        self._on_the_way.append(record)
        if self._server.reaches(self._process):
            self._arrived += self._on_the_way
            self._on_the_way.clear()
            self._changed.notify_all()

    def receive(self, wait_seconds: float) -> Iterable[LeaderHeartbeat]:
        with self._lock:
            if self._on_the_way and self._server.reaches(self._process):
                self._arrived += self._on_the_way
                self._on_the_way.clear()
            self._changed.wait_for(lambda: self._arrived, wait_seconds)
            arrived, self._arrived = self._arrived, []
        decoded = [(record, self._group.decode(record, self._codec)) for record in arrived]
        return [beat for record, beat in decoded if self._codec.is_new(record, beat) and beat is not None]

    def _is_vacant(self, shard: int) -> bool:
        """Whether the last records of the shard's partition show that nobody leads."""
        if not self._server.reaches(self._process):
            return False
        if not (records := self._group.kept(shard)):
            return True
        last_leader = LastLeader()
        for record in records[-TAIL_HEARTBEATS:]:
            beat = self._group.decode(record, self._codec)
            if self._codec.is_new(record, beat) and beat is not None:
                last_leader.take(beat)
        return last_leader.has_resigned

    def take_vacant(self) -> set[int]:
        vacant, self._vacant = self._vacant, set()
        return vacant

    def take_unsigned_heartbeat(self) -> None:
        """No other outbox has our group."""

    def check_topic(self) -> None:
        """It is there."""

    def check_progress_topic(self) -> None:
        """Nobody recreates it."""

    def send(self, heartbeat: LeaderHeartbeat) -> None:
        if self._process.alive:
            self._send(heartbeat, self._scheduler.now + PATIENCE)

    def _send(self, heartbeat: LeaderHeartbeat, deadline: float) -> None:
        scheduler = self._scheduler
        if self._server.reaches(self._process):
            record = self._codec.encode(heartbeat)
            scheduler.at(scheduler.now + scheduler.random() * 0.02, lambda: self._group.write(heartbeat.shard, *record))
        elif scheduler.now < deadline:
            scheduler.at(scheduler.now + 0.3, lambda: self._send(heartbeat, deadline))

    def leave(self, timeout_seconds: float) -> None:
        if not self._process.alive:
            raise Killed
        self._group.listeners.remove(self)
        if self._server.reaches(self._process):
            self._group.leave(self._member)
        else:
            self._member.gone = True
