"""One term of one shard: a thread that connects, takes over, relays, and ends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import Enum
from typing import Protocol

from outbox_plugin.core.leader_heartbeat import Phase
from outbox_plugin.relay.events import Observer
from outbox_plugin.relay.runtime import Runtime


class Relay(Protocol):
    """What relays a shard for one term."""

    def take_over(self) -> None:
        """Make sure that nobody else publishes, and recover what the last leader left."""
        ...

    def run(self) -> None:
        """Relay until `stop`."""
        ...

    def stop(self) -> None:
        """Ask `run` to end."""
        ...

    @property
    def waiting_since(self) -> float | None:
        """Since when it has waited for one answer of Kafka's, on the relay's clock; None while it waits for none."""
        ...

    @property
    def waiting_for_postgres_since(self) -> float | None:
        """Since when it has waited for Postgres, on the relay's clock; None while it does not."""
        ...

    def prove(self, proved: Callable[[], None]) -> None:
        """Find out soon whether we have been fenced; call `proved` if not, end if so."""
        ...


# Connects for one term: (shard, leader id, whether waiting still makes sense, observer) -> the relay, closed on exit.
OpenRelay = Callable[[int, str, Callable[[], bool], Observer], AbstractContextManager[Relay]]


class Ending(Enum):
    """Why the election, or a transfer of leadership, ends a term; the value is the reason as an operator reads it."""

    STEPPED_DOWN = "stepped down: lost the leader topic's partition, or contact with Kafka"
    STOOD_BACK = "another harvester leads"  # Before the term took over.
    GAVE_WAY = "a broker does not answer this harvester, and another harvester reaches all brokers"
    GAVE_TO_OWNER = "the harvester to which Kafka has assigned the shard leads it from now on"


class LeaderTerm:
    """A term and its thread.

    The supervisor's thread calls the methods. The term's own thread sets `phase` and `error`, and calls `_proven`.
    """

    def __init__(self, shard: int, open_relay: OpenRelay, observe: Observer, runtime: Runtime) -> None:
        """Begin to connect, on a thread of its own; `take_over` lets the term go on.

        Args:
            shard: which shard.
            open_relay: connects and makes the relay.
            observe: is told what happens.
            runtime: makes the thread and the leader's id.
        """
        self.leader_id = runtime.new_id()
        self.began_at = runtime.now()
        self.phase: Phase = "candidate"  # Until the takeover has succeeded.
        self.error: BaseException | None = None
        self.ending: Ending | None = None  # Set where the election or a transfer has ended the term.
        self.successor = ""  # The instance in favour of which the term ends.
        self.stopping = False
        self._proving = self._proved = False
        self._abandoned = False
        self._relay: Relay | None = None
        self._lock = runtime.lock()
        self._changed = runtime.condition(self._lock)
        self._may_take_over = False
        self._task = runtime.spawn(lambda: self._live(shard, open_relay, observe), f"outbox-{shard}-publish")

    def _live(self, shard: int, open_relay: OpenRelay, observe: Observer) -> None:
        try:
            with open_relay(shard, self.leader_id, lambda: not self._abandoned, observe) as relay:
                with self._lock:
                    self._changed.wait_for(lambda: self._may_take_over or self.stopping)
                    if self.stopping:
                        return
                    self._relay = relay  # From now on, `stop` reaches it.
                relay.take_over()
                self.phase = "leader"
                if not self.stopping:
                    relay.run()
        except Exception as error:
            self.error = error
            _drop_tracebacks(error)

    @property
    def is_over(self) -> bool:
        """Whether its thread has ended."""
        return not self._task.is_alive()

    @property
    def waiting_since(self) -> float | None:
        """Since when it has waited for one answer of Kafka's; None while it waits for none."""
        return self._relay.waiting_since if self._relay is not None else None

    @property
    def waiting_for_postgres_since(self) -> float | None:
        """Since when it has waited to read, mark or delete rows; None while it does not."""
        return self._relay.waiting_for_postgres_since if self._relay is not None else None

    def take_over(self) -> None:
        """Let the term take over as soon as its connections are open."""
        if not self._may_take_over:
            with self._lock:
                self._may_take_over = True
                self._changed.notify_all()

    def prove(self) -> None:
        """Ask the servers whether the term still leads, unless that is being asked; see `take_proof`."""
        if self._relay is not None and self.phase == "leader" and not self._proving:
            self._proving = True
            self._relay.prove(self._proven)

    def _proven(self) -> None:
        self._proved = True

    def take_proof(self) -> bool:
        """Whether the servers have confirmed the lead since the last call."""
        if not self._proved:
            return False
        self._proved = self._proving = False
        return True

    def give_to_owner(self, owner: str) -> None:
        """Ask the term to end in favour of the instance that owns the partition. What is under way is finished."""
        self.successor, self.ending = owner, Ending.GAVE_TO_OWNER
        self.stop()

    def stop(self) -> None:
        """Ask the term to end. What is under way is finished."""
        with self._lock:
            self.stopping = True
            self._changed.notify_all()
            if self._relay is not None:
                self._relay.stop()

    def abandon(self, ending: Ending | None = None) -> None:
        """Ask the term to end without waiting for servers: an open transaction is left to the next leader's fence."""
        self.ending = ending or self.ending
        self._abandoned = True
        self.stop()

    def join(self, timeout_seconds: float) -> bool:
        """Wait for its thread. Returns whether it has ended."""
        self._task.join(timeout_seconds)
        return self.is_over


def _drop_tracebacks(error: BaseException) -> None:
    """Drop the traceback of an error, and those of the errors that it comes from. Nobody shows them.

    The term keeps its error, and the frames of the traceback keep the term: a cycle. They also keep a client of Kafka
    that was used in a call, with its threads and connections, until the garbage collector looks at all objects. In a
    harvester at rest, that takes hours.
    """
    dropped: set[int] = set()
    errors: list[BaseException | None] = [error]
    while errors:
        if (one := errors.pop()) is not None and id(one) not in dropped:
            dropped.add(id(one))
            one.__traceback__ = None
            errors += [one.__cause__, one.__context__]
