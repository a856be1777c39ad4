"""Inboxes of one group, and partitions that are cut again and again: the product's own `Inbox`; simulated servers.

A seed draws a plan and a schedule. What runs is everything between librdkafka and the handlers, and between them and
the database: what an inbox does with the records that it polls, where it goes on, which partitions it pauses, what it
commits, which positions it writes, and what it does with records that fail. Kafka (`inbox_kafka`) and Postgres
(`inbox_postgres`) are simulated; the threads of an inbox are, too: one step at a time, chosen by the seed. A handler's
transaction claims the keys of its records in one step, and is committed in another one. In between, anything may
happen, and its inbox may lose the partition. A claim waits for the transaction that has claimed the same key.

There are up to three partitions of two topics, and up to two inboxes. What befalls them: the leader of a partition
changes, with the end of its log lost or not; retention deletes the first records, and compaction others; transactions
are aborted; a topic is deleted and recreated, with all its partitions; inboxes are killed, stopped, and lose single
partitions to each other, with a hand-over or without, in which case they may not know it for a while; Kafka forgets the
group's offsets while it has no member; Kafka does not return a topic's id; commits fail; Postgres is away, or is lost
at a commit; handlers fail, with some records always; an operator has dead letters tried again; an inbox may hold only a
few records, so that it pauses partitions; and time passes, so that idempotency keys are forgotten.
A key is forgotten when it is old enough, no inbox holds records of its partition, and a position that is kept covers
its record, and was not written by an inbox that had lost the partition: `keep` is promised to be longer than positions
lag and records wait. For the same reason Kafka forgets no offset that is ahead of the position in Postgres.

At each step: no record has its effect twice, and no record of a key has its effect before an earlier one that Kafka
still has and that is no dead letter, or that the same inbox handles. At the end, when all is well: each record that
Kafka still has had its effect or is a dead letter; the group is at the end of each partition; no partition is paused;
and each dead letter is still there, or had its effect. When all of them are tried again, each has its effect, and no
position changes.

What is left out: dead letters that are discarded or too old; handlers that end their own transactions, and the SQL of
positions and of what is deleted; offsets that another consumer or an operator commits; rebalances that take several
partitions at once; a recreated topic that is longer than the old one before an inbox has noticed it; a second cut that
librdkafka does not look for; and a second log of a partition, that of a replica which led before, because keys are
remembered for longer than replicas differ.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Self
from unittest import mock

import psycopg

from outbox_plugin.adapters import topic_ids
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.inbox import (
    Inbox,
    assignments,
    consumer,
    dead_letters,
    dispatcher,
    handled_keys,
    handling,
    poll_loop,
    rereader,
)
from outbox_plugin.inbox.handover import RELEASE_SECONDS
from outbox_plugin.inbox.key_queues import HandlingResult, KeyBatch, KeyQueues
from outbox_plugin.inbox.received import Received
from tests.inbox_support import NOWHERE
from tests.inbox_support import poll_loop as make_poll_loop
from tests.simulation.inbox_kafka import Client, Kafka, Log, Stored, as_assigned, key_of, make_topic_ids, number_of
from tests.simulation.inbox_plan import GROUP, KEEP_SECONDS, RETRY, STEP_SECONDS, Chance, Plan
from tests.simulation.inbox_postgres import Postgres, Session, WrittenPositions

SETTLED_ROUNDS = 2_000  # By then, all is handled.
MAX_INBOXES = 2
WORKERS = 4
MAX_APPENDED = 8  # How many records and markers are appended at once.
MAX_TAKEN = 6  # How many records one transaction handles at most.


class Process:
    """One inbox, and its client."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        chance, plan = simulation.chance, simulation.plan
        self.name = name
        self.client: Any = Client(chance, simulation.kafka, lambda tp: simulation.owners.get(tp) is self)
        inbox: Any = Inbox(
            NOWHERE,
            group=GROUP,
            topics=[*simulation.kafka.topics],
            handler=lambda connection, event: None,
            batch_size=MAX_TAKEN if plan.in_batches else None,
            concurrency=WORKERS,
        )
        inbox._handover = SimpleNamespace(locked=lambda _: nullcontext(lambda _: None))
        inbox._dispatcher._changed = Condition(simulation)
        inbox._dispatcher._batch_limit = BatchLimit(chance)
        self.inbox, self.dispatcher = inbox, inbox._dispatcher
        self.topic_ids: Any = make_topic_ids(chance, simulation.kafka)
        written: Any = WrittenPositions(
            chance,
            simulation.postgres,
            locked=simulation.locked_partitions,
            is_late=lambda tp: simulation.owners.get(tp, self) is not self,
        )
        keep = timedelta(seconds=KEEP_SECONDS)
        self.loop = make_poll_loop(self.client, written, self.topic_ids, keep=keep, dispatcher=self.dispatcher)
        self.handling = handling.Handling(NOWHERE.table, GROUP, RETRY, chance.dice.random, in_batches=plan.in_batches)
        self.letters: Sequence[Received] = []  # Those that housekeeping has read, and not queued yet.
        self.workers: list[Worker] = []
        self.locks_until = 0.0  # While it stops, it keeps the partitions from their next owners whose records it has.
        # The last number of each key, of what it has handled.
        self.latest: dict[tuple[TopicPartition, bytes], int] = {}

    @property
    def queues(self) -> KeyQueues:
        queues: KeyQueues = self.dispatcher._queues
        return queues

    def has_not_noticed(self, log: Log) -> bool:
        """Whether it takes a recreated topic for the old one."""
        return log.tp in self.client.assigned and self.topic_ids.of(log.tp.topic) not in ("", log.topic_id)

    def busy(self) -> set[TopicPartition]:
        """The partitions whose records its handlers have."""
        return {tp for each in self.workers for tp in each.partitions}


class Condition:
    """The dispatcher's lock, of which nobody else ever has hold. While an inbox waits, handlers may end."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def notify_all(self) -> None: ...

    def wait_for(self, condition: Callable[[], Any], patience_seconds: float) -> Any:
        if patience_seconds > 0 and not condition():
            self._simulation.let_handlers_end()
        return condition()


class BatchLimit:
    """Has a worker take any number of records."""

    def __init__(self, chance: Chance) -> None:
        self._chance = chance

    def limit(self, *_: object) -> int:
        return self._chance.dice.randint(1, MAX_TAKEN)

    def start(self, _: int) -> None: ...

    def finish(self, *_: object, **__: object) -> None: ...


class Worker:
    """A worker that has taken records, until it gives them back."""

    def __init__(self, process: Process, session: Session, batches: list[KeyBatch]) -> None:
        self._process = process
        self.session = session
        self._batches = batches
        self._work: Coroutine[Any, Any, HandlingResult] = process.handling.handle(session, batches)
        self.partitions = {TopicPartition(each.topic, each.partition) for taken in batches for each in taken.records}
        process.workers.append(self)

    def step(self) -> bool:
        """Go on until a handler takes its time, or waits for another transaction. Returns whether it may go on."""
        try:
            self._work.send(None)
        except StopIteration as ended:
            self._process.workers.remove(self)
            self._process.dispatcher.finish(self._batches, ended.value, 0.0)
            return False
        return not self.session.waits

    def kill(self) -> None:
        """End it; its transaction is rolled back."""
        self._work.close()


class Simulation:
    """One schedule. Each partition has an owner among the members of the group, or none for a while."""

    present: Simulation  # The one that was made last.

    def __init__(self, seed: int, plan: Plan, *, tell: bool = False) -> None:
        Simulation.present = self
        poll_loop.MEMORY_LIMIT = plan.limit
        self.plan = plan
        self.chance = Chance(seed, plan, tell=tell)
        self.dice, self.say = self.chance.dice, self.chance.say
        self.kafka, self.postgres = Kafka(plan.partitions), Postgres()
        self.members: list[Process] = []
        self.stopped: list[Process] = []  # Those that have left the group, and whose handlers go on.
        self.owners: dict[TopicPartition, Process] = {}
        self.unaware: dict[TopicPartition, Process] = {}  # Those that have lost a partition, and do not know it yet.
        self.broken: list[str] = []
        self._processes = 0

    @property
    def trace(self) -> list[str]:
        return self.chance.trace

    def run(self) -> None:
        """Run the schedule until something is broken, or to its end."""
        for part in (self._take_steps, self._end, self._end_after_a_restart, self._try_letters_again):
            if not self.broken:
                part()

    def _take_steps(self) -> None:
        kinds, weights = [*self.plan.weights], [*self.plan.weights.values()]
        for kind in self.dice.choices(kinds, weights, k=self.plan.steps):
            self.step(kind)
            if self.broken:
                return

    def _end(self) -> None:
        self.settle()
        self.check_waiting()
        for _ in range(2):  # A cut shows as soon as a partition has a record from after it where the group goes on.
            for log in self.kafka.logs.values():
                self._append_to(log)
            self.settle()
        self.check_end()

    def _end_after_a_restart(self) -> None:
        """Nothing but old records is left, so that an inbox that starts notices a cut before its position."""
        while self.members:
            self._kill()
        self._pass_time()
        for tp, log in self.kafka.logs.items():
            row, at = self.postgres.rows.get(tp), log.committed  # A commit may have failed.
            if row is not None and at is not None and (end := min(row.next_offset, at.offset) - 2) > log.beginning:
                self._cut_at(log, end)
        self.settle()
        self.check_end()

    def settle(self) -> None:
        """All is well, and for long enough."""
        self.chance.well = True
        self._notice_all()
        quiet = rounds = 0
        while quiet < 5 and not self.broken:
            if (rounds := rounds + 1) > SETTLED_ROUNDS:
                self.broken.append("there is no end of it, though all is well")
            self.chance.now += 10.0  # So that a record is tried again that has failed.
            self._start()
            for process in self.members:
                self._fetch_by(process)
                self._handle_by(process)
            self._end_handlers()
            for process in self.members:
                self._tick_by(process)
            quiet = quiet + 1 if self._is_quiet() else 0

    def _is_quiet(self) -> bool:
        if any(each.retry for each in self.postgres.letters.values()) or any(each.queues.held for each in self.members):
            return False
        return all(self.owners[tp].client.has_reached_end(tp) for tp in self.kafka.logs)

    def _end_handlers(self) -> None:
        """Let all handlers end."""
        while ready := self._ready():
            for worker in ready:
                worker.step()

    def _try_letters_again(self) -> None:
        """An operator has mended what the records need, and has all dead letters tried again."""
        before = self._positions()
        self.say("all dead letters are tried again")
        for letter in self.postgres.letters.values():
            self.postgres.mended.add(letter.name)
        self._ask_retry([*self.postgres.letters])
        self.settle()
        self.broken += [f"{each.name} is still a dead letter" for each in self.postgres.letters.values()]
        self.broken += [f"{name} is lost" for name in self.postgres.gave_up if not self.postgres.effects[name]]
        if self._positions() != before:
            self.broken.append(f"dead letters have moved the positions {before} to {self._positions()}")

    def _positions(self) -> list[object]:
        return [
            (tp, log.committed and log.committed.offset, self.postgres.rows.get(tp), self._reached(tp))
            for tp, log in self.kafka.logs.items()
        ]

    def step(self, kind: str) -> None:
        """Let one thing happen, if it can."""
        self.chance.now += STEP_SECONDS
        getattr(self, f"_{kind.replace(' ', '_')}")()

    # Kafka.

    def _log(self) -> Log:
        return self.dice.choice([*self.kafka.logs.values()])

    def _append(self) -> None:
        self._append_to(self._log())

    def _append_to(self, log: Log) -> None:
        if log.end + MAX_APPENDED > log.end_before and any(each.has_not_noticed(log) for each in self.members):
            return  # A recreated topic does not become longer than the old one before an inbox has noticed it.
        for _ in range(self.dice.randint(1, 4)):
            age = self.dice.choice((0.0, 0.0, self.dice.uniform(0, 3 * KEEP_SECONDS)))
            unnamed, bad = self.dice.random() < 0.3, self.dice.random() < self.plan.bad
            self.kafka.append(log, self.chance.now - age, unnamed=unnamed, bad=bad)
        if self.dice.random() < 0.4:  # A transaction marker, or an aborted transaction before it, too.
            nameless = self.dice.choice((1, 1, 2, 4))
            log.records += [Stored(None, log.epoch, self.chance.now, log.topic_id) for _ in range(nameless)]
        self.say(f"{log} has records up to {log.end}, epoch {log.epoch}")

    def _leader(self) -> None:
        self._log().epoch += 1

    def _cut(self) -> None:
        log = self._log()
        self._cut_at(log, self.dice.randint(log.beginning, log.end))

    def _cut_at(self, log: Log, end: int) -> None:
        del log.records[end:]
        log.epoch += 1
        self.say(f"{log} is cut at {end}, epoch {log.epoch}")
        for each in self.members:
            if log.tp in each.client.assigned:
                each.client.assigned[log.tp].was_cut()

    def _delete(self) -> None:
        log = self._log()
        log.beginning = self.dice.randint(log.beginning, log.end)
        self.say(f"{log} begins at {log.beginning}")

    def _compact(self) -> None:
        """Leave out some of the records whose key has a later one."""
        log = self._log()
        last = {key_of(each.name): at for at, each in enumerate(log.records) if each.name is not None}
        for at, each in enumerate(log.records):
            if each.name is not None and at < last[key_of(each.name)] and self.dice.random() < 0.5:
                log.records[at] = each._replace(name=None)
        self.say(f"{log} is compacted")

    def _recreate(self) -> None:
        """Delete a topic, and create one of its name. An inbox that runs fetches that from its beginning."""
        topic = self.dice.choice([*self.kafka.topics.values()])
        topic.recreate()
        forgets = self.dice.random() < 0.5
        for log in topic.logs:
            if forgets:
                log.committed = None
            for each in self.members:
                if log.tp in each.client.assigned:
                    each.client.assigned[log.tp].was_recreated()
        self.say(f"{topic.name} is recreated, incarnation {topic.incarnation}")

    def _expire(self) -> None:
        if self.members:
            return
        for tp, log in self.kafka.logs.items():
            at = log.committed
            if at is not None and self.postgres.covers(tp, at.offset - 1, at.metadata or "", at.leader_epoch or 0):
                log.committed = None
                self.say(f"{log} has no committed offset any more")

    # Inboxes.

    def _start(self) -> None:
        """An inbox starts if there is none, or joins. The partitions that nobody has are shared; else, it takes one."""
        joins = not self.members or (len(self.members) < MAX_INBOXES and self.dice.random() < 0.3)
        joined = self._join() if joins else None
        waiting = [tp for tp in self.kafka.logs if tp not in self.owners]
        if joined is not None and not waiting and len(self.owners) > 1:
            self._assign(joined, [self._give_up(self.dice.choice([*self.owners]))])
        shares: dict[Process, list[TopicPartition]] = {}
        for tp in waiting:
            shares.setdefault(self.dice.choice(self.members), []).append(tp)
        for process, share in shares.items():
            self._assign(process, share)

    def _join(self) -> Process:
        self._processes += 1
        self.members.append(Process(self, f"inbox {self._processes}"))
        self.say(f"starts {self.members[-1].name}")
        return self.members[-1]

    def _assign(self, process: Process, partitions: Collection[TopicPartition]) -> None:
        for tp in partitions:
            if self.unaware.get(tp) is process:
                self._notice(tp)
        self.owners.update(dict.fromkeys(partitions, process))
        self.say(f"{process.name} gets {[tuple(tp) for tp in partitions]}")
        process.loop._assignments.assigned(as_assigned(partitions))

    def _give_up(self, tp: TopicPartition) -> TopicPartition:
        """Have the owner of a partition give it up, or lose it."""
        process = self.owners[tp]
        if self.dice.random() < 0.5:
            self.say(f"{process.name} hands over {tuple(tp)}")
            process.loop._assignments.revoked(as_assigned([tp]))
        else:
            self.say(f"{process.name} loses {tuple(tp)}")
            if tp in self.unaware:
                self._notice(tp)
            self.unaware[tp] = process
            if self.dice.random() < 0.5:
                self._notice(tp)
        del self.owners[tp]
        return tp

    def _notice(self, tp: TopicPartition) -> None:
        """An inbox notices that it has lost a partition."""
        process = self.unaware.pop(tp)
        self.say(f"{process.name} notices that it has lost {tuple(tp)}")
        process.loop._assignments.lost(as_assigned([tp]))

    def _notice_all(self) -> None:
        for tp in [*self.unaware]:
            self._notice(tp)

    def _move(self) -> None:
        """A partition goes to a member that joins, or to any other, or comes back; or nobody has it for a while."""
        if not self.owners:
            return
        tp = self.dice.choice([*self.owners])
        process = self.owners[tp]
        self._give_up(tp)
        if (way := self.dice.random()) < 0.3 and len(self.members) < MAX_INBOXES:
            self._assign(self._join(), [tp])
        elif way < 0.6:
            self._assign(self.dice.choice(self.members), [tp])
        elif way < 0.95:
            self._assign(process, [tp])

    def _leave(self, process: Process) -> None:
        self.members.remove(process)
        self.owners = {tp: owner for tp, owner in self.owners.items() if owner is not process}
        self.unaware = {tp: each for tp, each in self.unaware.items() if each is not process}

    def _kill(self) -> None:
        """Kill a member; its transactions are rolled back."""
        if not self.members:
            return
        process = self.dice.choice(self.members)
        self.say(f"kills {process.name}")
        for worker in process.workers:
            worker.kill()
        process.workers.clear()
        self._leave(process)

    def _stop(self) -> None:
        if not self.members:
            return
        process = self.dice.choice(self.members)
        self.say(f"stops {process.name}")
        housekeeping = SimpleNamespace(stop=lambda: None, wait_until_ended=lambda: True)
        with ExitStack() as ended:
            process.inbox._hand_over(process.loop, housekeeping, ended)
        process.locks_until = self.chance.now + RELEASE_SECONDS
        self.stopped.append(process)
        self._leave(process)

    def locked_partitions(self) -> set[TopicPartition]:
        """The partitions that inboxes have locked which stop."""
        return {tp for each in self.stopped if self.chance.now < each.locks_until for tp in each.busy()}

    def _lose(self) -> None:
        """An inbox notices what it has lost."""
        if self.unaware:
            self._notice(self.dice.choice([*self.unaware]))

    def _owner(self) -> list[Process]:
        """One of those that have partitions, or think so, if there are any."""
        owners = [*self.owners.values(), *self.unaware.values()]
        return [self.dice.choice(owners)] if owners else []

    def _fetch(self) -> None:
        for process in self._owner():
            self._fetch_by(process)

    def _fetch_by(self, process: Process) -> None:
        """One round of the polling thread."""
        loop = process.loop
        loop.take_in()
        loop._assignments._ask_at = process.topic_ids._ask_at = 0.0
        loop._assignments.start_waiting()
        loop._pauses.update(process.client, poll_loop.MEMORY_LIMIT, poll_loop.ROOM_SECONDS)
        self._look_for_recreated_topics(process)

    def _look_for_recreated_topics(self, process: Process) -> None:
        topics = {tp.topic for tp in process.inbox.partitions}
        process.loop._rereader.restart(process.topic_ids.recreated(topics))

    def _tick(self) -> None:
        for process in self._owner():
            self._tick_by(process)

    def _tick_by(self, process: Process) -> None:
        """What the polling thread and housekeeping do once a second. Dead letters are read, and queued later."""
        process.loop.commit_and_note()
        process.loop.reached.write()
        process.dispatcher.add(process.letters)
        process.letters = []
        connection = self.postgres.letters_to_retry(self.chance)
        if partitions := process.inbox.partitions:
            try:
                process.letters = dead_letters.to_retry(connection, NOWHERE, GROUP, partitions)
            except psycopg.OperationalError:
                return

    def _handle(self) -> None:
        for process in self._owner():
            self._handle_by(process)

    def _handle_by(self, process: Process) -> None:
        """A worker takes records. Some handlers end at once."""
        if len(process.workers) >= WORKERS:
            return
        batches, _ = process.dispatcher.take()
        if batches:
            session = Session(self.chance, self.postgres, lambda record: self._judge(process, record))
            worker = Worker(process, session, batches)
            goes_on = worker.step()
            if self.dice.random() < 0.6:
                self._let_end(worker, goes_on)

    def _ready(self) -> list[Worker]:
        """The workers whose transactions wait for no other one."""
        return [
            worker for each in (*self.members, *self.stopped) for worker in each.workers if not worker.session.waits
        ]

    def _commit(self) -> None:
        """A handler ends that waits for no other one; sometimes all those of its worker do."""
        if ready := self._ready():
            worker = self.dice.choice(ready)
            self._let_end(worker, worker.step() and self.dice.random() < 0.5)

    def _let_end(self, worker: Worker, goes_on: bool) -> None:
        while goes_on:
            goes_on = worker.step()

    def let_handlers_end(self) -> None:
        """Some handlers end while an inbox waits for them."""
        for worker in self._ready():
            if self.dice.random() < 0.3:
                self._let_end(worker, not worker.session.waits)

    def _retry(self) -> None:
        """An operator has some dead letters tried again, and has mended what some of them need."""
        chosen = [number for number in self.postgres.letters if self.dice.random() < 0.5]
        for number in chosen:
            if self.dice.random() < 0.5:
                self.postgres.mended.add(self.postgres.letters[number].name)
        self._ask_retry(chosen)

    def _ask_retry(self, letters: Collection[int]) -> None:
        for number in letters:
            self.postgres.ask_retry(number)

    # What is judged.

    def _judge(self, process: Process, record: Received) -> None:
        """Judge an effect that was committed."""
        assert record.value is not None
        name = record.value.decode()
        self.postgres.effects[name] += 1
        again = "" if record.dead_letter is None else ", a dead letter,"
        self.say(f"{process.name} handles {name}{again} at {record.topic}/{record.partition}/{record.offset}")
        tp = TopicPartition(record.topic, record.partition)
        if self.postgres.effects[name] > 1:
            self.broken.append(f"{name} had its effect twice")
        if record.dead_letter is None:
            self._check_order(process, tp, name)

    def _check_order(self, process: Process, tp: TopicPartition, name: str) -> None:
        number, key = number_of(name), key_of(name)
        for earlier in self.kafka.logs[tp].names():
            if number_of(earlier) < number and key_of(earlier) == key and not self.postgres.is_done(earlier):
                self.broken.append(f"{name} had its effect before {earlier}")
        if number < (latest := process.latest.get((tp, key), 0)):
            self.broken.append(f"{name} had its effect after record {latest}, which is later")
        process.latest[tp, key] = max(number, latest)

    def _pass_time(self) -> None:
        """Keys are forgotten; not while records wait that were fetched when their keys were remembered."""
        self._notice_all()
        for process in self.members:
            self._look_for_recreated_topics(process)  # An answer does not take that long.
        self.chance.now += self.dice.uniform(0, 2 * KEEP_SECONDS)
        held = {tp for each in self.members for tp, load in each.queues.loads().items() if load.records}
        held = held.union(*(each.client.with_records_ahead() for each in self.members))
        held = held.union(*(each.busy() for each in (*self.members, *self.stopped)))
        for key, (at, name) in list(self.postgres.handled.items()):
            tp, offset, stored = self.kafka.places[name]
            log = self.kafka.logs[tp]
            is_covered = (
                stored.topic_id != log.topic_id
                or self.postgres.covers(tp, offset, stored.topic_id, stored.epoch)
                or log.covers(offset, stored)
            )
            if at < self.chance.now - KEEP_SECONDS and is_covered and tp not in held:
                del self.postgres.handled[key]
        self.say(f"forgets; remembers {len(self.postgres.handled)}")

    def _reached(self, tp: TopicPartition) -> int | None:
        return self.owners[tp].queues.next_offsets().get(tp)

    def check_waiting(self) -> None:
        """Judge the state in which nothing is written any more.

        No record waits for a later one, but for those from after a cut that no record shows yet.
        """
        for tp, log in self.kafka.logs.items():
            at = self._reached(tp)
            epoch = None if at is None else self.owners[tp].loop._epochs.before(tp, at)
            self.broken += [
                f"{each.name} waits for a later record"
                for each in log.records[log.beginning :]
                if each.name is not None and (epoch is None or each.epoch <= epoch)
                if not self.postgres.is_done(each.name)
            ]

    def check_end(self) -> None:
        """Judge the state in which all is well."""
        for tp, log in self.kafka.logs.items():
            self.broken += [f"{name} had no effect" for name in log.names() if not self.postgres.is_done(name)]
            if log.last >= log.beginning and self._reached(tp) != log.last + 1:
                self.broken.append(f"the group is at {self._reached(tp)} of {log}, and the last record at {log.last}")
        letters = {letter.name for letter in self.postgres.letters.values()}
        for name in self.postgres.gave_up - letters:
            if not self.postgres.effects[name]:
                self.broken.append(f"the dead letter {name} is lost")
        for process in self.members:
            if paused := {*process.client.paused, *process.loop._pauses._paused}:
                self.broken.append(f"{process.name} has paused {paused}, though it holds nothing")


@contextmanager
def in_simulated_time() -> Iterator[None]:
    """Time is that of the simulation that was made last, and nothing waits; statements come by their names."""

    def now() -> float:
        return Simulation.present.chance.now

    clock = SimpleNamespace(time=now, monotonic=now)
    with ExitStack() as patched:
        for module in (assignments, consumer, dispatcher, poll_loop, topic_ids):
            patched.enter_context(mock.patch.object(module, "time", clock))
        for module in (dead_letters, handled_keys, handling):
            patched.enter_context(mock.patch.object(module, "statement", lambda _, name, __: name))
        patched.enter_context(mock.patch.object(poll_loop, "QUEUED_SECONDS", 50.0))
        patched.enter_context(mock.patch.object(poll_loop, "MEMORY_LIMIT", poll_loop.MEMORY_LIMIT))
        patched.enter_context(mock.patch.object(rereader, "UNKNOWN_ID_SECONDS", 0.0))
        yield


def run(seed: int, plan: Plan | None = None, *, tell: bool = False) -> Simulation:
    """Run the schedule of a seed. Call it within `in_simulated_time`."""
    simulation = Simulation(seed, plan or Plan.draw(seed), tell=tell)
    simulation.run()
    return simulation
