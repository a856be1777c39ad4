"""Harvesters, an application that writes, and their faults: one schedule, decided by one seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial

from outbox_plugin.core.election import Election, ElectionTiming
from outbox_plugin.core.leader_heartbeat import LeaderHeartbeat
from outbox_plugin.core.ordering_key import OrderingKeys
from outbox_plugin.core.progress import OutboxIdentity
from outbox_plugin.core.shards import Layout, Slice
from outbox_plugin.errors import ForeignOutbox, LayoutChanged, LogUnavailable, ServerUnavailable, StoreUnavailable
from outbox_plugin.relay.at_least_once import AtLeastOnce
from outbox_plugin.relay.events import HarvestEvent, Observer
from outbox_plugin.relay.exactly_once import ExactlyOnce
from outbox_plugin.relay.leader_term import OpenRelay, Relay
from outbox_plugin.relay.server_probe import ServerProbe
from outbox_plugin.relay.shard import Shard, ShardServices
from outbox_plugin.relay.shard_report import ShardReport
from outbox_plugin.relay.supervisor import Supervisor
from tests.simulation import plan as plans
from tests.simulation.attacker import write_to_control_topics
from tests.simulation.kafka import Broker, SimulatedAcknowledgingLog, SimulatedLog, SimulatedMembership
from tests.simulation.network import Mishaps, Server
from tests.simulation.plan import Fault, Plan
from tests.simulation.postgres import PLACE, Database, Disconnected, Event, MarkingStore, Service, Store, WakeUpCall
from tests.simulation.scheduler import Process, Scheduler

BATCH_ROWS = 100


class Simulation:
    """One schedule."""

    def __init__(self, seed: int, plan: Plan, *, tell: bool = False) -> None:
        self.plan = plan
        self.scheduler = Scheduler(seed)
        self.rng = self.scheduler.rng
        self.trace: list[str] = []
        self._tell = tell
        self.mishaps = Mishaps(plan.mishap_rate, plan.mishaps, plan.writing * 1.2, plan.longest_pause, plan.aims)
        self.postgres = Server(self.scheduler, "Postgres", StoreUnavailable, self.mishaps, self.say, plan.latency)
        kafka_latency = plan.latency if plan.kafka_latency is None else plan.kafka_latency
        self.kafka = Server(self.scheduler, "Kafka", LogUnavailable, self.mishaps, self.say, kafka_latency)
        self.service = Service(plan.delivery)
        self.services = {self.service}  # All services so far.
        self._adopted_at = -1.0
        self.database = Database(self.scheduler, self.say, plan.shards, self.service)
        self.database.slow_marks = plan.slow_marks
        if not plan.faults and not plan.mishap_rate:
            self.database.notifies = 1.0
        self.broker = Broker(self.scheduler, self.say, self.kafka)
        self.harvesters = [Harvester(self, f"h{number}") for number in range(plan.harvesters)]
        self.app = Process(self.scheduler, "app")
        self._writing = 0
        self._befalling = 0
        self.drained_in = 0.0  # Seconds after the last disturbance.
        self.ever_refused: set[str] = set()  # Events, and topics.

    def say(self, who: str, *what: object) -> None:
        """Note a step for the readable trace."""
        if self._tell:
            self.trace.append(f"{self.scheduler.now:9.4f} {who:8} {' '.join(map(str, what))}")

    def run(self) -> None:
        """Run the schedule until every row that was written has left the table.

        Raises:
            Stuck: some row never leaves.
        """
        try:
            for harvester in self.harvesters:
                harvester.start()
            for _ in range(self.plan.writers):
                self.app.spawn(self._write, "writer")
            for fault in self.plan.faults:
                self.app.spawn(partial(self._befall, fault), fault.kind)
            self.app.spawn(self._watch, "watch")
            self.scheduler.run(self.plan.writing * 2 + 240.0)
        finally:
            self.scheduler.end()

    def _watch(self) -> None:
        """End the schedule when nothing is left to do, and nothing late can come."""
        scheduler = self.scheduler
        scheduler.sleep(self.mishaps.until)
        while self._writing or self._befalling:
            scheduler.sleep(0.5)
        if self.plan.releases:
            self.broker.refused_events.clear()
            self.broker.refused_topics.clear()
        while scheduler.now < scheduler.disturbed_until:
            scheduler.sleep(0.5)
        if self.plan.releases:
            self.database.parked.clear()
            self.say("operator", "releases all that is parked")
        calm = scheduler.now
        while self._unsent():
            scheduler.sleep(0.5)
        self.drained_in = scheduler.now - calm
        scheduler.sleep(0.5)
        for harvester in self.harvesters:
            harvester.stop()
        while any(harvester.process.tasks[0].is_alive() for harvester in self.harvesters):
            scheduler.sleep(0.5)
            for harvester in self.harvesters:  # Also one that was started since.
                harvester.stop()
        scheduler.over = True

    def _unsent(self) -> bool:
        """Whether there are rows that nothing keeps from being published."""
        parked_keys = OrderingKeys(self.database.parked)
        return any(Store.as_read(row, 0) not in parked_keys for row in self.database.rows.values())

    def may_repeat(self, event: Event) -> bool:
        """Whether the event may arrive twice: by the delivery, or as it was there when the outbox was adopted."""
        return self.service.delivery == "at-least-once" or event.committed_at <= self._adopted_at

    @property
    def was_at_least_once(self) -> bool:
        """Whether the outbox has ever been harvested so."""
        return any(each.delivery == "at-least-once" for each in self.services)

    def adopt(self, service: Service) -> None:
        """Let the outbox be harvested so from now on."""
        self.service = service
        self.services.add(service)
        self.database.adopt(service)
        self._adopted_at = self.scheduler.now

    def _write(self) -> None:
        """A session of the application: some transactions, each with some events."""
        self._writing += 1
        rng, scheduler = self.rng, self.scheduler
        pace = self.plan.writing / self.plan.transactions
        for _ in range(self.plan.transactions):
            scheduler.sleep(rng.random() * 2 * pace)
            while self.database.closed_to_writers or self.postgres.down:
                scheduler.sleep(0.05)
            with suppress(Disconnected):
                self._transact()
        self._writing -= 1

    def _transact(self) -> None:
        rng, scheduler = self.rng, self.scheduler
        transaction = self.database.begin()
        transaction.create_time = self._create_time(transaction.create_time)
        dawdle = rng.choice((0.0, 0.001, 0.01, 0.1, 1.0))
        topic = "t" if rng.random() < 0.8 else "u"
        for _ in range(rng.choice((1, 1, 2, 3, 5))):
            id_ = transaction.draw()
            scheduler.sleep(rng.random() * dawdle)
            transaction.insert(id_, topic, f"k{rng.randrange(self.plan.keys)}", large=rng.random() < self.plan.large)
            scheduler.sleep(rng.random() * dawdle)
        if rng.random() < 0.2:
            transaction.roll_back()
        else:
            transaction.commit()

    def _create_time(self, now: int) -> int:
        """The creation time that the application writes instead of the database's default."""
        match self.plan.create_times:
            case "now":
                return now
            case "by the second":
                return now - now % 1_000_000
            case "the same":
                return 0

    def _befall(self, fault: Fault) -> None:
        self._befalling += 1
        self.scheduler.sleep(fault.at)
        self.say("fate", fault)
        _BEFALL[fault.kind](self, fault)
        self._befalling -= 1

    def _process(self, fault: Fault) -> Process:
        return self.harvesters[fault.target].process

    def _kill(self, fault: Fault) -> None:
        self._process(fault).kill()

    def _stop(self, fault: Fault) -> None:
        """Stop a harvester as by SIGTERM. It is started again later."""
        harvester = self.harvesters[fault.target]
        process = harvester.process
        harvester.stop()
        while harvester.process is process and harvester.runs:
            self.scheduler.sleep(0.2)
        self.scheduler.sleep(fault.seconds)
        if process.alive and process is harvester.process:
            harvester.start()

    def _pause(self, fault: Fault) -> None:
        self._process(fault).pause(fault.seconds)

    def _jump(self, fault: Fault) -> None:
        """Let a clock jump ahead, as that of a machine that has slept."""
        self._process(fault).clock += fault.seconds * 6

    def _cut_off(self, server: Server, fault: Fault) -> None:
        process = self._process(fault)
        server.cut_off.add(process)
        self.scheduler.sleep(fault.seconds)
        server.cut_off.discard(process)

    def _hold(self, fault: Fault) -> None:
        """Hold a harvester's way to one broker, which is not the one that has the leader topic."""
        process = self._process(fault)
        self.kafka.held.add(process)
        self.scheduler.sleep(fault.seconds)
        self.kafka.held.discard(process)

    def _kafka_down(self, fault: Fault) -> None:
        self.kafka.down = True
        self.scheduler.sleep(fault.seconds)
        self.kafka.down = False

    def _postgres_down(self, fault: Fault) -> None:
        self.database.restart(immediate=fault.seconds > 1.0)
        self.postgres.down = True
        self.scheduler.sleep(fault.seconds)
        self.postgres.down = False

    @contextmanager
    def _nobody_writes(self) -> Iterator[None]:
        """Where the table is locked exclusively."""
        self.database.closed_to_writers = True
        while self.database.open:
            self.scheduler.sleep(0.05)
        yield
        self.database.closed_to_writers = False

    def _truncate(self, fault: Fault) -> None:
        with self._nobody_writes():
            self.database.truncate(restart_identity=fault.kind == plans.TRUNCATE)

    def _set_sequence_back(self, fault: Fault) -> None:
        with self._nobody_writes():
            self.database.set_sequence_back()

    def _lock(self, fault: Fault) -> None:
        """A migration locks the table for long, and rewrites it in the end."""
        with self._nobody_writes():
            self.database.locked = True
            self.scheduler.sleep(fault.seconds)
            self.database.rewrite()
            self.database.locked = False

    def _restore(self, fault: Fault) -> None:
        database = self.database
        backup, clock = database.back_up(), database.clock()
        self.scheduler.sleep(fault.seconds / 2)
        self.say("fate", "restores the backup")
        database.restore(backup, new_incarnation=fault.kind == plans.RESTORE_ANEW)
        if fault.kind == plans.RESTORE_WITH_CLOCK:
            database.wall -= database.clock() - clock

    def _fail_over(self, fault: Fault) -> None:
        """An asynchronous standby is some tenths of a second behind."""
        standby = None
        if fault.kind == plans.FAIL_OVER_ASYNC:
            standby = self.database.back_up()
            self.scheduler.sleep(fault.seconds / 10)
            self.say("fate", "promotes the standby")
        self.database.fail_over(standby)

    def _reshard(self, fault: Fault) -> None:
        self.database.change_layout(fault.target)

    def _harvest_otherwise(self, fault: Fault) -> None:
        """The operator stops all harvesters, but for one that is paused or cannot be reached, and starts others."""
        delivery, group = self.service
        if fault.kind == plans.OTHER_DELIVERY:
            delivery = "exactly-once" if delivery == "at-least-once" else "at-least-once"
        else:
            group = f"g{len(self.services)}"
        running = [each for each in self.harvesters if not each.process.paused]
        for harvester in running:
            harvester.stop()
        deadline = self.scheduler.now + fault.seconds
        while any(each.runs for each in running) and self.scheduler.now < deadline:
            self.scheduler.sleep(0.1)
        while self.postgres.down:
            self.scheduler.sleep(0.05)
        self.adopt(Service(delivery, group))
        late = [each for each in running if each.runs]
        for harvester in running:
            if harvester.process.alive and not harvester.runs:
                harvester.start()
        for harvester in late:  # Each is started again, too, once it has ended, or somebody has killed it.
            while harvester.runs and harvester.is_stopping:
                self.scheduler.sleep(0.1)
            if harvester.process.alive and not harvester.runs:
                harvester.start()

    def _halt(self, fault: Fault) -> None:
        self.database.paused = True
        self.scheduler.sleep(fault.seconds)
        self.database.paused = False

    def _wrap(self, fault: Fault) -> None:
        self.database.next_xid += 2**31 + fault.target

    def _set_clock_back(self, fault: Fault) -> None:
        self.database.wall -= int(fault.seconds * 1e6)

    def _refuse_event(self, fault: Fault) -> None:
        """One of the next events is too large."""
        name = f"e{len(self.database.events) + fault.target}"
        self.broker.refused_events.add(name)
        self.ever_refused.add(name)

    def _refuse_topic(self, fault: Fault) -> None:
        """A topic is gone for a while; what was parked is released when it is back, and perhaps too early.

        At first it is only away: its rows are held back, and not refused.
        """
        self.broker.away_topics.add("u")
        self.scheduler.sleep(fault.seconds / 4)
        self.broker.away_topics.discard("u")
        self.broker.refused_topics.add("u")
        self.ever_refused.add("u")
        self.scheduler.sleep(fault.seconds)
        if fault.target == 1:
            self.database.parked.clear()
            self.scheduler.sleep(0.3)
        if self.plan.releases:
            self.broker.refused_topics.discard("u")
            self.database.parked.clear()

    def _lose_leader(self, fault: Fault) -> None:
        """A topic's partitions have no leader for a while."""
        topic = "u" if fault.target == 1 else "t"
        self.broker.leaderless_topics.add(topic)
        self.scheduler.sleep(fault.seconds)
        self.broker.leaderless_topics.discard(topic)

    def _own_id(self, fault: Fault) -> None:
        """Insert a row with an id that was never drawn, or that was drawn and not used."""
        while self.postgres.down or self.database.closed_to_writers:
            self.scheduler.sleep(0.05)
        below = min(0, self.database.sequence, *self.database.used) - 9
        unused = set(range(below, self.database.sequence)) - self.database.used
        transaction = self.database.begin()
        transaction.insert(min(unused) if fault.target == 1 else max(unused), "own", f"k{fault.target}")
        transaction.commit()

    def _write_batch(self, fault: Fault) -> None:
        """One transaction inserts many rows, some with the applications' first keys, the others with its own."""
        while self.postgres.down or self.database.closed_to_writers:
            self.scheduler.sleep(0.05)
        with suppress(Disconnected):
            transaction = self.database.begin()
            shared = 1 + self.rng.randrange(self.plan.keys)
            for _ in range(min(BATCH_ROWS, int(2.0 / self.plan.latency))):  # A slow way takes few in time.
                id_ = transaction.draw()
                self.scheduler.sleep(self.rng.random() * fault.seconds / 500)
                key = f"k{self.rng.randrange(shared)}" if self.rng.random() < 0.3 else f"b{self.rng.randrange(4)}"
                transaction.insert(id_, "t", key, large=self.rng.random() < self.plan.large)
            transaction.commit()

    def _let_an_attacker_write(self, fault: Fault) -> None:
        ends = self.scheduler.now + fault.seconds
        while self.scheduler.now < ends:
            self.scheduler.sleep(self.rng.random() * 0.4)
            self.say("attacker", write_to_control_topics(self.rng, self.broker, self.database))


_BEFALL: dict[str, Callable[[Simulation, Fault], None]] = {
    plans.BATCH: Simulation._write_batch,
    plans.KILL: Simulation._kill,
    plans.STOP: Simulation._stop,
    plans.PAUSE: Simulation._pause,
    plans.JUMP: Simulation._jump,
    plans.NO_KAFKA: lambda simulation, fault: simulation._cut_off(simulation.kafka, fault),
    plans.NO_POSTGRES: lambda simulation, fault: simulation._cut_off(simulation.postgres, fault),
    plans.HELD: Simulation._hold,
    plans.KAFKA_DOWN: Simulation._kafka_down,
    plans.POSTGRES_DOWN: Simulation._postgres_down,
    plans.TRUNCATE: Simulation._truncate,
    plans.RESTORE: Simulation._restore,
    plans.RESTORE_ANEW: Simulation._restore,
    plans.RESTORE_WITH_CLOCK: Simulation._restore,
    plans.TRUNCATE_ONLY: Simulation._truncate,
    plans.SET_BACK: Simulation._set_sequence_back,
    plans.LOCK: Simulation._lock,
    plans.FAIL_OVER: Simulation._fail_over,
    plans.FAIL_OVER_ASYNC: Simulation._fail_over,
    plans.REWRITE: lambda simulation, _: simulation.database.rewrite(),
    plans.UPDATE: lambda simulation, _: simulation.database.rewrite(0.5),
    plans.DELETE: lambda simulation, _: simulation.database.erase(0.5),
    plans.WRAP: Simulation._wrap,
    plans.RESHARD: Simulation._reshard,
    plans.HALT: Simulation._halt,
    plans.OTHER_DELIVERY: Simulation._harvest_otherwise,
    plans.OTHER_GROUP: Simulation._harvest_otherwise,
    plans.WALL_CLOCK_BACK: Simulation._set_clock_back,
    plans.BAD_EVENT: Simulation._refuse_event,
    plans.BAD_TOPIC: Simulation._refuse_topic,
    plans.NO_LEADER: Simulation._lose_leader,
    plans.OWN_ID: Simulation._own_id,
    plans.HOSTILE: Simulation._let_an_attacker_write,
    plans.EMPTIED: lambda simulation, _: simulation.broker.group(simulation.service.group).empty(),
}


class Harvester:
    """A harvester's machine. A harvester that is killed is started again there, as another process."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self._world = simulation
        self._name = name
        self._lives = 0
        self._supervised = 0
        self.process: Process

    @property
    def runs(self) -> bool:
        """Whether the process is there and has not handed over."""
        return self.process.alive and self.process.tasks[0].is_alive()

    @property
    def is_stopping(self) -> bool:
        """Whether it was asked to hand over and end, and has not been started again since."""
        return self._stopping

    def start(self) -> None:
        """Start a process."""
        self._lives += 1
        self._stopping = False
        self._service = self._world.service
        self.process = process = Process(self._world.scheduler, f"{self._name}.{self._lives}")
        process.at_death = self._restart_soon
        process.spawn(lambda: self._live(process), "supervisor")

    def stop(self) -> None:
        """Ask the process to hand over and end."""
        self._stopping = True

    def _restart_soon(self) -> None:
        scheduler, random = self._world.scheduler, self._world.scheduler.random
        self._world.say(self.process.name, "is dead")
        when = scheduler.now + random() ** 2 * 10.0
        scheduler.at(when, self.start)
        scheduler.disturbs(when)

    def _live(self, process: Process) -> None:
        simulation = self._world
        while not self._stopping:
            try:
                layout, identity = self._look(process)
                self._supervise(process, layout, identity)
            except (LayoutChanged, ServerUnavailable):
                simulation.scheduler.sleep(0.2)
            except ForeignOutbox:
                self._stopping = True
                self._restart_soon()

    def _look(self, process: Process) -> tuple[Layout, OutboxIdentity]:
        simulation, database = self._world, self._world.database

        def look() -> tuple[Layout, OutboxIdentity]:
            if database.served != self._service:
                if self._service != simulation.service:
                    raise ForeignOutbox("the outbox is harvested otherwise by now")
                simulation.adopt(self._service)  # A backup does not know of it; the operator does.
            return database.layout, OutboxIdentity(str(database.incarnation), PLACE)

        return simulation.postgres.call(process, "looks", look)

    def _supervise(self, process: Process, layout: Layout, identity: OutboxIdentity) -> None:
        simulation = self._world
        delivery, group = self._service
        self._supervised += 1
        instance = f"{process.name}-{self._supervised}"
        membership = SimulatedMembership(simulation.broker, simulation.kafka, process, group, layout.shards, instance)
        early = delivery == "exactly-once" or not simulation.plan.shares_election
        timing = ElectionTiming(spread=simulation.scheduler.random() * 0.3)
        services = ShardServices(
            self._open_relay(process, layout),
            membership.send,
            self._observe,
            process,
            lambda: "now",
            simulation.scheduler.random,
            ServerProbe(lambda: self._all_brokers_answer(process), process),
            ServerProbe(lambda: self._postgres_answers(process), process),
        )

        def shard(number: int) -> Shard:
            place = identity.incarnation, identity.place, layout.number
            template = LeaderHeartbeat(number, "waiting", "", instance, "host", 1, "now", *place)
            report = ShardReport(template, timing.heartbeat_interval)
            return Shard(number, Election(timing, early_takeover=early), report, services)

        shards = [shard(number) for number in range(layout.shards)]
        Supervisor(membership, shards, identity, layout.number, process).run(lambda: self._stopping)

    def _all_brokers_answer(self, process: Process) -> bool:
        kafka, scheduler = self._world.kafka, self._world.scheduler
        gives_up = scheduler.now + 1.0
        scheduler.sleep(kafka.latency)
        while process in kafka.held or not kafka.reaches(process):
            if scheduler.now > gives_up:
                return False
            scheduler.sleep(0.1)
        return True

    def _postgres_answers(self, process: Process) -> bool:
        self._world.scheduler.sleep(self._world.postgres.latency)
        return self._world.postgres.reaches(process)

    def _open_relay(self, process: Process, layout: Layout) -> OpenRelay:
        @contextmanager
        def open_relay(
            number: int, leader_id: str, should_wait: Callable[[], bool], observe: Observer
        ) -> Iterator[Relay]:
            simulation = self._world
            slice_ = Slice(number, layout.shards)
            delivery, group = self._service
            kind = MarkingStore if delivery == "at-least-once" else Store
            with closing(kind(simulation.database, simulation.postgres, process, slice_, layout)) as store:
                wake_up = WakeUpCall(store) if simulation.plan.wakes else None
                bad_rows = simulation.plan.bad_rows
                if isinstance(store, MarkingStore):
                    acknowledging = SimulatedAcknowledgingLog(
                        simulation.broker, simulation.kafka, process, leader_id, should_wait
                    )
                    yield AtLeastOnce(
                        number, leader_id, store, acknowledging, process, observe, wake_up=wake_up, bad_rows=bad_rows
                    )
                    return
                log = SimulatedLog(simulation.broker, simulation.kafka, process, group, slice_, should_wait)
                yield ExactlyOnce(number, leader_id, store, log, process, observe, wake_up=wake_up, bad_rows=bad_rows)

        return open_relay

    def _observe(self, event: HarvestEvent) -> None:
        self._world.say(self.process.name, event)
