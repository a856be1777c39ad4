"""One instance: a thread that follows the log for a `Member`, and carries out its actions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from outbox_plugin.adapters.kafka_admin import offsets_of
from outbox_plugin.coordination.actions import KeepPosition, Send
from outbox_plugin.coordination.claims import Claim
from outbox_plugin.coordination.consumer_readiness import ConsumerFacts
from outbox_plugin.coordination.events import ClaimEvent, ClaimGained
from outbox_plugin.coordination.fetch_buffer import MayHandOut
from outbox_plugin.coordination.group_view import GroupView
from outbox_plugin.coordination.heartbeat_timing import HeartbeatTiming
from outbox_plugin.coordination.log import CoordinationLog
from outbox_plugin.coordination.member import Member
from outbox_plugin.coordination.partition_owners import Holder, Key
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.observe.guard import harmless
from outbox_plugin.printable import logger_of

LOGGER = logger_of(__name__)

LISTEN_SECONDS = 0.05
LEAVE_SECONDS = 5.0
MISSING_TOPIC_SECONDS = 1.0
PARTITIONS_PER_SECOND = 300  # A topic with more partitions is described less often.


class Instance:
    """A `Member` behind a lock. Its methods may be called from any thread."""

    def __init__(
        self,
        log: CoordinationLog,
        me: Holder,
        group_id: str,
        topics: Sequence[str],
        timing: HeartbeatTiming,
        *,
        at_most_once: bool,
        limit: int | None,
        observe: Callable[[ClaimEvent], None],
    ) -> None:
        """Nothing is held yet.

        Args:
            log: reads and writes the coordination topic.
            me: this instance, as the world knows it.
            group_id: the group.
            topics: those that the group shares.
            timing: of the group's heartbeats.
            at_most_once: whether an offset is written before its record is handed out.
            limit: how many partitions this instance may hold; None for any number.
            observe: is called on our thread, and must not call back; what it raises is logged once.
        """
        self.me = me
        self._changed = threading.Condition()  # Guards the member, and the order in which messages are sent.
        self._log = log
        self.group_id = group_id
        self._topics = topics
        self._timing = timing
        self._observe = harmless(observe, me.client_id)
        self._since = log.since(timing.lookback)
        now = time.monotonic()
        view = GroupView(
            group_id, topics, timing.interval, width=log.width, since=self._since, log_ahead=log.log_time() - now
        )
        self._member = Member(me, view, timing, now=now, at_most_once=at_most_once, limit=limit)
        self._at_most_once = at_most_once
        self._error: Exception | None = None
        self._stop = threading.Event()
        self._keep = False
        self._followed_at: float | None = None
        # Used by our own thread only.
        self._described = float("-inf")
        self._forms: dict[str, Future[Any]] = {}
        self._sampled = float("-inf")
        self._ends: dict[TopicPartition, Future[Any]] = {}
        self._thread = threading.Thread(target=self._run, name=f"outbox-coordination-{me.client_id}", daemon=True)

    def start(self) -> None:
        """Catch up with the log, go on with what our client held, and follow.

        Raises:
            LogUnavailable: Kafka is away.
        """
        member, log = self._member, self._log
        member.view.begin_with(log.kept.of(self.group_id, self._topics))
        for entry in log.follow(member.view.worlds, self._since):
            member.apply(entry, time.monotonic(), live=False)
        member.view.caught_up()
        self._described = time.monotonic()
        member.describe(log.check_forms(log.ask_for_forms(self._topics)), time.monotonic())
        unknown = [tp for tp in member.view.partitions() if not member.view.knows(tp)]
        for tp, offset in log.committed(unknown).items():
            member.view.remember(Key(self.group_id, *tp), offset, (), float("-inf"))
        member.resume(time.monotonic())
        self._carry_out()
        self._thread.start()

    def stop(self, *, keep: bool) -> None:
        """Release all partitions, or `keep` them for our client's next instance; safe to call twice.

        Returns once the log has it, or after a few seconds.
        """
        self._keep = keep
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    # Called by whoever observes.

    def error(self) -> Exception | None:
        """Why the log can no longer be followed; None while it can."""
        return self._error

    def facts(self) -> ConsumerFacts:
        """What is known now of how far this instance has come."""
        with self._changed:
            member, claims = self._member, self._member.claims()
            return ConsumerFacts(
                followed_at=self._followed_at,
                polled_at=member.polled_at,
                confirmed_at=member.confirmed_at,
                offsets={tp: claim.offset for tp, claim in claims.items()},
                all_confirmed=len(member.held(time.monotonic())) == len(claims),
            )

    def unclaimed(self) -> list[TopicPartition]:
        """The group's partitions that nobody holds, as far as the log shows; none while the group is paused."""
        with self._changed:
            view, now = self._member.view, time.monotonic()
            if view.is_paused(now):
                return []
            return [tp for tp in view.partitions() if view.owner(tp, now) is None]

    # Called by the user's thread.

    def claims(self) -> dict[TopicPartition, Claim]:
        """The partitions that we hold or may still hold, with their claims; counts as a poll of the user.

        Raises:
            OutboxError: the log can no longer be followed; the message has the reason.
        """
        with self._changed:
            self._member.polled(time.monotonic())
            if self._error is not None:
                raise self._error
            return self._member.claims()

    def held(self) -> dict[TopicPartition, Claim]:
        """The partitions that we certainly hold now, with their claims; does not count as a poll."""
        with self._changed:
            return self._member.held(time.monotonic())

    def may_hand_out(self, tp: TopicPartition, claim: Claim, offset: int) -> MayHandOut:
        """Whether a record may go to the user. If so, it counts as handed out.

        Args:
            tp: the record's partition.
            claim: with which it was fetched.
            offset: the record's.
        """
        with self._changed:
            return self._member.may_hand_out(tp, claim, offset, time.monotonic())

    def done(self, tp: TopicPartition, offset: int) -> bool:
        """Note that the record at `offset` is done. Returns whether we still hold its partition."""
        with self._changed:
            return self._member.done(tp, offset)

    def go_back(self, tp: TopicPartition, claim: Claim, offset: int) -> None:
        """Set the group back in a partition whose log was truncated: other records stand where it was consumed.

        Args:
            tp: the partition.
            claim: with which it was fetched.
            offset: where the group goes on, at the latest.
        """
        with self._changed:
            self._member.go_back(tp, claim, offset, time.monotonic())
            self._carry_out()

    def promise(self, claims: Mapping[TopicPartition, tuple[Claim, int]], wait_seconds: float) -> None:
        """Write to the log that we will hand out the records below each end, and read the answer."""
        member = self._member
        ends = {tp: end for tp, (_, end) in claims.items()}
        with self._changed:
            member.ask_for_messages(ends, time.monotonic())
            self._carry_out()
            self._changed.wait_for(
                lambda: self._error is not None or None not in member.verdicts(ends).values(), wait_seconds
            )
            granted = member.granted(claims, time.monotonic())
        # For instances that start when the log no longer has the promise.
        are_kept = self._log.keep(granted, wait=True)
        with self._changed:
            member.promise(claims, granted if are_kept else ())

    # Run by our own thread.

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._turn()
        except Exception as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()  # Whoever waits for an answer of the log waits in vain.
        finally:
            self._leave()

    def _turn(self) -> None:
        entries = self._log.read(LISTEN_SECONDS)
        asked, forms = self._described, self._take_forms()
        ends = self._take_ends()
        now = time.monotonic()
        with self._changed:
            for entry in entries:
                self._member.apply(entry, now)
            if forms:
                self._member.describe(forms, now, asked=asked)
            if ends:
                self._member.ends(ends, now)
            self._member.tick(now)
            self._carry_out()
            self._followed_at = now
            self._changed.notify_all()

    def _take_forms(self) -> dict[str, Any]:
        """The forms of topics, once all answers are there. Sends the next requests when it is time."""
        now = time.monotonic()
        if self._forms:
            if not all(answer.done() for answer in self._forms.values()):
                return {}
            asked, self._forms = self._forms, {}
            return self._log.check_forms(asked)
        partitions = self._member.view.partitions()
        every = max(self._timing.interval / 2, len(partitions) / PARTITIONS_PER_SECOND)
        if len({tp.topic for tp in partitions}) < len(set(self._topics)):
            every = MISSING_TOPIC_SECONDS
        if now - self._described > every:
            self._described = now
            self._forms = self._log.ask_for_forms(self._topics)
        return {}

    def _take_ends(self) -> dict[TopicPartition, int]:
        """The ends of partitions, once all answers are there. Sends the next requests when it is time."""
        now = time.monotonic()
        if self._ends:
            if not all(answer.done() for answer in self._ends.values()):
                return {}
            asked, self._ends = self._ends, {}
            return offsets_of(asked, 0)
        if now - self._sampled > self._timing.beat:
            self._sampled = now
            with self._changed:
                wanted = self._member.wanted_ends(now)
            if wanted:
                self._ends = self._log.ask_for_offsets(wanted)
        return {}

    def _carry_out(self) -> None:
        """Carry out the member's actions, in order. Sending does not wait."""
        keep = []
        for action in self._member.take():
            if isinstance(action, Send):
                self._log.send(action.message, action.partition)
            elif isinstance(action, KeepPosition):
                keep.append(action)
            else:
                self._report(action)
        self._log.keep(keep)

    def _report(self, event: ClaimEvent) -> None:
        topic, partition = event.topic_partition
        if isinstance(event, ClaimGained):
            LOGGER.info("%s: partition %s of %s is ours, from %s", self.me.client_id, partition, topic, event.offset)
        else:
            LOGGER.info("%s: partition %s of %s is ours no more: %s", self.me.client_id, partition, topic, event.why)
        self._observe(event)

    def _leave(self) -> None:
        """Write our offsets to the log, for the next holders, and wait until the log has them."""
        with self._changed:
            self._member.leave(time.monotonic(), keep=self._keep)
            self._carry_out()
        deadline = time.monotonic() + LEAVE_SECONDS
        try:
            while self._error is None and not self._member.has_left and time.monotonic() < deadline:
                entries = self._log.read(LISTEN_SECONDS)
                with self._changed:
                    for entry in entries:
                        self._member.apply(entry, time.monotonic())
                    self._carry_out()
        except Exception as error:
            LOGGER.warning("%s: the log could not be followed to the end: %s", self.me.client_id, error)
        self._log.flush()
