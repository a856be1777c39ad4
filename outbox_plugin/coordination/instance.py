"""One instance: a thread that follows the log, and keeps, claims and releases partitions as log and plan say."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence

from outbox_plugin.coordination.claims import Claim, Place, plan
from outbox_plugin.coordination.events import ClaimEvent, ClaimGained, ClaimLost
from outbox_plugin.coordination.log import CoordinationLog, Entry
from outbox_plugin.coordination.messages import (
    VERSION,
    ClaimingMessages,
    ClaimingPartition,
    Heartbeat,
    Message,
    ReleasingPartition,
)
from outbox_plugin.coordination.timing import Timing
from outbox_plugin.coordination.world import STALE_INTERVALS, Holder, World
from outbox_plugin.errors import LogUnavailable
from outbox_plugin.printable import logger_of

LOGGER = logger_of(__name__)

LISTEN_SECONDS = 0.05
ROUND_SECONDS = 0.2  # Between two looks at what to claim.
METADATA_SECONDS = 30.0


class _Held:
    """A partition that we hold, as far as we have read the log."""

    def __init__(self, claim: Claim, heard: float) -> None:
        self.claim = claim
        self.heard = heard  # The time of our last heartbeat that the log has.
        self.beaten = self.renewed = 0.0  # Monotonic; when we last sent one, and repeated the claim.


class Instance:
    """What `client_id` holds of `topics` in `group_id`. Its methods may be called from any thread."""

    def __init__(
        self,
        log: CoordinationLog,
        me: Holder,
        group_id: str,
        topics: Sequence[str],
        timing: Timing,
        *,
        at_most_once: bool,
        limit: int | None,
        observe: Callable[[ClaimEvent], None],
    ) -> None:
        """`observe` is called on our thread."""
        self.me = me
        self.changed = threading.Condition()  # Guards all below that both threads use.
        self._log = log
        self._group = group_id
        self._topics = topics
        self._timing = timing
        self._at_most_once = at_most_once
        self._limit = limit
        self._observe = observe
        self._since = time.time() - timing.lookback
        self._worlds = {log.partition_of(topic): World(timing.interval, since=self._since) for topic in topics}
        self._held: dict[Place, _Held] = {}
        self._verdicts: dict[tuple[Place, int], bool | None] = {}
        self._error: Exception | None = None
        self._polled = time.monotonic()
        self._stop = threading.Event()
        self._keep = False
        # Of our own thread alone.
        self._read_up_to = dict.fromkeys(self._worlds, -1)
        self._partitions: dict[str, int] = {}
        self._looked_at_metadata = self._looked_at_plan = float("-inf")
        self._waiting: dict[Place, float] = {}  # Claims and releases that the log has not answered yet; since when.
        self._free_since: dict[Place, float] = {}
        self._slow_until: dict[Place, float] = {}
        self._thread = threading.Thread(target=self._run, name=f"outbox-coordination-{me.client_id}", daemon=True)

    def start(self) -> None:
        """Catch up with the log, go on with what our client held, and follow.

        Raises:
            LogUnavailable: Kafka is away.
        """
        self._look_at_topics()
        for entry in self._log.follow(self._worlds, self._since):
            self._apply(entry)
        self._resume()
        self._thread.start()

    def stop(self, *, keep: bool) -> None:
        """Release all, or `keep` it for the next instance of our client; returns when the log has it. Safe twice."""
        self._keep = keep
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    # What the user's thread asks.

    def claims(self) -> dict[Place, Claim]:
        """What we hold now, for one who polls.

        Raises:
            OutboxError: the log can be followed no more; the reason.
        """
        with self.changed:
            self._polled = time.monotonic()
            if self._error is not None:
                raise self._error
        return self.held()

    def held(self) -> dict[Place, Claim]:
        """What we hold now, for one who only looks."""
        with self.changed:
            return {place: held.claim for place, held in self._held.items()}

    def hand_out(self, place: Place, claim: Claim, offset: int) -> bool:
        """Whether the record at `offset` may go to the user, by `claim`; if so it is noted that it did."""
        with self.changed:
            held = self._held.get(place)
            if held is None or held.claim is not claim or offset < claim.position or not self._is_valid(held):
                return False
            if self._at_most_once and offset >= claim.promised:
                return False
            claim.hand_out(offset, keep=not self._at_most_once)
            return True

    def done(self, place: Place, offset: int) -> bool:
        """The record at `offset` is done; whether we still hold its partition."""
        with self.changed:
            held = self._held.get(place)
            if held is None:
                return False
            held.claim.done(offset)
            return True

    def promise(self, ends: dict[Place, tuple[Claim, int]], wait_seconds: float) -> None:
        """Write to the log that we are about to hand out what is below each end, and read that back."""
        asked = [(place, end) for place, (_, end) in ends.items()]
        with self.changed:
            for place, end in asked:
                self._verdicts[place, end] = None
                self._log.send(ClaimingMessages(*self._common(place), end))
            self.changed.wait_for(lambda: all(self._verdicts[each] is not None for each in asked), wait_seconds)
            ours = {place: end for place, end in asked if self._verdicts.pop((place, end))}
        if not self._log.commit(ours, wait=True):  # For those who come when the log has forgotten it.
            return
        with self.changed:
            for place, end in ours.items():
                held, (claim, _) = self._held.get(place), ends[place]
                if held is not None and held.claim is claim:
                    claim.promise(end)

    def _is_valid(self, held: _Held) -> bool:
        return time.time() - held.heard <= STALE_INTERVALS * self._timing.interval

    # Our own thread.

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._turn()
        except Exception as error:
            with self.changed:
                self._error = error
        finally:
            self._leave()

    def _turn(self) -> None:
        for entry in self._log.read(LISTEN_SECONDS):
            self._apply(entry)
        now = time.monotonic()
        if now - self._looked_at_metadata > (METADATA_SECONDS if all(self._partitions.values()) else 1.0):
            self._look_at_topics()
        self._drop_stale()
        self._beat(now)
        if now - self._looked_at_plan > ROUND_SECONDS:
            self._looked_at_plan = now
            self._act(now)

    def _look_at_topics(self) -> None:
        self._looked_at_metadata = time.monotonic()
        for topic in self._topics:
            self._partitions[topic] = max(self._partitions.get(topic, 0), self._log.partitions_of(topic))

    def _apply(self, entry: Entry) -> None:
        """Take in what the log says of our group; what it says of others' is nothing to us."""
        message = entry.message
        self._read_up_to[entry.partition] = entry.offset
        if message.group_id != self._group:
            return
        world = self._worlds[entry.partition]
        counted = world.apply(message, entry.at)
        place = Place(message.topic, message.partition)
        if (message.instance_id, message.client_id) == self.me:
            self._answered(place, message, counted, entry)
        elif place in self._held and world.owner(self._group, *place, entry.at) != self.me:
            self._lose(place, "another instance holds it")
        if self._held and world.paused(self._group, entry.at):
            self._release(list(self._held), "the group is paused")

    def _answered(self, place: Place, message: Message, counted: bool, entry: Entry) -> None:
        """Our own message has come back: what it was worth."""
        if isinstance(message, ClaimingMessages):
            if not counted and place in self._held:
                self._lose(place, "it was not ours when we asked for its messages")
            with self.changed:
                if (place, message.offset) in self._verdicts:
                    self._verdicts[place, message.offset] = counted
                    self.changed.notify_all()
        elif isinstance(message, Heartbeat | ClaimingPartition):
            held = self._held.get(place)
            if held is not None and isinstance(message, Heartbeat):
                if counted:
                    held.heard = min(message.timestamp, entry.at)
                else:
                    self._lose(place, "a heartbeat came too late")
            elif held is None and counted and self._waiting.pop(place, None) is not None:
                self._gain(place, entry)
            elif not counted:
                self._waiting.pop(place, None)
        elif isinstance(message, ReleasingPartition):
            self._waiting.pop(place, None)

    def _gain(self, place: Place, entry: Entry) -> None:
        try:
            offset = self._start_of(place)
        except LogUnavailable as away:  # Nobody hears of us there, and it is free again.
            LOGGER.warning("%s: partition %s of %s is left: %s", self.me.client_id, place.partition, place.topic, away)
            return
        held = _Held(Claim(offset), min(entry.message.timestamp, entry.at))
        held.renewed = time.monotonic()
        with self.changed:
            self._held[place] = held
            self.changed.notify_all()
        self._observe(ClaimGained(place, offset, entry.offset))

    def _start_of(self, place: Place) -> int:
        """Where to go on: the log knows best, then Kafka's own store, then the partition's first record."""
        offset = self._world_of(place).offset(self._group, *place)
        return self._log.committed([place])[place] if offset is None else offset

    def _world_of(self, place: Place) -> World:
        return self._worlds[self._log.partition_of(place.topic)]

    def _owner(self, place: Place) -> Holder | None:
        return self._world_of(place).owner(self._group, *place, time.time())

    def _resume(self) -> None:
        """Go on with what a former instance of our client holds."""
        for place in self._places():
            owner = self._owner(place)
            if owner is not None and owner.client_id == self.me.client_id and len(self._waiting) < self._most():
                self._waiting[place] = time.monotonic()
                self._log.send(Heartbeat(*self._common(place), self._start_of(place)))

    def _most(self) -> float:
        return float("inf") if self._limit is None else self._limit

    def _places(self) -> list[Place]:
        return [Place(topic, number) for topic, count in self._partitions.items() for number in range(count)]

    def _drop_stale(self) -> None:
        for place in [place for place, held in self._held.items() if not self._is_valid(held)]:
            self._lose(place, "its heartbeats did not reach the log")

    def _beat(self, now: float) -> None:
        """Send the heartbeats that are due; what falls behind is released, if somebody else might do better."""
        due = [each for each in self._held.items() if now - each[1].beaten >= self._timing.beat]
        if not due:
            return
        alone = len(self._members()) < 2
        stored: dict[Place, int] = {}
        for place, held in due:
            with self.changed:
                offset = self._offset(held.claim)
                end = self._log.end(place)
                behind = end is not None and held.claim.falls_behind(end) and not alone
            if behind:
                self._slow_until[place] = now + 10 * self._timing.interval
                self._release([place], "it fell behind")
                continue
            held.beaten = now
            if now - held.renewed > self._timing.renewal:
                held.renewed = now
                self._log.send(ClaimingPartition(*self._common(place)))
            self._log.send(Heartbeat(*self._common(place), offset))
            stored[place] = offset
        self._log.commit(stored)
        self._log.ask_for_ends(stored)

    def _offset(self, claim: Claim) -> int:
        return claim.promised if self._at_most_once else claim.offset

    def _members(self) -> dict[Holder, bool]:
        members: dict[Holder, bool] = {}
        for world in self._worlds.values():
            for holder, asks in world.members(self._group, time.time()).items():
                members[holder] = members.get(holder, False) or asks
        return members

    def _act(self, now: float) -> None:
        """Claim, ask and release as the plan says; nothing while the group is paused or nobody polls."""
        if any(world.paused(self._group, time.time()) for world in self._worlds.values()):
            self._release(list(self._held), "the group is paused")
            return
        if now - self._polled > self._timing.idle:
            self._release(list(self._held), f"nobody polled for {self._timing.idle:.0f} s")
            return
        patience = 2 * self._timing.interval
        self._waiting = {place: since for place, since in self._waiting.items() if now - since < patience}
        if self._waiting:
            return
        holders = {place: self._owner(place) for place in self._places()}
        self._free_since = {
            place: self._free_since.get(place, now) for place, holder in holders.items() if holder is None
        }
        if not holders:
            return
        todo = plan(
            self.me,
            holders,
            self._members(),
            limit=self._limit,
            neglected={place for place, since in self._free_since.items() if now - since > patience},
            avoid={place for place, until in self._slow_until.items() if now < until},
        )
        self._release(todo.release, "others have room for it")
        for place in todo.claim:
            self._waiting[place] = now
            self._log.send(ClaimingPartition(*self._common(place)))
        if todo.ask is not None:
            self._looked_at_plan = now + self._timing.beat  # Once is heard by all; let the holder act.
            self._log.send(ClaimingPartition(*self._common(todo.ask)))

    def _release(self, places: Collection[Place], why: str, *, at_the_end: bool = False) -> None:
        """Give up `places`: what was not handed out is handed out by us no more, and the log says where to go on."""
        stored: dict[Place, int] = {}
        for place in places:
            with self.changed:
                stored[place] = self._dropped(place)
            self._waiting[place] = time.monotonic()
            self._log.send(ReleasingPartition(*self._common(place), stored[place]))
            self._tell_lost(place, why)
        self._log.commit(stored, wait=at_the_end)

    def _dropped(self, place: Place) -> int:
        """Hold `place` no more; where another is to go on."""
        claim = self._held.pop(place).claim
        return claim.position if self._at_most_once else claim.offset

    def _lose(self, place: Place, why: str) -> None:
        with self.changed:
            del self._held[place]
        self._tell_lost(place, why)

    def _tell_lost(self, place: Place, why: str) -> None:
        LOGGER.info("%s: partition %s of %s is ours no more: %s", self.me.client_id, place.partition, place.topic, why)
        self._observe(ClaimLost(place, self._read_up_to[self._log.partition_of(place.topic)], why))

    def _leave(self) -> None:
        """Tell the log how far we are, for whoever comes next."""
        if self._keep:
            with self.changed:
                kept = {place: self._dropped(place) for place in list(self._held)}
            for place, offset in kept.items():
                self._log.send(Heartbeat(*self._common(place), offset))
                self._tell_lost(place, "this run ends")
        else:
            self._release(list(self._held), "this run ends", at_the_end=True)

    def _common(self, place: Place) -> tuple[int, int, str, str, str, str, int]:
        return (VERSION, int(time.time()), *self.me, self._group, *place)
