"""The harvester's main loop: receives heartbeats from the leader topic, and lets every shard act on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

from outbox_plugin.core.kafka_ports import Membership
from outbox_plugin.core.leader_heartbeat import LeaderHeartbeat
from outbox_plugin.core.progress import OutboxIdentity
from outbox_plugin.errors import ForeignOutbox, LayoutChanged
from outbox_plugin.relay.runtime import Runtime
from outbox_plugin.relay.shard import Shard

LISTEN_SECONDS = 0.1
# The same for a moment after the start, until we lead all shards: what makes a leader of us may come at any time.
JOIN_SECONDS, LISTEN_WHILE_JOINING_SECONDS = 1.0, 0.01
HAND_OVER_SECONDS = 10.0  # So long the terms may finish what is under way, and so long they may take to end without.
SILENT_SECONDS = 10.0  # Somebody always sends heartbeats; after this long without any, the topic may be gone.
# A turn usually takes a tenth of this. If one takes longer, this process was stopped, and does not know what happened
# since. If the turn before took as long, the machine is slow: it would never lead if each turn counted as a stop.
ASLEEP_SECONDS = 1.0
OLD_LAYOUT_SECONDS = 10.0  # By then, every leader of an earlier layout has noticed that it is outdated.


class Supervisor:
    """Runs the shards of one outbox on one thread, the caller's."""

    def __init__(
        self,
        membership: Membership,
        shards: Sequence[Shard],
        identity: OutboxIdentity,
        layout: int,
        runtime: Runtime,
        *,
        is_new: bool = False,
    ) -> None:
        """Nothing is done yet.

        Args:
            membership: our membership in the leader group.
            shards: those of the outbox.
            identity: of the outbox.
            layout: the number of the layout that the shards are of.
            runtime: time and threads.
            is_new: no harvester has ever led this outbox, so its group may belong to another outbox by mistake.
        """
        self._membership = membership
        self._is_new = is_new
        self._shards = {shard.number: shard for shard in shards}
        self._identity = identity
        self._layout = layout
        self._clock = runtime.now
        self._turned_at = self._silent_since = runtime.now()
        self._joins_until = runtime.now() + JOIN_SECONDS
        self._slow = False  # The last turn took long.
        self._others_lead_since: float | None = None  # Under an earlier layout, and nobody under ours.

    def run(self, stopped: Callable[[], bool]) -> None:
        """Follow and lead until `stopped`, then hand everything over.

        Raises:
            LayoutChanged: the outbox has another number of shards now.
            TopicMissing: somebody deleted one of the group's own topics, or recreated the progress topic.
            ForeignOutbox: harvesters of another outbox use our group, and were there first.
        """
        try:
            while not stopped():
                self._turn()
        finally:
            self._hand_over()

    def _turn(self) -> None:
        self._ask_ownership()
        self._listen()
        now = self._clock()
        self._check_topics(now)
        self._notice_stop(now)
        for shard in self._shards.values():
            shard.step(now)
            if shard.begin_again is not None:
                raise shard.begin_again

    def _ask_ownership(self) -> None:
        owned = self._membership.owned()
        for shard in self._shards.values():
            shard.election.set_ownership(shard.number in owned)

    def _listen(self) -> None:
        is_joining = self._clock() < self._joins_until and not all(shard.leads for shard in self._shards.values())
        for heartbeat in self._membership.receive(LISTEN_WHILE_JOINING_SECONDS if is_joining else LISTEN_SECONDS):
            self._silent_since = self._clock()
            self._is_new = self._is_new and heartbeat.phase != "leader"
            heard_by = self._shards.get(heartbeat.shard)
            if heard_by is not None and self._is_of_our_layout(heartbeat):
                heard_by.receive(heartbeat, self._clock())
        self._take_vacant(self._membership.take_vacant())
        if self._is_new:
            self._refuse_other_outbox(self._membership.take_unsigned_heartbeat())

    def _take_vacant(self, vacant: Set[int]) -> None:
        """Lead what nobody leads, without listening first, if it is the only shard.

        Of several, each harvester waits for its own: the first one to start would lead all of them.
        """
        if len(self._shards) == 1:
            for number in vacant & self._shards.keys():
                self._shards[number].election.assume_nobody_leads(self._clock())

    def _check_topics(self, now: float) -> None:
        if now - self._silent_since > SILENT_SECONDS:
            self._silent_since = now
            self._membership.check_topic()
        self._membership.check_progress_topic()

    def _notice_stop(self, now: float) -> None:
        """If this process was stopped, another may lead each shard by now: listen first."""
        was_slow, self._slow = self._slow, now - self._turned_at > ASLEEP_SECONDS
        if self._slow and not was_slow:
            for shard in self._shards.values():
                shard.election.assume_another_leads(now)
        self._turned_at = now

    def _is_of_our_layout(self, heartbeat: LeaderHeartbeat) -> bool:
        if heartbeat.phase == "leader":
            self._compare_layout(heartbeat)
        return heartbeat.layout == self._layout

    def _refuse_other_outbox(self, unsigned: LeaderHeartbeat | None) -> None:
        """Raise ForeignOutbox if another outbox seems to use the group, and nobody has ever led this one.

        Once somebody has led it, anyone who may write to the topic could otherwise end every standby.
        """
        if unsigned is not None and unsigned.phase == "leader" and not self._may_be_ours(unsigned):
            raise ForeignOutbox(
                f"the group is in use for another outbox, {unsigned.place}, by {unsigned.instance}; this one is "
                f"{self._identity.place}. Give it an OUTBOX_GROUP of its own"
            )

    def _may_be_ours(self, unsigned: LeaderHeartbeat) -> bool:
        """Whether an earlier version, which does not sign, may have sent it for this outbox.

        A TRUNCATE makes the outbox another incarnation in the same place, and some versions name places otherwise.
        """
        return unsigned.place == self._identity.place or unsigned.incarnation == self._identity.incarnation

    def _compare_layout(self, heartbeat: LeaderHeartbeat) -> None:
        """Raise LayoutChanged if a leader, whose layout the database has confirmed, shows that ours is wrong.

        A leader under an earlier layout notices by itself that it is outdated. If it does not, a backup was restored,
        and its layout is the outbox's.
        """
        if heartbeat.layout == self._layout:
            self._others_lead_since = None
            return
        now = self._clock()
        self._others_lead_since = self._others_lead_since or now
        if heartbeat.layout > self._layout or now - self._others_lead_since > OLD_LAYOUT_SECONDS:
            raise LayoutChanged(f"{heartbeat.instance} knows of another number of shards")

    def _hand_over(self) -> None:
        """End all terms and resign. Those that wait for servers are cut short, all at the same time."""
        shards = list(self._shards.values())
        for shard in shards:
            shard.stop()
        held_up = self._resign_ended(shards)
        for shard in held_up:
            shard.abandon()
        for shard in self._resign_ended(held_up):
            shard.resign(self._clock())
        self._membership.leave(timeout_seconds=1.0)

    def _resign_ended(self, shards: Sequence[Shard]) -> Sequence[Shard]:
        """Resign each shard as soon as its term has ended. Returns those whose terms last longer than they may."""
        deadline = self._clock() + HAND_OVER_SECONDS
        running = shards
        while running and self._clock() < deadline:
            ended = [shard for shard in running if shard.await_end(LISTEN_SECONDS / len(running))]
            for shard in ended:
                shard.resign(self._clock())
            running = [shard for shard in running if shard not in ended]
        return running
