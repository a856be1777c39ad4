"""The harvester: connects the relay's loops with settings and real servers."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import socket
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import psycopg
from confluent_kafka.admin import TopicDescription

from outbox_plugin.adapters.broker_probe import all_brokers_answer
from outbox_plugin.adapters.harvester_registration import HarvesterRegistration, RegistrationConnection
from outbox_plugin.adapters.kafka_acknowledging_log import KafkaAcknowledgingLog
from outbox_plugin.adapters.kafka_admin import KafkaAdmin
from outbox_plugin.adapters.kafka_membership import KafkaMembership
from outbox_plugin.adapters.kafka_names import KafkaNames
from outbox_plugin.adapters.kafka_transactional_log import KafkaTransactionalLog
from outbox_plugin.adapters.postgres_marked_store import PostgresMarkedStore
from outbox_plugin.adapters.postgres_probe import postgres_answers
from outbox_plugin.adapters.postgres_session import PostgresSession
from outbox_plugin.adapters.postgres_wake_up import PostgresWakeUp
from outbox_plugin.adapters.postgres_window_store import PostgresWindowStore
from outbox_plugin.adapters.progress_reader import ProgressReader
from outbox_plugin.adapters.reserved_topics import ReservedTopics
from outbox_plugin.core.backoff import Backoff
from outbox_plugin.core.election import Election, ElectionTiming
from outbox_plugin.core.intervals import ERROR_FIRST, ERROR_LAST
from outbox_plugin.core.leader_heartbeat import LeaderHeartbeat
from outbox_plugin.core.progress import OutboxIdentity
from outbox_plugin.core.recovery import TermHistory, left_behind, require_recorded
from outbox_plugin.core.shards import Layout, Slice
from outbox_plugin.core.signing import Signer
from outbox_plugin.errors import (
    LayoutChanged,
    LogUnavailable,
    ServerRefused,
    ServerUnavailable,
    TopicMissing,
)
from outbox_plugin.insecure_settings import warn_about_insecure_settings
from outbox_plugin.observe.event_log import EventLog
from outbox_plugin.observe.guard import harmless
from outbox_plugin.observe.metrics_extra import metrics_extra
from outbox_plugin.observe.tracing import configured_tracer
from outbox_plugin.printable import logger_of, one_line
from outbox_plugin.relay.at_least_once import AtLeastOnce
from outbox_plugin.relay.events import BeginsAgain, HarvestEvent, Observer, TermBegan
from outbox_plugin.relay.exactly_once import ExactlyOnce
from outbox_plugin.relay.leader_term import Relay
from outbox_plugin.relay.runtime import Threads
from outbox_plugin.relay.server_probe import ServerProbe
from outbox_plugin.relay.shard import Shard, ShardServices
from outbox_plugin.relay.shard_report import ShardReport
from outbox_plugin.relay.supervisor import Supervisor
from outbox_plugin.schema.connection import errors_as_refusals, errors_as_unavailable
from outbox_plugin.settings import Settings
from outbox_plugin.threads.background import Background

if TYPE_CHECKING:  # Importing it needs an extra.
    from outbox_plugin.observe.harvester_telemetry import HarvesterTelemetry
    from outbox_plugin.observe.relay_spans import RelaySpans

R = TypeVar("R")

logger = logger_of("outbox_plugin.harvester")


def _ignore(event: HarvestEvent) -> None:
    """Observe nothing."""


def _wall_clock() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def may_take_over_early(settings: Settings) -> bool:
    """Whether the takeover fences the old leader, so that a silent one need not be waited for.

    False if goharvest may take part in the election: nothing fences it, and it would go on beside a new leader.
    """
    return settings.delivery == "exactly-once" or not (settings.leader_topic or settings.leader_group)


class _Registration(NamedTuple):
    """What a harvester that registers learns of its outbox."""

    identity: OutboxIdentity
    terms: TermHistory
    layout: Layout


class Harvester(Background):
    """Relays an outbox to Kafka until it is stopped.

    Any number may run for one outbox: one leads a shard at a time, the others stand by. The one that starts last
    decides the number of shards; the others follow.

    Example:
        with Harvester(Settings()) as harvester:
            ...  # It relays in the background, and hands over at the end.
    """

    def __init__(self, settings: Settings, *, observe: Observer = _ignore, adopt: bool = False) -> None:
        """Make a harvester. It opens no connection yet.

        Args:
            settings: name the outbox and Kafka.
            observe: called with each event, from the harvester's threads. What it raises is logged once, and ends
                nothing.
            adopt: take over a group whose outbox is gone, an outbox that another group harvested, or one that was
                harvested in the other delivery.
        """
        super().__init__("harvester")
        self._settings = settings
        self._observe_too = harmless(observe, "the harvester")
        self._adopt = adopt
        self._adopted: set[int] = set()  # The shards that this process has led since it adopted the outbox.
        self._names = KafkaNames.of(settings)
        self._exactly_once = settings.delivery == "exactly-once"
        self._runtime = Threads()
        self._event_log = EventLog(self._runtime.now)
        self._signer: Signer
        self._is_new = False
        self._is_checked = False  # Whether it has started, or the harvester that it restarts has.
        self._telemetry: HarvesterTelemetry | None = None  # If OUTBOX_LISTEN is set.
        self._spans: RelaySpans | None = None  # If OpenTelemetry has a tracer.

    def _prepare(self, loop: asyncio.AbstractEventLoop | None) -> Callable[[], None]:  # noqa: ARG002
        if self._settings.listen is not None:
            self._telemetry = self._listen(self._settings.listen)
        try:
            checked = self._check_again() if self._is_checked else self._check()
        except BaseException:
            self._close_port()
            raise
        self._is_checked = True
        if self._telemetry is not None:
            self._telemetry.poll_table()
        self._spans = _relay_spans()
        return partial(self._harvest, *checked)

    def _listen(self, listen: str) -> HarvesterTelemetry:
        with metrics_extra():
            from outbox_plugin.observe.harvester_telemetry import HarvesterTelemetry
        return HarvesterTelemetry(
            self._settings,
            listen,
            error=lambda: self._error,
            stopping=self._stop.is_set,
            now=self._runtime.now,
        )

    def for_restart(self, observe: Observer) -> Harvester:
        """Make a harvester that restarts this one. Start it when this one has been stopped.

        If this one has started, that one starts sooner: it leaves to its terms what they check again. It adopts nothing
        again, and does not decide the number of shards. It calls `observe` with its own events alone.
        """
        restarted = Harvester(self._settings, observe=observe, adopt=self._adopt)
        restarted._is_checked, restarted._adopted = self._is_checked, self._adopted
        return restarted

    def stop(self) -> None:
        """Finish the work under way, hand over leadership, and end. Returns when everything is closed."""
        super().stop()
        self._close_port()

    def _close_port(self) -> None:
        telemetry, self._telemetry = self._telemetry, None
        if telemetry is not None:
            telemetry.close()

    def _check(self) -> tuple[OutboxIdentity, Layout, str | None]:
        """Check everything that a user can fix, before anything is changed. Also returns a note for the status."""
        warn_about_insecure_settings(self._settings)
        with closing(KafkaAdmin.at_start(self._settings)) as admin:
            identity, layout, weaknesses = self._check_both(admin)
            note = self._note(admin, weaknesses)
        return identity, layout, note

    def _check_again(self) -> tuple[OutboxIdentity, Layout, str | None]:
        """Check what no term checks. Returns the same as `_check`."""
        with closing(KafkaAdmin.at_start(self._settings)) as admin:
            with closing(RegistrationConnection(self._settings)) as connection:
                identity, layout, weaknesses = self._register(connection, self._renew_registration)
            with _kafka_errors_as_refusals():
                self._ensure_topics(admin, layout)
            note = self._note(admin, weaknesses)
        return identity, layout, note

    def _renew_registration(self, connection: RegistrationConnection) -> tuple[OutboxIdentity, Layout, list[str]]:
        with connection.registration() as registration:
            self._is_new = registration.terms().number == 0
            return registration.identity(), *self._registered_layout(registration)

    def _registered_layout(self, registration: HarvesterRegistration) -> tuple[Layout, list[str]]:
        """The outbox's layout and weaknesses. Checks that it is still harvested by our group, and in our delivery."""
        registration.register_group()
        registration.register_delivery()
        self._signer = registration.signer()
        return registration.layout(), registration.weaknesses()

    def _note(self, admin: KafkaAdmin, weaknesses: Sequence[str]) -> str | None:
        """What is wrong, but keeps nobody from harvesting, for the log and the status; None if nothing is."""
        policy = admin.keep_progress(self._names) if self._exactly_once else None
        note = "; ".join(filter(None, [policy, *weaknesses])) or None
        if note:
            logger.warning("%s", note)
        return note

    def _check_both(self, admin: KafkaAdmin) -> tuple[OutboxIdentity, Layout, list[str]]:
        """Register with the outbox once Kafka is found to be as it must be.

        The table is checked once here: each term checks it again.
        """
        with closing(RegistrationConnection(self._settings)) as connection:
            checked, weaknesses = self._register(connection, self._try_registration)
            self._check_kafka(admin, checked)
            registered = self._register(connection, self._keep_registration)
        if (registered.identity, replace(registered.layout, number=0)) != (
            checked.identity,
            replace(checked.layout, number=0),
        ):
            self._check_kafka(admin, registered)  # Somebody has changed it since the check.
        return registered.identity, registered.layout, weaknesses

    def _register(self, connection: RegistrationConnection, attempt: Callable[[RegistrationConnection], R]) -> R:
        """Make the attempt, and repeat it once where the connection turns out to have been ended.

        It may have been idle while Kafka was checked, or this process may have been stopped in the middle.
        """
        register = partial(self._register_when_unlocked, partial(attempt, connection))
        with errors_as_refusals(self._settings):
            try:
                return register()
            except psycopg.Error:
                if not connection.was_ended:
                    raise
                return register()

    def _register_when_unlocked(self, attempt: Callable[[], R]) -> R:
        """Wait while another session has locked what the registration needs, unless the harvester is to stop."""
        while True:
            try:
                return attempt()
            except psycopg.errors.LockNotAvailable as error:
                if self._stop.is_set():
                    raise
                logger.warning("waiting for another session that locks the outbox (see pg_locks): %s", one_line(error))

    def _try_registration(self, connection: RegistrationConnection) -> tuple[_Registration, list[str]]:
        """Check the outbox, and whether it lets us register. This must change nothing, as Kafka may refuse us.

        Also returns the outbox's weaknesses.
        """
        with connection.registration(keep=False) as registration:
            checked = self._write_registration(registration, registration.check_outbox(), keep=False)
            return checked, registration.weaknesses()

    def _keep_registration(self, connection: RegistrationConnection) -> _Registration:
        with connection.registration() as registration:
            return self._write_registration(registration, registration.identity(), keep=True)

    def _write_registration(
        self, registration: HarvesterRegistration, identity: OutboxIdentity, *, keep: bool
    ) -> _Registration:
        """Register our group, delivery, retention and number of shards with the outbox."""
        registration.register_group(adopt=self._adopt)
        registration.register_delivery(adopt=self._adopt)
        registration.register_retention()
        self._signer, terms = registration.signer(), registration.terms()
        self._is_new = terms.number == 0
        return _Registration(identity, terms, registration.register_layout(keep=keep))

    def _check_kafka(self, admin: KafkaAdmin, registered: _Registration) -> None:
        """Check that the group's topics exist, and that its progress records are those of this outbox."""
        layout = registered.layout
        with _kafka_errors_as_refusals():
            admin.check_rights(self._ensure_topics(admin, layout))
            if self._exactly_once:
                self._check_progress(registered)

    def _ensure_topics(self, admin: KafkaAdmin, layout: Layout) -> dict[str, TopicDescription]:
        """Make the group's topics, with the partitions that the layout needs."""
        partitions = layout.partitions if self._exactly_once else layout.shards
        return admin.ensure_topics(self._names, partitions, progress=self._exactly_once)

    def _check_progress(self, registered: _Registration) -> None:
        """Check that each slice's last progress record is this outbox's, and is not missing though it is expected."""
        identity, terms, layout = registered
        with closing(ProgressReader(self._settings, self._names, self._signer)) as reader:
            for shard in range(layout.shards):
                slice_ = Slice(shard, layout.shards)
                last = reader.read(slice_, accepts_unsigned=self._is_new or slice_.name in terms.unsigned)
                left_behind(last.record, identity, adopt=self._adopt)
                require_recorded(last.newest or last.record, slice_.name, terms, adopt=self._adopt)

    def _harvest(self, identity: OutboxIdentity, layout: Layout, note: str | None) -> None:
        while not self._stop.is_set():
            try:
                supervisor = self._supervisor(identity, layout, note)
            except LogUnavailable as error:  # There is no token for Kafka.
                logger.warning("not yet: %s", error)
                layout, note = self._next_layout(layout, note)
                continue
            try:
                supervisor.run(self._stop.is_set)
            except (LayoutChanged, TopicMissing) as ended:
                logger.info("beginning again: %s", ended)
                self._observe(BeginsAgain(0, str(ended)))
                layout, note = self._next_layout(layout, note)

    def _next_layout(self, last: Layout, last_note: str | None) -> tuple[Layout, str | None]:
        """Wait until both servers have the new layout, and return it, and a note for the status.

        Returns `last` and `last_note` if the harvester is to stop. The new layout may have the same number as `last`,
        if a backup was restored.

        Raises:
            ForeignOutbox: the outbox is harvested by another group by now.
            InvalidSetting: the outbox is harvested in the other delivery by now.
        """
        pace = Backoff(ERROR_FIRST, ERROR_LAST)
        while not self._stop.wait(pace.wait(random.random())):  # noqa: S311 - not for secrets.
            try:
                with (
                    errors_as_unavailable(),
                    closing(RegistrationConnection(self._settings)) as connection,
                    connection.registration() as registration,
                ):
                    layout, weaknesses = self._registered_layout(registration)
                with closing(KafkaAdmin(self._settings)) as admin:
                    self._ensure_topics(admin, layout)
                    note = self._note(admin, weaknesses)
            except (
                ServerUnavailable,
                ServerRefused,
            ) as error:  # Maybe until somebody creates the topic.
                logger.warning("not yet: %s", error)
                self._observe(BeginsAgain(0, str(error)))
            else:
                logger.info("the outbox has %d shards", layout.shards)
                return layout, note
        return last, last_note

    def _supervisor(self, identity: OutboxIdentity, layout: Layout, note: str | None) -> Supervisor:
        host, pid = socket.gethostname(), os.getpid()
        instance = f"{host}-{pid}-{uuid.uuid4().hex[:12]}"
        membership = KafkaMembership(self._settings, self._names, layout.shards, self._signer, instance)
        timing = ElectionTiming(spread=random.uniform(0.0, 0.3))  # noqa: S311 - not for secrets.
        open_relay = self._open_exactly_once if self._exactly_once else self._open_at_least_once
        services = ShardServices(
            partial(open_relay, layout),
            membership.send,
            self._observe,
            self._runtime,
            _wall_clock,
            random.random,
            ServerProbe(lambda: all_brokers_answer(self._settings, self._names.leader_topic), self._runtime),
            ServerProbe(lambda: postgres_answers(self._settings), self._runtime),
        )

        def shard(number: int) -> Shard:
            place, since = (identity.incarnation, identity.place, layout.number), _wall_clock()
            template = LeaderHeartbeat(number, "waiting", "", instance, host, pid, since, *place)
            election = Election(timing, early_takeover=may_take_over_early(self._settings))
            return Shard(number, election, ShardReport(template, timing.heartbeat_interval, note), services)

        shards = [shard(number) for number in range(layout.shards)]
        return Supervisor(membership, shards, identity, layout.number, self._runtime, is_new=self._is_new)

    @contextmanager
    def _open_at_least_once(
        self, layout: Layout, shard: int, leader_id: str, should_wait: Callable[[], bool], observe: Observer
    ) -> Iterator[Relay]:
        """Opens the relay of a shard of `layout`, for at-least-once delivery."""
        settings = self._settings
        with ExitStack() as opened:
            store = opened.enter_context(closing(PostgresMarkedStore(settings, shard, layout)))
            self._check_secret(store.session)
            reserved = ReservedTopics(settings, store.session.groups)
            log = KafkaAcknowledgingLog(settings, should_wait, reserved)
            yield AtLeastOnce(
                shard,
                leader_id,
                store,
                opened.enter_context(closing(log)),
                self._runtime,
                observe,
                wake_up=self._wake_up(store.session, shard, opened),
                bad_rows=settings.bad_rows,
            )

    @contextmanager
    def _open_exactly_once(
        self, layout: Layout, shard: int, leader_id: str, should_wait: Callable[[], bool], observe: Observer
    ) -> Iterator[Relay]:
        """Opens the relay of a shard of `layout`, for exactly-once delivery."""
        settings = self._settings
        with ExitStack() as opened:
            store = opened.enter_context(closing(PostgresWindowStore(settings, shard, layout)))
            self._check_secret(store.session)
            reserved = ReservedTopics(settings, store.session.groups)
            log = KafkaTransactionalLog(
                settings, self._names, Slice(shard, layout.shards), self._signer, should_wait, reserved
            )
            yield ExactlyOnce(
                shard,
                leader_id,
                store,
                opened.enter_context(closing(log)),
                self._runtime,
                observe,
                wake_up=self._wake_up(store.session, shard, opened),
                bad_rows=settings.bad_rows,
                adopt=self._adopt and shard not in self._adopted,
            )

    def _wake_up(self, session: PostgresSession, shard: int, opened: ExitStack) -> PostgresWakeUp | None:
        """What lets writers wake the shard's leader, to be closed with `opened`; None if there is no trigger."""
        if not session.has_wake_up_trigger:
            return None
        return opened.enter_context(closing(PostgresWakeUp(self._settings, shard)))

    def _check_secret(self, session: PostgresSession) -> None:
        """Check that we sign with the outbox's secret. Other harvesters would ignore what we sign with another one.

        Raises:
            LayoutChanged: the outbox was dropped and recreated, and has another secret.
        """
        if session.signer != self._signer:
            raise LayoutChanged("the outbox was dropped and recreated")

    def _observe(self, event: HarvestEvent) -> None:
        if isinstance(event, TermBegan):
            self._adopted.add(event.shard)
        self._event_log.write(event)
        if (telemetry := self._telemetry) is not None:
            telemetry.observe(event)
        if self._spans is not None:
            self._spans.observe(event)
        self._observe_too(event)


@contextmanager
def _kafka_errors_as_refusals() -> Iterator[None]:
    """Refuse a start where Kafka is away, or lacks a topic. A harvester that runs would wait."""
    try:
        yield
    except (LogUnavailable, TopicMissing) as error:
        raise ServerRefused(str(error)) from None


def _relay_spans() -> RelaySpans | None:
    if (tracer := configured_tracer()) is None:
        return None
    from outbox_plugin.observe.relay_spans import RelaySpans

    return RelaySpans(tracer)


def look_for_cycles_less_often() -> None:
    """Run Python's cycle collector less often, in a process that only harvests.

    A harvester makes many short-lived rows without reference cycles. The collector examines them all the same, which
    took a fifth of the CPU time of a drain.
    """
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
