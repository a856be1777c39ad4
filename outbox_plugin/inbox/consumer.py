"""`Inbox`: a service that polls Kafka, runs handlers on workers, and does housekeeping beside them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, KafkaException

from outbox_plugin.adapters.kafka_clients import is_group_name, refused_property
from outbox_plugin.adapters.topic_ids import TopicIds
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.errors import InvalidSetting, LogUnavailable, ServerRefused
from outbox_plugin.inbox.consumer_config import consumer_config
from outbox_plugin.inbox.dispatcher import Dispatcher
from outbox_plugin.inbox.events import ignore
from outbox_plugin.inbox.handling import Handling
from outbox_plugin.inbox.handover import RELEASE_SECONDS, Handover, Unlock
from outbox_plugin.inbox.housekeeping import Housekeeping
from outbox_plugin.inbox.inbox_readiness import InboxFacts
from outbox_plugin.inbox.key_queues import KeyQueues
from outbox_plugin.inbox.pauses import Pauses
from outbox_plugin.inbox.poll_loop import PollLoop
from outbox_plugin.inbox.positions import Positions
from outbox_plugin.inbox.retention import Retention
from outbox_plugin.inbox.retry import Retry
from outbox_plugin.inbox.session import AsyncBatchHandler, AsyncHandler, BatchHandler, Handler, HandlerSession
from outbox_plugin.inbox.start_check import check_servers
from outbox_plugin.inbox.workers import TaskWorkers, ThreadWorkers, make_workers
from outbox_plugin.observe.metrics_extra import metrics_extra
from outbox_plugin.observe.tracing import configured_tracer
from outbox_plugin.printable import logger_of
from outbox_plugin.settings import Settings
from outbox_plugin.threads.background import Background

if TYPE_CHECKING:  # It needs an extra.
    from outbox_plugin.inbox.inbox_telemetry import InboxTelemetry

logger = logger_of("outbox_plugin.inbox")


class Inbox(Background):
    """Consumes topics and runs a handler for each event. The handler's database effects happen once.

    The handler gets a psycopg connection, with a transaction open, and the event. What it writes, emits included, is
    committed together with the event's idempotency key. It may run more than once, but only one run is committed. An
    `async def` handler gets an `AsyncConnection`, and runs in the event loop of `async with`.

    Any number of processes may run with one `group`; they share the partitions.

    Example:
        def handle(connection: psycopg.Connection, event: Received) -> None:
            connection.execute("UPDATE account SET …", event.json())

        with Inbox(Settings(), group="billing", topics=["orders"], handler=handle):
            ...  # It consumes in the background; records that are being handled are finished at the end.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        group: str,
        topics: Sequence[str],
        handler: Handler | AsyncHandler | BatchHandler | AsyncBatchHandler,
        batch_size: int | None = None,
        concurrency: int = 4,
        retry: Retry = Retry(),  # noqa: B008 - frozen.
        keep: timedelta = timedelta(days=7),
        keep_dead_letters: timedelta = timedelta(days=30),
    ) -> None:
        """Check the arguments. The connections are made when the inbox starts.

        Args:
            settings: Kafka, and the database of the effects, in which `outbox migrate` has made the inbox's tables. If
                `listen` is set, metrics and probes are served there while the inbox runs.
            group: the consumer group; an event has its effect once for each group.
            topics: the topics to consume; the group reads a partition from its beginning if it has not been there.
            handler: is called with an event, or, with a `batch_size`, with a list of events.
            batch_size: the highest number of events in a list, each key's in order; None to pass single events.
            concurrency: how many handlers run at the same time, each on a connection of its own.
            retry: how often a failing record is tried, and how long it waits between.
            keep: how long a handled event is remembered. If Kafka delivers it again later, it has its effect again.
            keep_dead_letters: how long dead letters are kept.

        Raises:
            InvalidSetting: no group, or one that begins with white space; no topic; or a concurrency or batch size
                below 1.
        """
        if not group or isinstance(topics, str) or not topics or concurrency < 1:
            raise InvalidSetting(
                f"Inbox: expected a group, a list of topics, and a concurrency of at least 1 "
                f"(given: group={group!r}, topics={topics!r}, concurrency={concurrency})"
            )
        if not is_group_name(group):
            raise InvalidSetting(f"Inbox: expected a group that begins with no white space (given: {group!r})")
        if batch_size is not None and batch_size < 1:
            raise InvalidSetting(f"Inbox: expected a batch_size of at least 1 (given: {batch_size})")
        super().__init__(f"inbox {group}")
        self._settings = settings
        self._group = group
        self._topics = list(topics)
        self._handler = handler
        self._concurrency = concurrency
        self._retry = retry
        self._keep = Retention(keep, keep_dead_letters)
        self._in_batches = batch_size is not None
        self._dispatcher = Dispatcher(concurrency, batch_size)
        self._pauses = Pauses(self._dispatcher)
        self._loop: PollLoop | None = None  # Once it has started.
        self._telemetry: InboxTelemetry | None = None  # Where there is OUTBOX_LISTEN.

    @property
    def partitions(self) -> list[TopicPartition]:
        """The partitions that this process handles now, as named tuples of topic and partition."""
        return self._dispatcher.locked(KeyQueues.partitions)

    def stop(self) -> None:
        """Finish what is under way, and end; returns when everything is closed. See `Background.stop`."""
        super().stop()
        self._close_port()

    def _prepare(self, loop: asyncio.AbstractEventLoop | None) -> Callable[[], None]:
        if self._settings.listen is not None:
            self._telemetry = self._listen(self._settings.listen)
        try:
            self._settings, positions = check_servers(self._settings, self._group)
            self._handover = Handover(self._settings, self._group)
            workers = self._workers(loop)
            if self._telemetry is not None:
                self._telemetry.poll_lag()
            self._loop = self._poll_loop(positions)
            return partial(self._consume, self._loop, workers, self._housekeeping(positions, self._loop))
        except BaseException as error:
            self._close_port()
            if isinstance(error, LogUnavailable):  # There was a token for the check, and there is none any more.
                raise ServerRefused(str(error)) from None
            raise

    def _listen(self, listen: str) -> InboxTelemetry:
        with metrics_extra():
            from outbox_plugin.inbox.inbox_telemetry import InboxTelemetry
        return InboxTelemetry(
            self._settings,
            listen,
            self._group,
            self._topics,
            error=lambda: self._error,
            stopping=self._stop.is_set,
            facts=self._facts,
            next_offsets=lambda: self._dispatcher.locked(KeyQueues.next_offsets),
            paused=lambda: self._pauses.count,
        )

    def _facts(self) -> InboxFacts:
        return InboxFacts(
            polled_at=None if self._loop is None else self._loop.polled_at,
            positions_at=None if self._loop is None else self._loop.positions_at,
            dispatcher=self._dispatcher.facts(),
            partitions=len(self.partitions),
        )

    def _close_port(self) -> None:
        telemetry, self._telemetry = self._telemetry, None
        if telemetry is not None:
            telemetry.close()

    def _workers(self, loop: asyncio.AbstractEventLoop | None) -> ThreadWorkers | TaskWorkers:
        handling = Handling(
            self._settings.table,
            self._group,
            self._retry,
            random.random,
            in_batches=self._in_batches,
            observe=ignore if self._telemetry is None else self._telemetry.observe,
        )
        return make_workers(
            self._settings, self._dispatcher, handling, self._handler, self._concurrency, loop, traced=self._tracing()
        )

    def _tracing(self) -> Callable[[HandlerSession], HandlerSession]:
        """What makes a session trace its handler; it leaves the session as it is where OpenTelemetry has no tracer."""
        if (tracer := configured_tracer()) is None:
            return lambda session: session
        from outbox_plugin.inbox.traced_session import TracedSession

        return partial(TracedSession, tracer=tracer, group=self._group)

    def _poll_loop(self, positions: Positions) -> PollLoop:
        try:
            consumer = Consumer(consumer_config(self._settings, self._group))
        except KafkaException as error:
            raise refused_property(error) from None
        with ExitStack() as opened:
            opened.callback(consumer.close)
            topic_ids = opened.enter_context(closing(TopicIds(self._settings)))
            loop = PollLoop(
                self._settings,
                self._group,
                consumer,
                self._dispatcher,
                self._pauses,
                positions,
                topic_ids,
                self._keep.handled.total_seconds(),
                self._stop,
                ignore if self._telemetry is None else self._telemetry.observe,
            )
            loop.subscribe(self._topics)
            opened.pop_all()
        return loop

    def _housekeeping(self, positions: Positions, loop: PollLoop) -> Housekeeping:
        return Housekeeping(
            self._settings, self._group, self._dispatcher, positions, loop.reached.all, self._keep, self._telemetry
        )

    def _consume(self, loop: PollLoop, workers: ThreadWorkers | TaskWorkers, housekeeping: Housekeeping) -> None:
        with ExitStack() as ended, closing(loop):  # Whatever a step raises, Kafka's client is closed.
            workers.start()
            ended.callback(workers.join)
            ended.callback(self._dispatcher.stop)
            housekeeping.start()
            try:
                loop.run(workers)
            finally:
                self._hand_over(loop, housekeeping, ended)

    def _hand_over(self, loop: PollLoop, housekeeping: Housekeeping, ended: ExitStack) -> None:
        """Give up all partitions. Those whose records are being handled stay locked until `ended`."""
        housekeeping.stop()
        self._dispatcher.stop()
        busy = self._dispatcher.locked(KeyQueues.busy)
        unlock = ended.enter_context(self._handover.locked(busy))
        ended.callback(self._wait_for_handlers, busy, unlock)
        loop.give_up_all()
        if housekeeping.wait_until_ended():
            loop.reached.write()

    def _wait_for_handlers(self, busy: Mapping[TopicPartition, Callable[[], bool]], unlock: Unlock) -> None:
        """Leave each busy partition to its next owner when its handlers have ended, but no later than at a rebalance.

        A handler that still runs then keeps its transaction. The next owner waits for that, and leaves the event out.
        """
        left, deadline = dict(busy), time.monotonic() + RELEASE_SECONDS
        while left and (ended := self._dispatcher.wait_for_some(left, deadline - time.monotonic())):
            unlock(ended)
            left = {tp: is_running for tp, is_running in left.items() if tp not in ended}
