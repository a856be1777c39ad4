"""An operator's commands: show who holds what, pause a group, set where it goes on, and resume it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from math import ceil

from outbox_plugin.coordination.actions import KeepPosition
from outbox_plugin.coordination.group_lags import Lag, group_lags
from outbox_plugin.coordination.heartbeat_timing import HEARTBEAT_INTERVAL_SECONDS, HeartbeatTiming
from outbox_plugin.coordination.log import TOPIC, CoordinationLog
from outbox_plugin.coordination.log_view import LogView
from outbox_plugin.coordination.messages import (
    VERSION,
    ClaimingPartition,
    Entry,
    ReleaseGroup,
    ReleasingPartition,
    encode,
)
from outbox_plugin.coordination.partition_owners import (
    NO_END,
    REMEMBERED_TOPICS,
    STALE_INTERVALS,
    Holder,
    Key,
    Pause,
    Row,
)
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.errors import LogUnavailable, UserError
from outbox_plugin.kafka_settings import kafka_settings

CLIENT_ID = "outbox-admin"
LOOKBACK_SECONDS = 600.0
ANSWER_SECONDS = 10.0


def _nothing(_: Entry) -> None:
    """Ignore the entry."""


@dataclass(frozen=True, slots=True)
class Known:
    """The state of the groups: all partitions that the log names, sorted; the pauses; and the lags."""

    rows: tuple[Row, ...]
    pauses: Mapping[str, Pause]
    lags: Mapping[Key, Lag]


class Admin:
    """Commands for all groups on one coordination topic. Each method opens its own connection."""

    def __init__(
        self,
        *,
        heartbeat_interval_seconds: float = HEARTBEAT_INTERVAL_SECONDS,
        coordination_topic: str = TOPIC,
        bootstrap_servers: str | None = None,
        kafka: dict[str, str] | None = None,
    ) -> None:
        """Remember the arguments, which must be the group's own.

        Args:
            heartbeat_interval_seconds: the heartbeat interval of the groups.
            coordination_topic: the topic of their claims.
            bootstrap_servers: Kafka brokers; OUTBOX_BOOTSTRAP_SERVERS if it is None.
            kafka: librdkafka properties; OUTBOX_KAFKA if it is None.

        Raises:
            InvalidSetting: brokers or properties are missing or wrong.
        """
        self._settings = kafka_settings(bootstrap_servers, kafka)
        self._topic = coordination_topic
        self._interval = heartbeat_interval_seconds
        self._me = Holder(uuid.uuid4().hex[:12], CLIENT_ID)

    def world(self, group_id: str | None = None) -> Known:
        """Return who holds which partition, how far each is behind, and all pauses, of one group or of all (None).

        Raises:
            UserError: the group, or the coordination topic, has a name that is not allowed.
            ServerRefused: no broker answers, or it does not let us in.
            LogUnavailable: Kafka is away.
        """
        with self._following(CLIENT_ID if group_id is None else group_id) as view:
            now = view.log.log_time()
            every = (row for world in view.worlds.values() for row in world.rows(now))
            rows = tuple(sorted(row for row in every if group_id in (None, row.key.group_id)))
            pauses = {group: pause for world in view.worlds.values() for group, pause in world.pauses(now).items()}
            return Known(
                rows,
                {group: pause for group, pause in pauses.items() if group_id in (None, group)},
                group_lags(view.log, self._settings, rows),
            )

    def pause(self, group_id: str, seconds: float | None = None) -> list[Key]:
        """Have the whole group release its partitions, and claim none for a time or until `resume`.

        Waits until each instance has released its partitions, or has been silent long enough that it no longer hands
        out records.

        Args:
            group_id: the group.
            seconds: how long the pause lasts; None until `resume`.

        Returns:
            The partitions of instances that were silent.

        Raises:
            UserError: the group, or the coordination topic, has a name that is not allowed.
            LogUnavailable: Kafka is away.
        """
        with self._following(group_id) as view:
            holders = {row.key: row.holder for row in view.rows(group_id) if row.state in ("fresh", "unknown")}
            silent = dict(holders)

            def released(entry: Entry) -> None:
                message = entry.message
                if isinstance(message, ReleasingPartition):
                    silent.pop(Key(message.group_id, message.topic, message.partition), None)

            self._release_group(view, group_id, seconds, released)
            view.wait(lambda: not silent, STALE_INTERVALS * self._interval, released)
            return sorted(silent)

    def resume(self, group_id: str) -> None:
        """Let a paused group go on, in each partition from where it was released or set.

        Raises:
            UserError: the group, or the coordination topic, has a name that is not allowed.
            LogUnavailable: Kafka is away.
        """
        with self._following(group_id) as view:
            self._release_group(view, group_id, 0.0)

    def set_position(self, group_id: str, positions: Mapping[tuple[str, int], int]) -> None:
        """Set the offsets at which a paused group goes on, by (topic, partition).

        Raises:
            UserError: the group is not paused, there is no such partition or offset, or a name is not allowed.
            LogUnavailable: Kafka is away.
        """
        wanted = {TopicPartition(*tp): offset for tp, offset in positions.items()}
        for tp, offset in wanted.items():
            encode(ReleasingPartition(VERSION, 0, *self._me, group_id, *tp, offset))
        with self._following(group_id) as view:
            pause = view.pauses().get(group_id)
            if pause is None or pause.by != CLIENT_ID:
                said = "is not paused" if pause is None else f"was paused by {pause.by}"
                raise UserError(f"the group {group_id} {said}; expected: `outbox consumers pause {group_id}` first")
            topic_ids = {tp: self._check(view.log, tp, offset) for tp, offset in wanted.items()}
            for tp, offset in wanted.items():
                common = (VERSION, int(view.log.log_time()), *self._me, group_id, *tp)
                at = view.coordination_partition(tp.topic)
                view.log.send(ClaimingPartition(*common), at)
                view.log.send(ReleasingPartition(*common, offset), at)
            open_ = set(wanted)

            def answered(entry: Entry) -> None:
                message = entry.message
                if isinstance(message, ReleasingPartition) and message.instance_id == self._me.instance_id:
                    open_.discard(TopicPartition(message.topic, message.partition))

            view.wait(lambda: not open_, ANSWER_SECONDS, answered)
            missed = [tp for tp, offset in wanted.items() if open_ or view.offset(group_id, tp) != offset]
            kept = [
                KeepPosition(
                    tp, offset, view.topic_ids_with(group_id, tp, topic_ids[tp]), view.time_of(Key(group_id, *tp))
                )
                for tp, offset in wanted.items()
            ]
            if missed or not view.log.keep(kept, wait=True):
                raise LogUnavailable(f"the position of {group_id} may not be set: set it again, before it is resumed")

    def _check(self, log: CoordinationLog, tp: TopicPartition, offset: int) -> str:
        """Refuse an offset that is not there. Returns the topic's id."""
        form = log.check_forms(log.ask_for_forms([tp.topic])).get(tp.topic)
        partitions = 0 if form is None else form.partitions
        if form is None or not 0 <= tp.partition < partitions:
            raise UserError(
                f"there is no partition {tp.partition} of {tp.topic}: it has {partitions} partitions, from 0 on"
            )
        first, end = log.bounds(*tp)
        if not first <= offset <= end:
            raise UserError(
                f"partition {tp.partition} of {tp.topic} cannot be consumed from {offset}: expected an offset "
                f"from {first}, its first record, to {end}, its end"
            )
        return form.topic_id

    def _release_group(
        self, view: _View, group_id: str, seconds: float | None, heard: Callable[[Entry], None] = _nothing
    ) -> None:
        """Pause a group for `seconds` from the message's time in the log. None: without an end. 0: resume it."""
        begins = int(view.log.log_time())
        until = NO_END if seconds is None else begins + ceil(seconds) if seconds else 0
        message = ReleaseGroup(VERSION, begins, *self._me, group_id, "", 0, until)
        for partition in view.worlds:
            view.log.send(message, partition)
        unheard = set(view.worlds)

        def note(entry: Entry) -> None:
            if entry.message == message:
                unheard.discard(entry.partition)
            heard(entry)

        view.wait(lambda: not unheard, ANSWER_SECONDS, note)
        if unheard:
            raise LogUnavailable(f"not all of {self._topic} has heard what the group {group_id} is to do: say it again")
        self._keep_pause(view, group_id, heard)

    @staticmethod
    def _keep_pause(view: _View, group_id: str, heard: Callable[[Entry], None]) -> None:
        """Keep what the log says last of a group's pauses. Another operator may have said more since ours was heard.

        After each write, read the log again, and write again if it says more by now. So the record that is written
        last has what the log says last.
        """
        kept = None
        while (latest := view.latest_pauses[group_id]) != kept:
            view.log.keep_pause(latest)
            kept = latest
            view.take_in(view.log.read_on(_View.DECIDING), heard)

    @contextmanager
    def _following(self, group_id: str) -> Iterator[_View]:
        """Read the log as far as it decides who holds what.

        Raises:
            MalformedMessage: the protocol cannot carry the group's name.
        """
        encode(ReleaseGroup(VERSION, 0, *self._me, group_id, "", 0, 0))
        with closing(CoordinationLog(self._settings, self._topic, group_id)) as log:
            since = log.since(max(LOOKBACK_SECONDS, HeartbeatTiming(self._interval).lookback))
            view = _View(log, self._interval, since)
            view.take_in(log.follow(range(log.width), since))
            view.caught_up()
            yield view


class _View(LogView):
    """The worlds of the whole coordination topic, as far as it has been read."""

    DECIDING = 0  # Operators who speak at once may be heard in different orders. That of this partition counts.

    def __init__(self, log: CoordinationLog, interval: float, since: float) -> None:
        super().__init__(range(log.width), interval, width=log.width, since=since)
        self.log = log
        self.latest_pauses: dict[str, ReleaseGroup] = {}  # What the log has said last of each group's pauses.
        self.begin_with(log.kept)

    def take_in(self, entries: Iterable[Entry], heard: Callable[[Entry], None] = _nothing) -> None:
        for entry in entries:
            if entry.partition in self.worlds:
                self.note_time(entry.partition, entry.at)
                self.worlds[entry.partition].apply(entry.message, entry.at)
                if entry.partition == self.DECIDING and isinstance(entry.message, ReleaseGroup):
                    self.latest_pauses[entry.message.group_id] = entry.message
                heard(entry)

    def wait(self, condition: Callable[[], bool], seconds: float, heard: Callable[[Entry], None] = _nothing) -> None:
        """Read on until `condition` holds, for at most `seconds`."""
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            self.take_in(self.log.read(0.05), heard)

    def rows(self, group_id: str) -> list[Row]:
        """The group's partitions."""
        now = self.log.log_time()
        return [row for world in self.worlds.values() for row in world.rows(now) if row.key.group_id == group_id]

    def pauses(self) -> dict[str, Pause]:
        """The groups that are paused in every partition of the coordination topic."""
        now = self.log.log_time()
        first, *others = (world.pauses(now) for world in self.worlds.values())
        return {group: pause for group, pause in first.items() if all(group in other for other in others)}

    def offset(self, group_id: str, tp: TopicPartition) -> int | None:
        """Where the group goes on."""
        return self.world_of(tp.topic).offset(group_id, *tp)

    def topic_ids_with(self, group_id: str, tp: TopicPartition, topic_id: str) -> tuple[str, ...]:
        """The ids of the topic that a new position belongs to, and of those before it, the latest first.

        Args:
            group_id: the group.
            tp: the partition.
            topic_id: that of the topic in which the position was looked up. The log may not have it yet: it is new to
                the group then. A broker that is behind may have named a former one.
        """
        known = self.world_of(tp.topic).topic_ids(group_id, *tp)
        return known if topic_id in known else (topic_id, *known)[:REMEMBERED_TOPICS]
