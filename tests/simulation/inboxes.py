"""Inboxes of one group, and a partition that is cut again and again: the product's own `Inbox`; simulated servers.

A seed draws a plan and a schedule. What runs is everything between librdkafka and the handlers: what an inbox does with
the records that it polls, where it goes on, what it commits, and which positions it writes. Kafka and Postgres are
simulated, and so are workers and housekeeping: one step at a time, chosen by the seed. A handler takes its records and
claims their keys in one step, and commits in another one. In between, anything may happen, and its inbox may lose the
partition. A claim waits for the transaction that has claimed the same key.

What befalls them: the leader changes, with the end of the log lost or not; retention deletes the first records, and
compaction others; transactions are aborted; the topic is deleted and recreated; inboxes are killed, stopped, and lose
the partition to each other; Kafka forgets the group's offsets while it has no member; Kafka does not return the topic's
id; commits fail; Postgres is away; handlers fail; and time passes, so that idempotency keys are forgotten.
A key is forgotten when it is old enough and a position that is kept covers its record:
`keep` is promised to be longer than positions lag. For the same reason Kafka forgets no offset that is ahead of the
position in Postgres.

At each step: no record has its effect twice, and no record of a key has its effect before an earlier one that Kafka
still has, or that the same inbox handles. At the end, when all is well: each record that Kafka still has had its
effect, and the group is at the end of the partition.

What is left out: several partitions; pauses; dead letters; a recreated topic that is longer than the old one before an
inbox has noticed it; and a second log of a partition, that of a replica which led before, because keys are remembered
for longer than replicas differ.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

import psycopg
from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaTopicPartition

from outbox_plugin import Settings
from outbox_plugin.adapters.topic_ids import Answer
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.inbox import Inbox, positions
from outbox_plugin.inbox.key_queues import KeyBatch, KeyQueues, Outcome
from outbox_plugin.inbox.leader_epochs import GroupPosition, HandledPosition
from outbox_plugin.inbox.positions import PartitionPositions
from outbox_plugin.inbox.received import Received
from tests.inbox_support import poll_loop

PARTITION = TopicPartition("orders", 0)
PARTITIONS = [KafkaTopicPartition(*PARTITION)]
KEEP_SECONDS = 1_000.0
SETTINGS = Settings(dsn="postgresql://nowhere/none", bootstrap_servers="127.0.0.1:1")
NOTHING_COMMITTED = -1001
SETTLED_ROUNDS = 2_000  # By then, all is handled.
UNNAMED = b" without a name"  # The end of the values of records without an idempotency key.
STEPS = {
    "append": 8,
    "fetch": 20,
    "handle": 20,
    "commit": 10,
    "tick": 10,
    "leader": 2,
    "cut": 3,
    "delete": 1,
    "compact": 1,
    "recreate": 1,
    "kill": 2,
    "stop": 1,
    "move": 3,
    "start": 4,
    "expire": 3,
    "pass time": 4,
}


@dataclass(frozen=True)
class Plan:
    """How many steps a schedule has, how likely each kind is, and how often a request, or one for an id, fails."""

    steps: int = 150
    weights: Mapping[str, int] = field(default_factory=lambda: STEPS)
    failures: float = 0.1
    silence: float = 0.0

    @classmethod
    def draw(cls, seed: int) -> Plan:
        """The plan of a seed: each leaves some kinds of steps out, so that they do not drown each other."""
        dice = random.Random(seed)
        needed = {"append", "fetch", "handle", "commit", "tick", "start"}
        weights = {kind: weight for kind, weight in STEPS.items() if kind in needed or dice.random() < 0.7}
        return cls(dice.randint(20, 250), weights, dice.choice((0.0, 0.0, 0.1, 0.4)), dice.choice((0.0, 0.3)))


class Stored(NamedTuple):
    """A record of the log. What no inbox gets has no name: a transaction marker, an aborted or a compacted record."""

    name: str | None
    epoch: int
    timestamp: float
    topic_id: str


class Handled(NamedTuple):
    """When a record was handled, and which one."""

    at: float
    name: str


class Log:
    """The partition, and the offset that the group has committed."""

    def __init__(self) -> None:
        self.records: list[Stored] = []
        self.beginning = 0
        self.epoch = 0
        self.incarnation = 0
        self.committed: KafkaTopicPartition | None = None

    @property
    def topic_id(self) -> str:
        return f"{self.incarnation:022}"

    @property
    def end(self) -> int:
        return len(self.records)

    def covers(self, offset: int, stored: Stored) -> bool:
        """Whether the offset that was committed lies above a record."""
        at = self.committed
        if at is None or at.metadata != stored.topic_id:
            return False
        return offset < at.offset and stored.epoch <= (at.leader_epoch or 0)

    def names(self) -> list[str]:
        return [each.name for each in self.records[self.beginning :] if each.name is not None]


class Postgres:
    """The keys that are remembered, the effects, and the group's row of `outbox_inbox_position`."""

    def __init__(self) -> None:
        self.handled: dict[str, Handled] = {}  # By idempotency key.
        self.effects: Counter[str] = Counter()
        self.places: dict[str, Stored] = {}
        self.offsets: dict[str, int] = {}
        self.row: tuple[str, int, list[HandledPosition]] | None = None  # The topic's id, the offset, the epochs.

    def covers(self, offset: int, topic_id: str, epoch: int) -> bool:
        """Whether a position that was written lies above a record."""
        if self.row is None or self.row[0] != topic_id:
            return False
        return any(offset < each[0] and epoch <= each[1] for each in self.row[2])


class Client:
    """librdkafka's consumer, as the product uses it."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._log = simulation.log
        self.at: int | None = None  # The next offset to fetch; None where the partition is not assigned.
        self.has_fetched = False  # Since it was told where to begin: it then knows the epoch, and notices a cut.
        self._low_watermark = -1001  # As it was when the partition was fetched.
        self._end_told: int | None = None  # The end of which it has told last.

    def committed(self, asked: Sequence[KafkaTopicPartition], timeout: float) -> list[KafkaTopicPartition]:
        self._simulation.may_fail(KafkaException(KafkaError(KafkaError._TIMED_OUT)))
        return [self._log.committed or KafkaTopicPartition(*PARTITION, NOTHING_COMMITTED)]

    def commit(self, offsets: list[KafkaTopicPartition], asynchronous: bool) -> None:
        self._simulation.may_fail(KafkaException(KafkaError(KafkaError._TIMED_OUT)))
        [self._log.committed] = offsets
        self._simulation.say(f"commits {offsets[0].offset}, epoch {offsets[0].leader_epoch}")

    def incremental_assign(self, partitions: list[KafkaTopicPartition]) -> None:
        self._go_to(partitions[0])

    def incremental_unassign(self, partitions: list[KafkaTopicPartition]) -> None:
        self.at = None

    def seek(self, partition: KafkaTopicPartition) -> None:
        if self.at is None:
            raise KafkaException(KafkaError(KafkaError._STATE))
        self._go_to(partition)

    def _go_to(self, partition: KafkaTopicPartition) -> None:
        places = {OFFSET_BEGINNING: self._log.beginning, OFFSET_END: self._log.end}
        self.at, self.has_fetched = places.get(partition.offset, partition.offset), False
        self._end_told = None

    def get_watermark_offsets(
        self, partition: KafkaTopicPartition, timeout: float = 0.0, cached: bool = False
    ) -> tuple[int, int]:
        if cached:
            return self._low_watermark, self._log.end
        self._simulation.may_fail(KafkaException(KafkaError(KafkaError._TIMED_OUT)))
        return self._log.beginning, self._log.end

    def pause(self, partitions: list[KafkaTopicPartition]) -> None: ...

    resume = pause

    def close(self) -> None: ...

    def was_recreated(self) -> None:
        if self.at is not None:
            self._go_to(KafkaTopicPartition(*PARTITION, OFFSET_BEGINNING))

    def was_cut(self) -> None:
        if self.at is not None and self.has_fetched and self.at > self._log.end:
            self.at = self._log.beginning

    def poll(self, timeout: float) -> Any:
        """Return the next record, or that it has reached the end; None if there is nothing new."""
        if self.at is None or PARTITION not in self._simulation.owner_partitions():
            return None
        self._low_watermark = self._log.beginning
        if not self._log.beginning <= self.at <= self._log.end:
            self.at = self._log.beginning  # Out of range.
        while self.at < self._log.end:
            offset, stored = self.at, self._log.records[self.at]
            self.at, self.has_fetched = self.at + 1, True
            if stored.name is not None:
                return _message(offset, stored)
        if self._end_told != self.at:
            self._end_told = self.at
            return _end_message(self.at)
        return None

    def consume(self, number: int, timeout: float) -> list[Any]:
        """Return a few records more."""
        polled = [self.poll(0) for _ in range(self._simulation.dice.randint(0, 5))]
        return [each for each in polled if each is not None]


def number_of(name: str) -> int:
    """A record's number, by the order in which they were appended."""
    return int(name.split()[1])


def key_of(name: str) -> bytes:
    """A record's key."""
    return b"%d" % (number_of(name) % 4)


def _message(offset: int, stored: Stored) -> Any:
    assert stored.name is not None
    name = stored.name.encode()
    named = not name.endswith(UNNAMED)
    answers = {
        "error": None,
        "topic": PARTITION.topic,
        "partition": PARTITION.partition,
        "offset": offset,
        "leader_epoch": stored.epoch,
        "timestamp": (1, int(stored.timestamp * 1000)),
        "key": key_of(stored.name),
        "value": name,
        "headers": [("idempotency-key", name)] if named else [],
    }
    return SimpleNamespace(**{each: lambda answer=answer: answer for each, answer in answers.items()})


def _end_message(offset: int) -> Any:
    end = KafkaError(KafkaError._PARTITION_EOF)
    return SimpleNamespace(
        error=lambda: end, topic=lambda: PARTITION.topic, partition=lambda: PARTITION.partition, offset=lambda: offset
    )


class WrittenPositions:
    """`Positions` without a database."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def read_now(self, topic_ids: Mapping[str, str]) -> dict[TopicPartition, GroupPosition]:
        self._simulation.may_fail(psycopg.OperationalError("away"))
        row = self._simulation.postgres.row
        if row is None or row[0] != topic_ids.get(PARTITION.topic):
            return {}
        return {PARTITION: positions._position(*row[1:])}

    def still_handled(self, _: Collection[TopicPartition]) -> set[TopicPartition]:
        return {PARTITION for each in self._simulation.running if each.process in self._simulation.stopped}

    def write_now(self, reached: Callable[[], PartitionPositions]) -> bool:
        if self._simulation.fails():
            return False
        for each in reached().values():
            known = [HandledPosition(*pair) for pair in positions._known(each.position)]
            self._simulation.postgres.row = each.topic_id, each.position.next_offset, known
            self._simulation.say(f"writes {each.position.next_offset}, {[tuple(pair) for pair in known]}")
        return True


@dataclass(eq=False)
class Transaction:
    """What a worker has taken, and the keys that it has claimed: none while it waits for another transaction."""

    process: Process
    taken: KeyBatch
    claimed: set[str] = field(default_factory=set)


class SimulatedTopicIds:
    """What one inbox knows of the topic's id."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._ids: dict[str, str] = {}

    def close(self) -> None: ...

    def of(self, topic: str) -> str:
        return self._ids.get(topic, "")

    def known(self) -> dict[str, str]:
        return dict(self._ids)

    def look_up(self, topics: Collection[str]) -> Answer:
        if self._simulation.is_silent():
            return Answer(set(), set())
        found = self._simulation.log.topic_id
        recreated = {topic for topic in topics if self._ids.get(topic, found) != found}
        self._ids.update(dict.fromkeys(topics, found))
        return Answer(recreated, {*topics})

    def recreated(self, topics: Collection[str]) -> set[str]:
        return self.look_up(topics).recreated


class Process:
    """One inbox, and its client."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.name = name
        self.client: Any = Client(simulation)
        inbox: Any = Inbox(
            SETTINGS,
            group="billing",
            topics=[PARTITION.topic],
            handler=lambda connection, event: None,
        )
        self.topic_ids: Any = SimulatedTopicIds(simulation)
        keep = timedelta(seconds=KEEP_SECONDS)
        written = WrittenPositions(simulation)
        self.loop = poll_loop(self.client, written, self.topic_ids, keep=keep, dispatcher=inbox._dispatcher)
        inbox._handover = SimpleNamespace(locked=lambda _: nullcontext(lambda _: None))
        self.inbox = inbox

    @property
    def queues(self) -> KeyQueues:
        queues: KeyQueues = self.inbox._dispatcher._queues
        return queues


class Simulation:
    """One schedule. Of at most two inboxes, one is the `owner` of the partition."""

    def __init__(self, seed: int, plan: Plan, *, tell: bool = False) -> None:
        self.plan = plan
        self.dice = random.Random(f"{seed}/run")
        self.now = 1_000_000.0
        self.log, self.postgres = Log(), Postgres()
        self.owner: Process | None = None
        self.running: list[Transaction] = []
        self.stopped: list[Process] = []  # Those that have left the group, and whose handlers go on.
        self.latest: dict[tuple[Process, bytes], int] = {}  # The last number of a key, by who handled it.
        self.broken: list[str] = []
        self.trace: list[str] = []
        self._tell = tell
        self._well = False
        self._number = self._processes = 0

    def say(self, text: str) -> None:
        if self._tell:
            self.trace.append(text)

    def fails(self) -> bool:
        return not self._well and self.dice.random() < self.plan.failures

    def may_fail(self, error: Exception) -> None:
        if self.fails():
            self.say(f"fails: {error}")
            raise error

    def is_silent(self) -> bool:
        """Whether Kafka does not return the topic's id now."""
        return self.fails() or (not self._well and self.dice.random() < self.plan.silence)

    def owner_partitions(self) -> list[TopicPartition]:
        return [] if self.owner is None else self.owner.inbox.partitions

    def run(self) -> None:
        kinds, weights = [*self.plan.weights], [*self.plan.weights.values()]
        for kind in self.dice.choices(kinds, weights, k=self.plan.steps):
            self.step(kind)
            if self.broken:
                return
        self._well = True
        for _ in range(2):  # A cut shows as soon as the partition has a record from after it where the group goes on.
            self._append()
            self._settle()
        self._check_end()
        self._kill()
        self._pass_time()
        self._cut_below_the_position()
        self._settle()
        self._check_end()

    def _settle(self) -> None:
        """All is well, and for long enough."""
        self._start()
        assert self.owner is not None
        quiet = rounds = 0
        while quiet < 5 and not self.broken:
            if (rounds := rounds + 1) > SETTLED_ROUNDS:
                self.broken.append("there is no end of it, though all is well")
            self.now += 10.0  # So that a record is tried again that has failed.
            self._fetch()
            self._handle()
            for each in [*self.running]:
                self._end(each)
            self._tick()
            quiet = quiet + 1 if self.owner.client.at == self.log.end and not self.owner.queues.held else 0

    def _cut_below_the_position(self) -> None:
        """So that nothing but old records is left, and an inbox that starts notices."""
        assert self.postgres.row is not None
        if (end := self.postgres.row[1] - 2) > self.log.beginning:
            self._cut_at(end)

    def step(self, kind: str) -> None:
        """Let one thing happen, if it can."""
        getattr(self, f"_{kind.replace(' ', '_')}")()

    # Kafka.

    def _append(self) -> None:
        for _ in range(self.dice.randint(1, 4)):
            self._number += 1
            age = self.dice.choice((0.0, 0.0, self.dice.uniform(0, 3 * KEEP_SECONDS)))
            name = f"record {self._number}" + (UNNAMED.decode() if self.dice.random() < 0.3 else "")
            stored = Stored(name, self.log.epoch, self.now - age, self.log.topic_id)
            self.postgres.places[name], self.postgres.offsets[name] = stored, self.log.end
            self.log.records.append(stored)
        if self.dice.random() < 0.4:  # A transaction marker, or an aborted transaction before it, too.
            nameless = self.dice.choice((1, 1, 2, 4))
            self.log.records += [Stored(None, self.log.epoch, self.now, self.log.topic_id) for _ in range(nameless)]
        self.say(f"has records up to {self.log.end}, epoch {self.log.epoch}")

    def _leader(self) -> None:
        self.log.epoch += 1

    def _cut(self) -> None:
        self._cut_at(self.dice.randint(self.log.beginning, self.log.end))

    def _cut_at(self, end: int) -> None:
        del self.log.records[end:]
        self.log.epoch += 1
        self.say(f"is cut at {end}, epoch {self.log.epoch}")
        if self.owner is not None:
            self.owner.client.was_cut()

    def _delete(self) -> None:
        self.log.beginning = self.dice.randint(self.log.beginning, self.log.end)
        self.say(f"begins at {self.log.beginning}")

    def _compact(self) -> None:
        """Leave out some of the records whose key has a later one."""
        last = {key_of(each.name): at for at, each in enumerate(self.log.records) if each.name is not None}
        for at, each in enumerate(self.log.records):
            if each.name is not None and at < last[key_of(each.name)] and self.dice.random() < 0.5:
                self.log.records[at] = each._replace(name=None)
        self.say("is compacted")

    def _recreate(self) -> None:
        """Delete the topic, and create one of its name. An inbox that runs fetches that from its beginning."""
        self.log.records, self.log.beginning, self.log.epoch = [], 0, 0
        self.log.incarnation += 1
        if self.dice.random() < 0.5:
            self.log.committed = None
        if self.owner is not None:
            self.owner.client.was_recreated()
        self.say(f"is recreated, incarnation {self.log.incarnation}")

    def _expire(self) -> None:
        at = self.log.committed
        if self.owner is not None or at is None:
            return
        if self.postgres.covers(at.offset - 1, at.metadata or "", at.leader_epoch or 0):
            self.log.committed = None
            self.say("forgets the group's offset")

    # Inboxes.

    def _start(self) -> None:
        if self.owner is None:
            self._processes += 1
            self.owner = Process(self, f"inbox {self._processes}")
            self.say(f"starts {self.owner.name}")
            self.owner.loop._assignments.assigned(PARTITIONS)

    def _kill(self) -> None:
        """Kill the owner; its transactions are rolled back."""
        self.say("kills")
        self.running = [each for each in self.running if each.process is not self.owner]
        self.owner = None

    def _stop(self) -> None:
        if self.owner is not None:
            self.say("stops")
            housekeeping = SimpleNamespace(stop=lambda: None, wait_until_ended=lambda: True)
            with ExitStack() as ended:
                self.owner.inbox._hand_over(self.owner.loop, housekeeping, ended)
            self.stopped.append(self.owner)
            self.owner = None

    def _move(self) -> None:
        """The partition goes to a member that joins, and perhaps comes back to the same inbox."""
        if self.owner is None:
            return
        assignments = self.owner.loop._assignments
        give_up = self.dice.choice((assignments.revoked, assignments.lost))
        give_up(PARTITIONS)
        if self.dice.random() < 0.5:
            self.say("comes back")
            self.owner.loop._assignments.assigned(PARTITIONS)
        else:
            self.owner = None
            self._start()

    def _fetch(self) -> None:
        if self.owner is not None:
            self.owner.loop.take_in()
            self.owner.loop._assignments._ask_at = 0.0
            self.owner.loop._assignments.start_waiting()
            if self.owner_partitions():
                self.owner.loop._rereader.restart(self.owner.topic_ids.recreated({PARTITION.topic}))

    def _tick(self) -> None:
        """What the polling thread and housekeeping do once a second."""
        if self.owner is None:
            return
        self.owner.loop.commit_and_note()
        self.owner.loop.reached.write()

    def _handle(self) -> None:
        """Workers take records, and claim their keys. Some handlers end at once."""
        if self.owner is None:
            return
        quick = self.dice.random() < 0.6
        for taken in self.owner.queues.take(self.dice.randint(1, 6), self.now):
            self.running.append(Transaction(self.owner, taken))
            self._claim(self.running[-1])
            if quick:
                self._end(self.running[-1])

    def _claim(self, transaction: Transaction) -> None:
        keys = {record.idempotency_key for record in transaction.taken.records}
        if not any(keys & other.claimed for other in self.running if other is not transaction):
            transaction.claimed = keys

    def _commit(self) -> None:
        """A handler ends that waits for no other one."""
        if ready := [each for each in self.running if each.claimed]:
            self._end(self.dice.choice(ready))

    def _end(self, transaction: Transaction) -> None:
        process, taken = transaction.process, transaction.taken
        if not transaction.claimed:
            return
        done = self.dice.randint(0, len(taken.records)) if self.fails() else len(taken.records)
        for record in taken.records[:done]:
            self._take_effect(process, record)
        self.running.remove(transaction)
        process.queues.finish(taken, Outcome(done, None if done == len(taken.records) else 5.0), self.now)
        for waiting in self.running:
            if not waiting.claimed:
                self._claim(waiting)

    def _take_effect(self, process: Process, record: Received) -> None:
        if record.idempotency_key in self.postgres.handled:
            return
        assert record.value is not None
        name = record.value.decode()
        self.postgres.handled[record.idempotency_key] = Handled(self.now, name)
        self.postgres.effects[name] += 1
        self.say(f"{process.name} handles {name} at {record.offset}")
        if self.postgres.effects[name] > 1:
            self.broken.append(f"{name} had its effect twice")
        self._check_order(process, name)

    def _check_order(self, process: Process, name: str) -> None:
        number, key = number_of(name), key_of(name)
        for earlier in self.log.names():
            if number_of(earlier) < number and key_of(earlier) == key and not self.postgres.effects[earlier]:
                self.broken.append(f"{name} had its effect before {earlier}")
        if number < (latest := self.latest.get((process, key), 0)):
            self.broken.append(f"{name} had its effect after record {latest}, which is later")
        self.latest[process, key] = max(number, latest)

    def _pass_time(self) -> None:
        """Keys are forgotten; not while records wait that were fetched when their keys were remembered."""
        if self.running or (self.owner is not None and self.owner.queues.held):
            self.now += 1.0
            return
        self.now += self.dice.uniform(0, 2 * KEEP_SECONDS)
        for key, (at, name) in list(self.postgres.handled.items()):
            offset, stored = self.postgres.offsets[name], self.postgres.places[name]
            is_covered = (
                stored.topic_id != self.log.topic_id
                or self.postgres.covers(offset, stored.topic_id, stored.epoch)
                or self.log.covers(offset, stored)
            )
            if at < self.now - KEEP_SECONDS and is_covered:
                del self.postgres.handled[key]
        self.say(f"forgets; remembers {len(self.postgres.handled)}")

    def _check_end(self) -> None:
        self.broken += [f"{name} had no effect" for name in self.log.names() if not self.postgres.effects[name]]
        last = max((at for at, each in enumerate(self.log.records) if each.name is not None), default=-1)
        assert self.owner is not None
        reached = self.owner.queues.next_offsets().get(PARTITION)
        if last >= self.log.beginning and reached != last + 1:
            self.broken.append(f"the group is at {reached}, and the last record at {last}")


def run(seed: int, plan: Plan | None = None, *, tell: bool = False) -> Simulation:
    """Run the schedule of a seed."""
    simulation = Simulation(seed, plan or Plan.draw(seed), tell=tell)
    simulation.run()
    return simulation
