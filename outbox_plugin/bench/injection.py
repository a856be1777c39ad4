"""Carries out the faults of a chaos run on real servers, and records when each was active."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psycopg
from confluent_kafka import KafkaException

from outbox_plugin.bench.bad_rows import BadRows
from outbox_plugin.bench.faults import SOAK_SECONDS, TABLE_KINDS, Actor, Fault, Kind
from outbox_plugin.bench.fleet import Fleet
from outbox_plugin.bench.gaps import Injected
from outbox_plugin.bench.proxy import DIRECTIONS, Direction, Proxy
from outbox_plugin.bench.schema_changes import change_table
from outbox_plugin.bench.servers import Route, Servers
from outbox_plugin.bench.temporary_outbox import Tell
from outbox_plugin.bench.writer import KEYS, Row, Writer
from outbox_plugin.embedded.cluster import COORDINATING_TOPICS
from outbox_plugin.errors import OutboxError
from outbox_plugin.settings import Settings

BURST_ROWS = 20_000  # In flight while the table is changed.
_POLL_SECONDS = 0.1
_CUT_EVERY_SECONDS = 1.0


class Injector:
    """Injects faults, with a method for each actor. The faults of one actor do not overlap."""

    def __init__(
        self, servers: Servers, settings: Settings, topic: str, fleet: Fleet, writer: Writer, seconds: float, note: Tell
    ) -> None:
        """Nothing is injected yet.

        Args:
            servers: that faults are injected into.
            settings: of the harvesters.
            topic: that the events go to.
            fleet: the harvesters.
            writer: what writes the events.
            seconds: how long the run takes.
            note: is called with each action.
        """
        self._servers = servers
        self._settings = settings
        self._topic = topic
        self._fleet = fleet
        self._writer = writer
        self._note = note
        self._spared = 0 if seconds >= SOAK_SECONDS else None  # A soak measures one harvester that is never killed.
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self.bad_rows = BadRows(settings)
        self.injected: list[Injected] = []
        self.done: Counter[str] = Counter()
        self.over = threading.Event()
        self.by_actor: dict[Actor, Callable[[Fault], None]] = {
            "harvesters": self._disturb_harvester,
            "brokers": self._kill_broker,
            "postgres": self._disturb_postgres,
            "network": self._disturb_network,
            "clients": self._disturb_as_client,
        }

    def _disturb_harvester(self, fault: Fault) -> None:
        if (slot := self._victim(fault)) is None:
            return
        match fault.kind:
            case "kill":
                with self._active(fault.kind, f"kill harvester {slot}"):
                    self._fleet.kill(slot)
            case "pause":
                now = self._elapsed
                self._note(description := f"pause harvester {slot} for {fault.seconds:.1f} s")
                self._fleet.pause(slot, fault.seconds)
                self._count(Injected(fault.kind, description, now, now + fault.seconds))
            case _:
                with self._active(fault.kind, f"terminate harvester {slot}"):
                    self._fleet.terminate(slot)

    def _victim(self, fault: Fault) -> int | None:
        """The slot of the victim; None when the run is over. Waits as long as no harvester is alive."""
        leader = self._fleet.leader() if fault.leader else None
        is_fatal = fault.kind in ("kill", "terminate")
        while True:
            alive = [slot for slot in self._fleet.pids() if not (is_fatal and slot == self._spared)]
            if alive:
                return leader if leader in alive else alive[fault.victim % len(alive)]
            if self.over.wait(_POLL_SECONDS):
                return None

    def _kill_broker(self, fault: Fault) -> None:
        cluster = self._servers.cluster
        node = cluster.nodes[fault.victim]
        with self._active(fault.kind, f"{node.name} killed, away for {fault.seconds:.1f} s"):
            node.kill()
            self.over.wait(fault.seconds)
            cluster.restart(node)
            with suppress(KafkaException):  # Leadership goes back, so that the next one to die has some.
                for topic in (self._topic, *COORDINATING_TOPICS):
                    cluster.elect_preferred(topic)

    def _disturb_postgres(self, fault: Fault) -> None:
        postgres = self._servers.postgres
        if fault.kind == "failover":
            with self._active(fault.kind, "Postgres killed, its synchronous standby promoted"):
                postgres.fail_over()
            with self._active(None, "Postgres is copied to a new standby"):
                postgres.add_standby()
            return
        with self._active(fault.kind, f"Postgres stopped immediately, away for {fault.seconds:.1f} s"):
            postgres.stop_immediately()
            self.over.wait(fault.seconds)
            postgres.start_again()

    def _disturb_network(self, fault: Fault) -> None:
        if (slot := self._victim(fault)) is None:
            return
        proxies, server = reached(self._servers.routes[slot], fault.target)
        directions = directions_of(fault)
        which = "" if fault.kind in ("network cut", "network half-open") else f", {' and '.join(directions)}"
        with self._active(fault.kind, f"{fault.kind}: harvester {slot} and {server}{which}, {fault.seconds:.1f} s"):
            try:
                disturb(fault.kind, proxies, directions)
                until = time.monotonic() + fault.seconds
                while not self.over.wait(max(0.0, min(_CUT_EVERY_SECONDS, until - time.monotonic()))):
                    if time.monotonic() >= until:
                        break
                    if fault.kind == "network cut":
                        disturb(fault.kind, proxies, directions)
            finally:
                for proxy in proxies:
                    proxy.restore()

    def _disturb_as_client(self, fault: Fault) -> None:
        if fault.kind in TABLE_KINDS:
            with self._active(fault.kind, f"{fault.kind} while {BURST_ROWS:,} rows drain"):
                burst = [Row(f"key-{number % KEYS}") for number in range(BURST_ROWS)]
                if self._committed(self._writer.write(burst)):
                    self._insist(lambda: change_table(fault.kind, self._settings))
            return
        with self._active(fault.kind, f"{fault.kind}: two rows"):
            if self._committed(self._writer.write(self.bad_rows.rows(fault.kind))) and self.bad_rows.can_be_mended:
                self.over.wait(fault.seconds)
                self._insist(self.bad_rows.mend)

    def _committed(self, event: threading.Event) -> bool:
        """Wait until a transaction has committed; False when the run is over before."""
        while not event.wait(_POLL_SECONDS):
            if self.over.is_set():
                return False
        return True

    def _insist(self, action: Callable[[], None]) -> None:
        """Run the action, and repeat it as long as a server is away."""
        while True:
            with suppress(OutboxError, KafkaException, psycopg.Error):
                return action()
            if self.over.wait(_POLL_SECONDS):
                return None

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def begin(self) -> float:
        """Count seconds from now on. Returns now, in seconds of the monotonic clock."""
        self._began = time.monotonic()
        return self._began

    @contextmanager
    def _active(self, kind: Kind | None, description: str) -> Iterator[None]:
        """Record a fault as active while the body runs. A mere consequence of a fault has no kind."""
        began = self._elapsed
        if kind is not None:
            self._note(description)
        try:
            yield
        finally:
            self._count(Injected(kind or "", description, began, self._elapsed))

    def _count(self, injected: Injected) -> None:
        with self._lock:
            self.injected.append(injected)
            if injected.kind:
                self.done[injected.kind] += 1


def reached(route: Route, target: int) -> tuple[list[Proxy], str]:
    """The proxies to the server that a network fault is about, and what it is called."""
    if target == 0:
        return [route.postgres], "Postgres"
    if target == 1:
        return route.brokers, "all brokers"
    return [route.brokers[target - 2]], f"broker {target - 1}"


def directions_of(fault: Fault) -> tuple[Direction, ...]:
    """The directions that a network fault affects."""
    return DIRECTIONS if fault.directions == 2 else (DIRECTIONS[fault.directions],)


def disturb(kind: Kind, proxies: list[Proxy], directions: tuple[Direction, ...]) -> None:
    """Begin a network fault; `restore` ends it.

    Args:
        kind: of the fault.
        proxies: that carry it out.
        directions: in which packets are held or discarded; a cut and a half-open connection concern both.
    """
    for proxy in proxies:
        match kind:
            case "network cut":
                proxy.cut()
            case "network held":
                proxy.hold(*directions)
            case "network discarded":
                proxy.discard(*directions)
            case _:
                proxy.half_open()
