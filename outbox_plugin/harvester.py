"""The harvester: joins settings, real servers and the relay's loops."""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

from outbox_plugin.adapters.kafka import Admin, Names
from outbox_plugin.adapters.kafka_log import KafkaLog, read_progress
from outbox_plugin.adapters.membership import Membership
from outbox_plugin.adapters.postgres import PostgresStore, claim_outbox, ids_drawn_ahead
from outbox_plugin.core.election import Election, Timing
from outbox_plugin.core.heartbeat import Heartbeat
from outbox_plugin.core.progress import Identity
from outbox_plugin.core.takeover import left_behind
from outbox_plugin.errors import InvalidSetting, LogUnavailable, ServerRefused
from outbox_plugin.relay.events import HarvestEvent, Observer, TermBegan, TermFinished
from outbox_plugin.relay.exactly_once import ExactlyOnce
from outbox_plugin.relay.shard import Shard
from outbox_plugin.relay.supervisor import Supervisor
from outbox_plugin.schema.connection import reported_as_refusal
from outbox_plugin.settings import Settings

logger = logging.getLogger("outbox_plugin.harvester")


def _ignore(event: HarvestEvent) -> None:
    """Observe nothing."""


def _wall_clock() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class Harvester:
    """Relays an outbox to Kafka until it is stopped.

    Any number may run for one outbox: one leads a shard at a time, the others stand by.

    Example:
        with Harvester(Settings()) as harvester:
            ...  # It relays in the background, and hands over at the end.
    """

    def __init__(self, settings: Settings, *, observe: Observer = _ignore, adopt: bool = False) -> None:
        """Nothing is connected yet.

        Args:
            settings: which outbox, which Kafka.
            observe: is called, from the harvester's threads, with what happens.
            adopt: take over a group that served an outbox which is gone, or an outbox that another group served.
        """
        self._settings = settings
        self._observe_too = observe
        self._adopt = adopt
        self._names = Names(settings.group)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self) -> None:
        """Check both servers and what is in them, then harvest in the background. Starting twice does nothing.

        Raises:
            UserError: a setting, a server or the schema is not as it must be; nothing has been touched.
        """
        if self._thread is not None:
            return
        identity, note = self._check()
        supervisor = self._supervisor(identity, note)
        self._thread = threading.Thread(target=self._live, args=(supervisor,), name="outbox-supervisor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Hand over and end; returns when everything is closed. Safe to call twice, or without a start."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def run(self, stop: threading.Event) -> None:
        """Start, and harvest until `stop` is set; then hand over.

        Raises:
            UserError: see `start`.
            OutboxError: what made the harvester end by itself.
        """
        self.start()
        try:
            while not stop.wait(0.2) and self.alive:
                pass
        finally:
            self.stop()
        if self._error is not None:
            raise self._error

    @property
    def alive(self) -> bool:
        """Whether it runs. False before the start, after the stop, and after it has ended by itself."""
        return self._thread is not None and self._thread.is_alive()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _check(self) -> tuple[Identity, str | None]:
        """Everything that a user can mend, looked at before anything is touched; also a note for the status."""
        settings = self._settings
        if settings.delivery != "exactly-once":
            raise InvalidSetting("OUTBOX_DELIVERY: this version relays exactly-once only (given: 'at-least-once')")
        if settings.shards != 1:
            raise InvalidSetting(f"OUTBOX_SHARDS: this version harvests one shard (given: {settings.shards})")
        admin = Admin(settings)
        admin.check_reachable()
        with reported_as_refusal(settings):
            identity = claim_outbox(settings, adopt=self._adopt)
            ahead = ids_drawn_ahead(settings)
        try:
            admin.ensure_topics(self._names, settings.shards)
            for shard in range(settings.shards):
                left_behind(read_progress(settings, self._names, shard), identity, adopt=self._adopt)
        except LogUnavailable as error:
            raise ServerRefused(str(error)) from None
        notes = [admin.check_progress_is_kept(self._names)]
        if ahead > 1:
            notes.append(
                f"the ids of {settings.table} are drawn {ahead} at a time (the sequence's CACHE): a later transaction "
                "can get a smaller id, so order per key is not kept; set CACHE 1"
            )
        note = "; ".join(filter(None, notes)) or None
        if note:
            logger.warning("%s", note)
        return identity, note

    def _supervisor(self, identity: Identity, note: str | None) -> Supervisor:
        membership = Membership(self._settings, self._names)
        host, pid = socket.gethostname(), os.getpid()
        instance = f"{host}-{pid}-{uuid.uuid4().hex[:6]}"
        timing = Timing(spread=random.uniform(0.0, 0.3))  # noqa: S311 - not for secrets.
        shards = [
            Shard(
                number,
                Election(timing, log_fences=True),
                self._open_relay,
                membership.send,
                self._observe,
                template=Heartbeat(
                    number, "waiting", "", instance, host, pid, _wall_clock(), identity.incarnation, identity.place
                ),
                wall_clock=_wall_clock,
                heartbeat_interval=timing.heartbeat_interval,
                jitter=random.random,
                note=note,
            )
            for number in range(self._settings.shards)
        ]
        return Supervisor(membership, shards, identity, time.monotonic)

    @contextmanager
    def _open_relay(
        self, shard: int, leader_id: str, wanted: Callable[[], bool], observe: Observer
    ) -> Iterator[ExactlyOnce]:
        with (
            closing(PostgresStore(self._settings, adopt=self._adopt)) as store,
            closing(KafkaLog(self._settings, self._names, shard, wanted)) as log,
        ):
            yield ExactlyOnce(shard, leader_id, store, log, observe, adopt=self._adopt)

    def _live(self, supervisor: Supervisor) -> None:
        try:
            supervisor.run(self._stop)
        except BaseException as error:
            self._error = error
            logger.error("the harvester ends: %s", error)

    def _observe(self, event: HarvestEvent) -> None:
        match event:
            case TermBegan():
                logger.info(
                    "shard %d: leading as %s (%d published rows of the last leader deleted)",
                    event.shard,
                    event.leader_id,
                    event.recovered,
                )
            case TermFinished(reason=None):
                logger.info("shard %d: handed over", event.shard)
            case TermFinished():
                logger.warning("shard %d: leading no more: %s", event.shard, event.reason)
            case _:
                pass
        self._observe_too(event)
