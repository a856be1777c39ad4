"""Takeover: how long no records flow after a fault of the leader."""

from __future__ import annotations

import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from psycopg.conninfo import conninfo_to_dict

from outbox_plugin.adapters.kafka_clients import client_config
from outbox_plugin.adapters.kafka_names import KafkaNames
from outbox_plugin.bench.fleet import Fleet
from outbox_plugin.bench.namespace import Namespace
from outbox_plugin.bench.proxy import DIRECTIONS, Proxy
from outbox_plugin.bench.reader import Arrival, LiveReader
from outbox_plugin.bench.temporary_outbox import Tell, create_topic, temporary_outbox
from outbox_plugin.bench.writer import Mix, Writer
from outbox_plugin.errors import OutboxError
from outbox_plugin.settings import Settings

STEADY = Mix(rows_per_second=200, connections=2, most_rows=1, rolled_back=0.0, held=0.0)
STEADY_SECONDS, PATIENCE_SECONDS = 2.0, 60.0
STOPPED_SECONDS = 5.0
_PAUSE_SECONDS = 0.25  # Longer than any while nothing is disturbed.
_HERE = ("127.0.0.1", "localhost")

KILL, TERMINATE, STOP = "kill -9", "SIGTERM", "SIGSTOP"
NO_KAFKA, NO_POSTGRES, STUCK = "packets to Kafka gone", "packets to Postgres gone", "path to Postgres stuck"
FAULTS = (KILL, TERMINATE, STOP, NO_KAFKA, NO_POSTGRES, STUCK)
# Targets in seconds: the median, and the worst case. A path to Postgres is given up after 2.1 seconds.
TARGETS: dict[str, tuple[float, float]] = {
    KILL: (1.5, 3.0),
    TERMINATE: (0.3, 3.0),
    STOP: (1.5, 3.0),
    NO_KAFKA: (1.5, 3.0),
    NO_POSTGRES: (3.0, 3.5),
    STUCK: (3.0, 3.5),
}


class NoTakeover(OutboxError):
    """No harvester took over."""


@dataclass(frozen=True)
class TakeoverReport:
    """Gaps in seconds by fault, as a `read_committed` consumer saw them, and the reasons why some were not measured."""

    silences: dict[str, list[float]]
    not_measured: dict[str, str] = field(default_factory=dict)

    @property
    def met(self) -> bool:
        """Whether the targets were met."""
        return all(
            median(seconds) <= TARGETS[fault][0] and max(seconds) <= TARGETS[fault][1]
            for fault, seconds in self.silences.items()
        )

    def lines(self) -> list[str]:
        """The report as lines of text."""
        measured = [
            f"{fault}: median {median(seconds):.2f} s, worst {max(seconds):.2f} s of {len(seconds)} "
            f"(at most: {TARGETS[fault][0]} s, {TARGETS[fault][1]} s)"
            for fault, seconds in self.silences.items()
        ]
        return [f"{fault}: not measured, {reason}" for fault, reason in self.not_measured.items()] + measured

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return {"silences": self.silences, "not_measured": self.not_measured, "targets": TARGETS, "met": self.met}


def takeover(settings: Settings, times: int, tell: Tell) -> TakeoverReport:
    """Inject each fault into the leader, with one standby, under a writer of 200 rows per second.

    For faults in which packets vanish, each harvester runs in its own network namespace.

    Args:
        settings: how to reach the user's servers; the benchmark makes an outbox of its own there.
        times: how many times each fault is injected.
        tell: is called with each line of progress.

    Raises:
        NoTakeover: no record came within a minute, although a harvester was standing by.
    """
    not_measured = _not_measured(settings)
    faults = [fault for fault in FAULTS if fault not in not_measured]
    silences: dict[str, list[float]] = {fault: [] for fault in faults}
    with temporary_outbox(settings) as own, tempfile.TemporaryDirectory(prefix="outbox-takeover-") as folder:
        topic = f"{own.group}-events"
        create_topic(own, topic, 3)
        with _Bench.running(own, topic, Path(folder), apart=NO_KAFKA in faults, behind=STUCK in faults) as bench:
            for number in range(times):
                for fault in faults:
                    silences[fault].append(bench.silence_after(fault))
                    tell(f"{number + 1} of {times}: no records for {silences[fault][-1]:.3f} s after {fault}")
    return TakeoverReport(silences, not_measured)


def _not_measured(settings: Settings) -> dict[str, str]:
    """The faults that cannot be injected here, with reasons."""
    given = conninfo_to_dict(settings.dsn.get_secret_value())
    if given.get("host") not in _HERE or any(host not in _HERE for host, _ in _brokers(settings)):
        return dict.fromkeys((NO_KAFKA, NO_POSTGRES, STUCK), "needs servers at 127.0.0.1")
    reason = Namespace.unavailable()
    return dict.fromkeys((NO_KAFKA, NO_POSTGRES), reason) if reason else {}


def _brokers(settings: Settings) -> list[tuple[str, int]]:
    """Host and port of each broker, as it advertises them."""
    found = AdminClient(client_config(settings)).list_topics(timeout=PATIENCE_SECONDS).brokers.values()
    return [(str(broker.host), broker.port) for broker in found]


def _through(way: Proxy, settings: Settings) -> Settings:
    """`settings` whose way to Postgres is the proxy."""
    dsn = urlsplit(settings.dsn.get_secret_value())
    user = dsn.netloc.rpartition("@")[0]
    there = dsn._replace(netloc=f"{user}@127.0.0.1:{way.port}" if user else f"127.0.0.1:{way.port}")
    return settings.model_copy(update={"dsn": type(settings.dsn)(there.geturl())})


class _Bench:
    """Two harvesters, each with a way to Postgres of its own, and in a network namespace of its own."""

    def __init__(
        self,
        settings: Settings,
        topic: str,
        folder: Path,
        ways: Sequence[Proxy],
        namespaces: Sequence[Namespace],
    ) -> None:
        self._ways, self._namespaces = ways, namespaces
        self._broker_ports = [port for _, port in _brokers(settings)]
        slots = [_through(way, settings) for way in ways] or None
        prefixes = [each.prefix for each in namespaces] or None
        self.fleet = Fleet(settings, 2, folder, slots=slots, prefixes=prefixes)
        self.writer = Writer(settings, topic, STEADY, seed=1)
        self.reader = LiveReader(settings, topic)
        self._admin = AdminClient(client_config(settings))
        self._group = KafkaNames.of(settings).leader_group
        self._members: frozenset[str] = frozenset()

    @classmethod
    @contextmanager
    def running(cls, settings: Settings, topic: str, folder: Path, *, apart: bool, behind: bool) -> Iterator[_Bench]:
        """The harvesters run `apart` in namespaces, and `behind` proxies."""
        port = int(str(conninfo_to_dict(settings.dsn.get_secret_value()).get("port") or 5432))
        with ExitStack() as stack:
            ways = [stack.enter_context(Proxy(port)) for _ in range(2)] if behind else []
            namespaces = [stack.enter_context(Namespace(number)) for number in range(2)] if apart else []
            bench = cls(settings, topic, folder, ways, namespaces)
            with bench.reader.reading(), bench.fleet.running(), bench.writer.writing():
                yield bench

    def silence_after(self, fault: str) -> float:
        """Inject the fault while records flow steadily. Returns the longest gap until they do so again."""
        leader = self._calm_leader()
        at, ended = time.monotonic(), self.fleet.ended.total()
        match fault:
            case "kill -9":
                self.fleet.kill(leader)
            case "SIGTERM":
                self.fleet.terminate(leader)
            case "SIGSTOP":
                self.fleet.pause(leader, STOPPED_SECONDS)
            case "packets to Kafka gone":
                self._namespaces[leader].vanish(self._broker_ports)
            case "packets to Postgres gone":
                self._namespaces[leader].vanish([self._ways[leader].port])
            case _:
                self._ways[leader].hold(*DIRECTIONS)
        if fault in (KILL, TERMINATE):
            self._await(lambda: self.fleet.ended.total() > ended, "the leader has not ended")
        elif fault == STOP:
            self._await(lambda: time.monotonic() > at + STOPPED_SECONDS, "never")
        else:
            self._await(lambda: self.fleet.leader() not in (None, leader), "no other harvester leads")
            self._await_calm()
            self._restore(leader)
        self._await_calm()
        if fault not in (KILL, TERMINATE):
            self._members = frozenset()  # Nobody has left for good, so nobody new has to join.
        return longest_gap(self.reader.arrivals, at)

    def _restore(self, slot: int) -> None:
        for namespace in self._namespaces[slot : slot + 1]:
            namespace.restore()
        self._ways[slot].restore()

    def _calm_leader(self) -> int:
        """Wait until one harvester leads, a new one has joined, and records flow steadily. Return the leader's slot."""
        self._await(self._another_has_joined, "no two harvesters have joined the leader group")
        self._await(lambda: self.fleet.leader() is not None, "no harvester leads")
        self._await_calm()
        leader = self.fleet.leader()
        if leader is None:
            raise NoTakeover("the leader has gone by itself")
        return leader

    def _another_has_joined(self) -> bool:
        """Whether there are two members again, after those who had ended have been forgotten."""
        [future] = self._admin.describe_consumer_groups([self._group]).values()
        try:
            members = frozenset(each.member_id for each in future.result(PATIENCE_SECONDS).members)
        except KafkaException:  # Its coordinator is still being found.
            return False
        if len(members) != 2 or members == self._members:
            return False
        self._members = members
        return True

    def _await_calm(self) -> None:
        since = time.monotonic()
        self._await(lambda: calm_seconds(self.reader.arrivals, since) > STEADY_SECONDS, "records do not flow steadily")

    @staticmethod
    def _await(condition: Callable[[], bool], problem: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise NoTakeover(f"{problem} after {PATIENCE_SECONDS:.0f} s")
            time.sleep(0.05)


def longest_gap(arrivals: Sequence[Arrival], since: float) -> float:
    """The longest time, in seconds, from one arrival to a next one that came after `since`."""
    first = bisect_right(arrivals, since, key=lambda each: each.at)
    return max((later.at - earlier.at for earlier, later in pairwise(arrivals[max(0, first - 1) :])), default=0.0)


def calm_seconds(arrivals: Sequence[Arrival], since: float) -> float:
    """How long, up to the last arrival, records have come without a pause, after `since`."""
    calm = 0.0
    for earlier, later in pairwise(arrivals[bisect_right(arrivals, since, key=lambda each: each.at) :]):
        gap = later.at - earlier.at
        calm = calm + gap if gap < _PAUSE_SECONDS else 0.0
    return calm
